"""Engines in subprocesses: any combination of runner (V1, V2 interpreted) and vLLM release, and what they drafted."""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from make_vllm033 import alone

from vllm_lilicorr.model.checkpoint import load_draft
from vllm_lilicorr.near_tie import Comparison
from vllm_lilicorr.reference import drafts_at
from vllm_lilicorr.target import load_target

HERE = Path(__file__).parent
RELEASES = ("0.32", "0.33")
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
    # One thread wherever it finds room: bound to a core, it would share that core with another test's.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}


def environment(release: str = "0.32", **extra: str) -> dict[str, str]:
    """Return the environment of a vLLM process of that release; skips the test where 0.33 cannot be made."""
    env = {**os.environ, **ENVIRONMENT, **extra}
    if release == "0.33":
        made = subprocess.run([sys.executable, str(HERE / "make_vllm033.py")], capture_output=True, text=True)
        if made.returncode:
            pytest.skip(f"vLLM 0.33 cannot be made here (no network?): {made.stderr.strip()[-200:]}")
        folder = made.stdout.split()[-1]
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, env.get("PYTHONPATH"))))
        # Which features a model class has takes vLLM a process to find out, and it keeps one release's answer: two releases
        # in one cache would each forget the other's.
        env["VLLM_CACHE_ROOT"] = f"{folder}-cache"
    return env


@dataclass
class Run:
    """What an engine did: outputs a phase, request by request, and the blocks each request drafted."""

    result: dict[str, Any]
    trace: list[dict[str, Any]]
    phases: list[dict[str, Any]]

    def tokens(self, phase: int) -> list[list[int]]:
        return [out[0] for out in self.result["phases"][phase]["tokens"]]

    def cached(self, phase: int) -> list[int]:
        return self.result["phases"][phase]["cached"]

    def blocks(self, phase: int, index: int) -> list[dict[str, Any]]:
        number = self.result["first_request"][phase] + index
        return [block for block in self.trace if re.match(rf"{number}(-|$)", block["request"])]

    def sequence(self, phase: int, index: int) -> list[int]:
        return self.phases[phase]["prompts"][index] + self.tokens(phase)[index]

    def acceptance_length(self) -> float:
        """Return tau as vLLM's own counters give it."""
        metrics = self.result["metrics"]
        return (metrics["num_accepted_tokens"] + metrics["num_drafts"]) / metrics["num_drafts"]


def run(
    target: Path,
    draft: Path | None,
    phases: list[dict[str, Any]],
    *,
    runner: str = "v1",
    release: str = "0.32",
    speculative: dict[str, Any] | None = None,
    env: dict[str, str] | None = None,
    timeout: float = 900,
    falsify: bool = False,
    **engine: Any,
) -> Run:
    """Run one engine through `phases` and return what it did; AssertionError with its output when it dies."""
    spec = None if draft is None else {"model": str(draft), **(speculative or {})}
    options = {
        "model": str(target), "dtype": "float32", "enforce_eager": True, "max_model_len": 256, "max_num_seqs": 8,
        "disable_log_stats": False, "speculative_config": spec, **engine,
    }  # fmt: skip
    job = {"runner": runner, "engine": options, "phases": phases, "falsify": falsify}
    extra = env or {}
    # Tests of one module may be spread over processes: an engine that another one has run is not run again.
    digest = hashlib.sha256(json.dumps([job, release, extra], sort_keys=True).encode()).hexdigest()
    kept = _results_folder() / f"{digest}.json"
    with alone(kept):
        if not kept.exists():
            kept.write_text(json.dumps(_run(job, environment(release, **extra), timeout)))
    result, blocks = json.loads(kept.read_text())
    if result["version"].rpartition(".")[0] != release:
        raise AssertionError(f"asked for vLLM {release}, ran {result['version']}")
    return Run(result, blocks, phases)


def _results_folder() -> Path:
    """Return a folder that the processes of this test run share."""
    name = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    folder = Path(tempfile.gettempdir(), f"vllm-lilicorr-engines-{name}")
    folder.mkdir(exist_ok=True)
    if "PYTEST_XDIST_TESTRUNUID" not in os.environ:  # with several processes, nobody knows who is the last
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _run(job: dict[str, Any], env: dict[str, str], timeout: float) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.jsonl")
        process = subprocess.run(
            [sys.executable, str(HERE / "driver.py")], input=json.dumps({**job, "trace": str(trace)}), env=env, text=True,
            capture_output=True, timeout=timeout,
        )  # fmt: skip
        lines = [line for line in process.stdout.splitlines() if line.startswith("RESULT ")]
        assert lines, f"the engine died:\n{process.stdout[-3000:]}\n{process.stderr[-6000:]}"
        blocks = [json.loads(line) for line in trace.read_text().splitlines()] if trace.exists() else []
    return json.loads(lines[0].removeprefix("RESULT ")), blocks


def compare_outputs(target: Path, runs: list[tuple[str, list[int], list[int]]]) -> Comparison:
    """Compare (name, prompt, output) with the target's own greedy continuation of the same length, under the near-tie rule."""
    loaded = load_target(target)
    tally = Comparison()
    for name, prompt, output in runs:
        ids = torch.tensor([prompt + output])
        states = loaded.forward(ids, torch.arange(ids.shape[1])[None])
        logits = loaded.logits(states.final)[0, len(prompt) - 1 : -1].float()
        best, second = logits.topk(2, dim=-1).values.unbind(-1)
        # Teacher-forced: each token of the output is what the target would choose behind the ones before it.
        tally.add(name, logits.argmax(-1).tolist(), output, (best - second).tolist())
    return tally


def compare_drafts(
    target: Path, draft: Path, done: Run, phase: int, rule: str = "greedy", slots: int | None = None
) -> Comparison:
    """Compare every block drafted in a phase with the reference's, teacher-forced with the served tokens."""
    loaded = load_draft(draft, dtype=torch.float32)
    model = load_target(target, loaded.config.target_layer_ids)
    tally = Comparison()
    for index in range(len(done.phases[phase]["prompts"])):
        sequence = done.sequence(phase, index)
        blocks = [block for block in done.blocks(phase, index) if block["anchor"] < len(sequence) and block["drafts"]]
        assert blocks, f"request {index} of phase {phase} drafted nothing"
        expected = drafts_at(model, loaded, sequence, [block["anchor"] for block in blocks], rule, slots)
        for at, block in enumerate(blocks):
            margins = [float(expected.margin[at])] * len(block["drafts"])
            tally.add(f"request {index} at {block['anchor']}", expected.tokens[at].tolist(), block["drafts"], margins)
    return tally
