"""The demo: what it prints, what it leaves behind, what it says when something is missing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from engines import environment

from vllm_lilicorr import demo
from vllm_lilicorr.demo import Agreement, Answer, Run
from vllm_lilicorr.errors import UserError


def run(name: str, seconds: float, drafts: float, accepted: float) -> Run:
    answers = [Answer(kind, [1], [5] * 40, seconds) for kind in ("maths", "chat")]
    return Run(name, answers, {"maths": drafts, "chat": drafts}, {"maths": accepted, "chat": accepted / 2})


def test_the_table_takes_every_ratio_to_the_run_without_drafts() -> None:
    text = demo.report([run("LiLiCorr", 2.0, 20, 20), run("no drafts", 3.0, 0, 0)], [Agreement(2, 1, 1)])
    ours, plain = text.splitlines()[2:4]
    # 40 tokens in 2 s against 3 s; (40 + 30) / 40 tokens a step, each of which takes 1.75 / 1.5 of a plain one.
    assert ours.split() == ["LiLiCorr", *"20.0 1.50x 1.50x 1.50x 1.75 1.17x yes (1 of 2, 1 part at a near-tie)".split()]
    assert plain.split() == ["no", "drafts", *"13.3 1.00x 1.00x 1.00x 1.00x".split()]
    assert "NO (1 of 2)" in demo.report([run("LiLiCorr", 2.0, 20, 20), run("no drafts", 3.0, 0, 0)], [Agreement(2, 1, 0)])


def test_candidates_are_drawn_in_what_the_processor_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    for flags, dtype, drawn in (
        ("flags: avx512f avx512_bf16", "float32", "bfloat16"),
        ("flags: avx512_bf16 avx512_vnni", "float32", "int8"),
        ("flags: avx_vnni", "float32", "auto"),
        ("flags: avx2", "float32", "auto"),
        ("flags: avx512_bf16 amx_int8", "bfloat16", "auto"),
    ):
        monkeypatch.setattr(Path, "read_text", lambda *_, flags=flags, **__: flags)
        assert demo._draft_dtype(dtype) == drawn


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "x"], "--target and --draft belong together"),
        (["--limit", "0"], "--limit: must be at least 1"),
        (["--target", "nothing", "--draft", "nowhere"], "nowhere"),
    ],
)
def test_what_cannot_run_is_said_before_a_server_starts(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        demo.main(arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-speculative-tokens", "8"], "must lie in 1..7"),
        (["--num-speculative-tokens", "0"], "must lie in 1..7"),
        (["--json", "/dev/null/out.json"], "cannot be written"),
    ],
)
def test_options_that_do_not_fit_the_drafter_are_too(pair: tuple[Path, Path], arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        demo.main(["--target", str(pair[0]), "--draft", str(pair[1]), *arguments])


def command(pair: tuple[Path, Path], prompts: Path, *options: str) -> list[str]:
    prompts.write_text("\n".join(json.dumps({"turns": [text]}) for text in ("abc", "What is it?", "0123456789")) + "\n")
    models = ["--target", str(pair[0]), "--draft", str(pair[1]), "--max-model-len", "256", "--prompts", str(prompts)]
    return [sys.executable, "-m", "vllm_lilicorr.demo", *models, *options]


def on_one_core(group: str) -> dict[str, str]:
    """Return the environment of a demo that `servers_of` finds. It would take every core; here other tests run beside it."""
    return environment(VLLM_CPU_OMP_THREADS_BIND=str(min(os.sched_getaffinity(0))), DEMO_UNDER_TEST=group)


@contextmanager
def started(arguments: list[str], environ: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Run the demo; a test that fails or times out ends it as a user would, and with it its server."""
    # What runs in a shell's background ignores Ctrl-C, and so would the demo.
    process = subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.communicate()


def servers_of(group: str) -> list[str]:
    """Return the command lines of live processes that descend from, or were started in a session by, the demo."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            variables = (process / "environ").read_bytes()
            line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if f"DEMO_UNDER_TEST={group}".encode() in variables.split(b"\0") and line:
            found.append(line)
    return found


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_demo_serves_three_ways_and_shows_that_the_text_is_the_same(pair: tuple[Path, Path], tmp_path: Path) -> None:
    options = ("--max-tokens", "24", "--json", f"{tmp_path}/out.json")
    with started(command(pair, tmp_path / "few.jsonl", *options), on_one_core("1")) as process:
        output, errors = process.communicate()
    assert process.returncode == 0, errors[-3000:]
    assert re.search(r"^LiLiCorr .* yes \(\d of 3", output, re.M), output
    assert re.search(r"^head off .* yes \(\d of 3", output, re.M), output
    runs = {run["name"]: run for run in json.loads((tmp_path / "out.json").read_text())}
    assert runs["LiLiCorr"]["accepted"]["few"] > 0 and not runs["no drafts"]["drafts"]["few"]
    assert not servers_of("1")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ctrl_c_leaves_no_process(pair: tuple[Path, Path], tmp_path: Path) -> None:
    with started(command(pair, tmp_path / "few.jsonl"), on_one_core("2")) as process:
        while len(servers_of("2")) < 2:
            assert process.poll() is None, process.communicate()
            time.sleep(0.5)
        time.sleep(5)
        os.kill(process.pid, signal.SIGINT)
        _, errors = process.communicate()
    assert process.returncode == 130, errors[-2000:]
    assert "Traceback" not in errors
    assert not servers_of("2")
