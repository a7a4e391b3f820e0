"""Whole runs, launched as a user launches them. One launch holds as many runs as it can: starting costs more than stepping."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
STAGES = range(4)
STEPS, SAVE_EVERY = 20, 8
HEADS = ("dflash2", "dspark", "domino")
ARMS = {**{head: (f"draft.head={head}",) for head in HEADS}, "conv": ("draft.conv=true",)}
# With Adam's usual eps a gradient that is nothing but rounding moves its weight as far as any other, to the side of its sign.
FP32 = ("run.precision=fp32", "run.save_every=1", "optimizer.eps=1e-3", "optimizer.lr=1e-3")
HEADS_RUN = (*FP32, "run.micro_batch_size=4", "run.max_steps=3", "objective.train_vocab=32")
# One slot a block and as many blocks a conversation: however the micro-steps are cut, their mean is the batch's.
EVEN = ("draft.head=dflash", "draft.block_size=2", "data.anchors=4")
pytestmark = pytest.mark.slow


def environment(**more: str) -> dict[str, str]:
    return os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"} | more


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def start(ranks: int, script: Path, *arguments: str, **options: Any) -> list[subprocess.Popen[str]]:
    """Start one process a rank, as a launcher would; DeepSpeed's own launcher imports everything twice more."""
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = []
    for rank in range(ranks):
        printed = tempfile.TemporaryFile("w+")  # a pipe nobody reads would stop a run that prints much
        process = subprocess.Popen(
            [sys.executable, str(script), *arguments],
            env=environment(RANK=str(rank), LOCAL_RANK=str(rank), **shared),
            stdout=printed,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            **options,
        )
        process.printed = printed  # type: ignore[attr-defined]
        processes.append(process)
    return processes


def finish(processes: list[subprocess.Popen[str]]) -> None:
    """Wait for all ranks; the others are killed when one fails."""
    try:
        while all(process.poll() in (None, 0) for process in processes) and any(process.poll() is None for process in processes):
            time.sleep(0.1)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
    printed = "".join(_printed(process) for process in processes)
    assert not any(process.returncode for process in processes), printed[-8000:]


def _printed(process: subprocess.Popen[str]) -> str:
    process.wait()
    file = process.printed  # type: ignore[attr-defined]
    file.seek(0)
    return file.read()


def run_plan(tmp_path: Path, plan: list[dict[str, Any]], ranks: int) -> None:
    path = tmp_path / f"plan-{time.monotonic_ns()}.json"
    path.write_text(json.dumps(plan))
    finish(start(ranks, ROOT / "tests/trainer/worker.py", str(path)))


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def convert(output: Path, step: int) -> None:
    """Put a checkpoint in the universal format in force, as the manual says."""
    folder = output / "checkpoints"
    name = checkpoint_name(step)
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", str(folder / name)]
    subprocess.run([*command, "--output_folder", str(folder / f"universal-{step}")], check=True, capture_output=True)
    shutil.copy(folder / name / "run.json", folder / f"universal-{step}")
    (folder / "latest").write_text(f"universal-{step}\n")


def metrics(output: Path) -> list[dict[str, Any]]:
    return [record for record in map(json.loads, (output / "metrics.jsonl").read_text().splitlines()) if "loss" in record]


def losses(output: Path) -> list[float]:
    return [record["loss"] for record in metrics(output)]


def stage_file(stage: int) -> str:
    return f"deepspeed.config={ROOT}/configs/deepspeed/zero{stage}.json"


def tensors(value: Any, path: str = "") -> dict[str, torch.Tensor]:
    """Return every tensor inside nested containers by its path."""
    if isinstance(value, torch.Tensor):
        return {path: value}
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)  # type: ignore[assignment]
    else:
        return {}
    return {name: tensor for key, item in items for name, tensor in tensors(item, f"{path}.{key}").items()}


def checkpoint_tensors(output: Path, step: int) -> dict[str, torch.Tensor]:
    """Return every tensor of a checkpoint: fp32 master weights, moments, the module's weights."""
    found = {}
    for file in sorted((output / "checkpoints" / checkpoint_name(step)).glob("*.pt")):
        found |= tensors(torch.load(file, map_location="cpu", weights_only=False), file.name)
    return found


@pytest.fixture(scope="module")
def runs(tiny_target, tiny_corpus, train_settings, tmp_path_factory):
    """Straight runs of 20 steps on 2 ranks, stages 0-3, and the same killed and resumed; fp32 runs on 1 and 2 ranks; and one
    that changes from 2 ranks to 1 and back."""
    folder = tmp_path_factory.mktemp("runs")
    config = str(
        train_settings(
            tiny_target, tiny_corpus, folder, run={"max_steps": STEPS, "save_every": SAVE_EVERY, "keep_last": 9},
            data={"holdout": 0},
        )
    )  # fmt: skip

    def entry(name: str, *overrides: str, **extra: Any) -> dict[str, Any]:
        return {"config": config, "overrides": [f"run.output={folder / name}", *overrides]} | extra

    # Killed with -9 at a random step after the save; what was trained since is lost and will be repeated.
    killed = random.Random(7).sample(range(SAVE_EVERY + 1, 2 * SAVE_EVERY), len(STAGES))
    fp32 = [*FP32, "run.max_steps=2"]
    on_two, on_one = "run.micro_batch_size=2", "run.micro_batch_size=4"
    moved = [stage_file(1), *EVEN, *FP32, on_two, "run.max_steps=6", "run.save_every=2"]
    # Stage 3 comes last in every process: it replaces torch's linear for good, and sums then round differently.
    run_plan(
        folder,
        [entry(f"cut{s}", stage_file(s), kill_at=killed[s], port=free_port()) for s in STAGES]
        + [entry(f"straight{s}", stage_file(s)) for s in (0, 1, 2)]
        + [entry("two", *fp32, on_two, stage_file(1))]
        + [entry(f"{arm}2", *ARMS[arm], stage_file(1), *HEADS_RUN, on_two) for arm in ARMS]
        + [entry("moved", *moved, "run.stop_after=2"), entry("unmoved", *moved)]
        + [entry("straight3", stage_file(3))]
        + [entry("partitioned", *fp32, on_two, stage_file(1), "data.target_zero=true")],
        ranks=2,
    )
    assert [len(losses(folder / f"cut{s}")) for s in STAGES] == killed
    convert(folder / "moved", 2)
    run_plan(
        folder,
        [entry("one", *fp32, on_one, stage_file(1))]
        + [entry(f"single{s}", stage_file(s), "run.micro_batch_size=2") for s in STAGES[:3]]
        + [entry(f"{arm}1", *ARMS[arm], stage_file(1), *HEADS_RUN) for arm in ARMS]
        + [entry("moved", *moved, "run.stop_after=4", "deepspeed.universal=true")]
        + [entry("single3", stage_file(3), "run.micro_batch_size=2")]
        + [entry(f"{head}3", *ARMS[head], stage_file(3), *HEADS_RUN) for head in HEADS],
        ranks=1,
    )
    convert(folder / "moved", 4)
    run_plan(
        folder,
        [entry("moved", *moved, "deepspeed.universal=true")] + [entry(f"cut{s}", stage_file(s)) for s in STAGES],
        ranks=2,
    )
    return folder


def gradients(output: Path, steps: int) -> list[torch.Tensor]:
    """Return each step's clipped gradient of all parameters, the ranks' partitions side by side, from Adam's first moments."""
    found, before = [], torch.zeros(())
    for step in range(1, steps + 1):
        saved = checkpoint_tensors(output, step)
        moments = torch.cat([saved[name].flatten() for name in sorted(saved) if name.endswith("exp_avg")])
        found.append((moments - 0.9 * before) / 0.1)
        before = moments
    return found


@pytest.mark.parametrize(("on_one", "on_two", "steps"), [("one", "two", 2), *((f"{arm}1", f"{arm}2", 3) for arm in ARMS)])
def test_one_rank_with_four_conversations_equals_two_ranks_with_two(on_one, on_two, steps, runs):
    """fp32: the same losses and gradients; a mean over each rank would differ wherever ranks have unequal prefixes."""
    one, two = metrics(runs / on_one), metrics(runs / on_two)
    measured = one[0].keys() - {"grad_norm", "tokens_per_s", "blocks_per_s", "seconds", "memory_bytes"}
    assert {"loss", "selected_prefix"} < measured and len(one) == steps
    for a, b in zip(one, two, strict=True):
        for key in measured:
            assert a[key] == pytest.approx(b[key], rel=1e-5, abs=1e-6), key
    assert one[0]["grad_norm"] == pytest.approx(two[0]["grad_norm"], rel=1e-5)
    for ours, theirs in zip(*(gradients(runs / name, steps) for name in (on_one, on_two)), strict=True):
        length = min(len(ours), len(theirs))  # partitions are padded to equal sizes
        assert length > 10_000 and not ours[length:].any() and not theirs[length:].any()
        assert (ours[:length] - theirs[:length]).abs().max() <= 1e-5 * ours.abs().max()


def test_a_run_that_goes_from_two_ranks_to_one_and_back_is_the_straight_run(runs):
    """Through the universal format, moments and master weights with it."""
    straight, moved = metrics(runs / "unmoved"), metrics(runs / "moved")
    assert [record["step"] for record in moved] == [1, 2, 3, 4, 5, 6]
    for key in ("loss", "lr", "grad_norm"):
        assert [record[key] for record in moved] == pytest.approx([record[key] for record in straight], rel=1e-5), key
    sizes = [json.loads((runs / f"moved/checkpoints/{checkpoint_name(s)}/run.json").read_text())["world_size"] for s in (2, 4, 6)]
    assert sizes == [2, 1, 2]


def test_a_target_partitioned_over_the_ranks_gives_the_same_losses(runs):
    assert losses(runs / "partitioned") == pytest.approx(losses(runs / "two"), rel=1e-5)


def test_stages_and_rank_counts_agree_over_twenty_steps_within_bf16_noise(runs):
    reference = losses(runs / "straight1")
    assert len(reference) == STEPS and reference[-1] < reference[0]
    for name in [f"straight{s}" for s in STAGES] + [f"single{s}" for s in STAGES]:
        for step, (a, b) in enumerate(zip(losses(runs / name), reference, strict=True)):
            assert a == pytest.approx(b, rel=3e-2), f"{name}, step {step + 1}"


@pytest.mark.parametrize("head", HEADS)
def test_partitioned_weights_of_every_head_give_the_same_losses(head, runs):
    """Some losses read a head's table without calling its module; stage 3 has to gather it all the same."""
    assert losses(runs / f"{head}3") == pytest.approx(losses(runs / f"{head}1"), rel=1e-5)


@pytest.mark.parametrize("stage", STAGES)
def test_a_resumed_run_is_the_straight_run(stage, runs):
    straight, resumed = metrics(runs / f"straight{stage}"), metrics(runs / f"cut{stage}")
    assert [record["step"] for record in resumed] == list(range(1, STEPS + 1))
    for key in ("loss", "dflash", "ce", "dist", "lr", "grad_norm"):
        a, b = ([record[key] for record in run] for run in (straight, resumed))
        assert a == (b if stage < 3 else pytest.approx(b, rel=1e-6)), key
    if stage == 3:
        return
    ours, theirs = checkpoint_tensors(runs / f"cut{stage}", STEPS), checkpoint_tensors(runs / f"straight{stage}", STEPS)
    assert ours.keys() == theirs.keys()
    masters = [name for name, tensor in ours.items() if tensor.dtype == torch.float32 and tensor.numel() > 1000]
    assert masters, "fp32 master weights and moments are in the checkpoint"
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name
    assert any((ours[name].bfloat16().float() != ours[name]).any() for name in masters), "the master copy is not rounded to bf16"
