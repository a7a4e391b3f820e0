"""The training objective against a naive one, and where a training step's time goes.

`bench train` times the objective between the backbone's slot states and its loss, forward and backward, on one batch:
log-probabilities and candidates from the frozen lm_head, the penalty's target terms, the losses. The naive side
materialises fp32 log-softmax over the vocabulary, computes the target's full logits, and loops over slots. The
backbone and the head's tower are the same on both sides and are left out (a cheap stand-in scores the candidates).

`bench train --profile CONFIG` runs a few steps of a real configuration and prints the parts of a step.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_lilicorr.errors import UserError

TOPK, GAMMA, LAMBDA, BETA = 8, 0.25, 1.0, 7.0


@dataclass(frozen=True)
class Geometry:
    """blocks x slots rows of width `hidden` over a vocabulary of `vocab` tokens."""

    blocks: int
    slots: int
    hidden: int
    vocab: int


GEOMETRIES = {"smollm2": Geometry(64, 15, 576, 49_152), "qwen3-8b-slice": Geometry(32, 15, 4096, 151_936)}
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
GEMMS = {"ours": 2, "naive": 3}
"""Products over the vocabulary a step: logits and expected embedding; logits, their gradient, and the target's logits."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--geometry", choices=[*GEOMETRIES, "all"], default="all")
    parser.add_argument("--dtype", choices=[*DTYPES, "both"], default="both")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the results as JSON")
    parser.add_argument("--profile", metavar="CONFIG", help="print the parts of a step of this training configuration instead")
    parser.add_argument("--steps", type=int, default=10, help="with --profile: steps to average over")
    parser.add_argument("--set", nargs="*", default=[], metavar="key.sub=value", help="with --profile: configuration keys to set")
    parser.add_argument("--side", choices=list(GEMMS), help=argparse.SUPPRESS)  # one measurement, in a process of its own


def main(args: argparse.Namespace) -> int:
    torch.set_num_threads(args.threads)
    if args.profile:
        return profile(args.profile, args.set, args.steps)
    if args.side:
        print(json.dumps(measure(GEOMETRIES[args.geometry], DTYPES[args.dtype], args.side, args.repeats)))
        return 0
    results = []
    print(
        "| geometry | dtype | naive s | ours s | time ratio | naive MiB | ours MiB | memory ratio | vocabulary GEMMs naive/ours |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for geometry in GEOMETRIES if args.geometry == "all" else [args.geometry]:
        for dtype in DTYPES if args.dtype == "both" else [args.dtype]:
            sides = {side: _in_own_process(geometry, dtype, side, args) for side in GEMMS}
            check_same(geometry, dtype, sides)
            ours, naive = sides["ours"], sides["naive"]
            results.append({"geometry": geometry, "dtype": dtype, **sides})
            time_ratio = ours["seconds"] / naive["seconds"]
            print(
                f"| {geometry} | {dtype} | {naive['seconds']:.3f} | {ours['seconds']:.3f} | {time_ratio:.2f} "
                f"| {naive['extra_bytes'] / 2**20:.0f} | {ours['extra_bytes'] / 2**20:.0f} "
                f"| {ours['extra_bytes'] / naive['extra_bytes']:.2f} | {GEMMS['naive']}/{GEMMS['ours']} |",
                flush=True,
            )
    if args.json:
        machine = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__, "threads": args.threads}
        args.json.write_text(json.dumps({"command": sys.argv, **machine, "results": results}, indent=2) + "\n")
    return 0


def _in_own_process(geometry: str, dtype: str, side: str, args: argparse.Namespace) -> dict[str, Any]:
    """A fresh process a side, so that neither inherits the other's freed memory."""
    options = ["--geometry", geometry, "--dtype", dtype, "--repeats", str(args.repeats), "--threads", str(args.threads)]
    command = [sys.executable, "-m", "vllm_lilicorr.bench", "train", *options, "--side", side]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UserError(
            f"the {side} side of {geometry} in {dtype} failed ({done.stderr.strip().splitlines()[-1:]}); is there memory?"
        )
    return json.loads(done.stdout.splitlines()[-1])


def check_same(geometry: str, dtype: str, sides: dict[str, dict[str, Any]]) -> None:
    """Raise UserError unless both sides computed the same loss and gradient, to the dtype's rounding."""
    tolerance = 1e-3 if dtype == "float32" else 3e-2
    for key in ("loss", "gradient_norm"):
        ours, naive = sides["ours"][key], sides["naive"][key]
        if not math.isclose(ours, naive, rel_tol=tolerance):
            raise UserError(f"{geometry} in {dtype}: {key} is {ours} here and {naive} in the naive objective; they must agree")


def problem(geometry: Geometry, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Return one batch: hidden, final [R, H], lm_head [V, H], labels [R], scales [2] (the stand-in head's weights)."""
    generator = torch.Generator(device=device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    rows = geometry.blocks * geometry.slots
    lm_head = normal(geometry.vocab, geometry.hidden).mul_(geometry.hidden**-0.5).to(dtype)
    labels = torch.randint(0, geometry.vocab, (rows,), generator=generator, device=device)
    # States that lean towards their label, so that prefixes are neither empty nor whole.
    lean = 12.0 * torch.rand(rows, 1, generator=generator, device=device)
    hidden = (normal(rows, geometry.hidden) + lean * lm_head[labels].float()).to(dtype)
    final = (normal(rows, geometry.hidden) + 8.0 * lm_head[labels].float()).to(dtype)
    scales = torch.tensor([0.5, 0.8], device=device)
    return {"hidden": hidden, "final": final, "lm_head": lm_head, "labels": labels, "scales": scales}


def stand_in_scores(log_probs: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return start [N, K] and pair [N, S-1, K, K] that depend on every candidate's log-probability."""
    start = scales[0] * log_probs[:, 0]
    pair = scales[0] * log_probs[:, :-1, :, None] + scales[1] * log_probs[:, 1:, None, :]
    return start, pair


def ours(data: dict[str, Tensor], blocks: int) -> Tensor:
    from vllm_lilicorr.trainer import losses
    from vllm_lilicorr.trainer.token_log_probs import token_log_probs

    found = token_log_probs(data["hidden"], data["lm_head"], data["labels"], TOPK)
    labels = data["labels"].view(blocks, -1)
    ids, log_probs = (x.view(blocks, -1, TOPK) for x in (found.ids, found.log_probs))
    truth, covered = losses.ground_truth_candidates(ids, labels)
    prefix = losses.leading_run(covered)
    start, pair = stand_in_scores(log_probs, data["scales"])
    scores = losses.teacher_forced_scores(start, pair, truth)
    costs = torch.zeros_like(scores)
    costs[prefix] = losses.target_costs(
        data["final"].view(blocks, -1, data["final"].shape[-1])[prefix], data["lm_head"], labels[prefix], ids[prefix]
    )
    weights = losses.position_weights(labels.shape[1], BETA, labels.device)
    dflash = -(found.target.view(blocks, -1) * weights).sum() / (weights.sum() * blocks)
    head = losses.cross_entropy_sum(scores, truth, prefix) + LAMBDA * losses.distractor_sum(scores, costs, prefix)
    return dflash + GAMMA * head / prefix.sum().clamp_min(1)


def naive(data: dict[str, Tensor], blocks: int) -> Tensor:
    """The same loss with everything materialised and a loop over slots."""
    labels = data["labels"].view(blocks, -1)
    slots = labels.shape[1]
    log_probs = (data["hidden"] @ data["lm_head"].t()).float().log_softmax(-1).view(blocks, slots, -1)
    with torch.no_grad():
        target_log_probs = (data["final"] @ data["lm_head"].t()).float().log_softmax(-1).view(blocks, slots, -1)
    top, ids = log_probs.topk(TOPK, -1)
    start, pair = stand_in_scores(top, data["scales"])
    alive = torch.ones(blocks, dtype=torch.bool, device=labels.device)
    rows = torch.arange(blocks, device=labels.device)
    dflash = head = count = log_probs.new_zeros(())
    total = 0.0
    before = labels.new_zeros(blocks)
    for s in range(slots):
        weight = math.exp(-s / BETA)
        total += weight * blocks
        dflash = dflash - weight * log_probs[:, s].gather(1, labels[:, s, None]).sum()
        match = ids[:, s] == labels[:, s, None]
        alive = alive & match.any(-1)
        truth = match.int().argmax(-1)
        z = start if s == 0 else pair[rows, s - 1, before]
        ce = -z.log_softmax(-1).gather(1, truth[:, None])[:, 0]
        q = target_log_probs[:, s]
        cost = (q.gather(1, labels[:, s, None]) - q.gather(1, ids[:, s])).clamp_min(0)
        head = head + torch.where(alive, ce + LAMBDA * (z.softmax(-1) * cost).sum(-1), 0.0).sum()
        count = count + alive.sum()
        before = truth
    return dflash / total + GAMMA * head / count.clamp_min(1)


SIDES: dict[str, Callable[[dict[str, Tensor], int], Tensor]] = {"ours": ours, "naive": naive}


def measure(geometry: Geometry, dtype: torch.dtype, side: str, repeats: int) -> dict[str, Any]:
    """Return median seconds of forward and backward, peak bytes beside the inputs, the loss and the gradient's norm."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = problem(geometry, dtype, device)
    seconds, extra = [], 0
    for repeat in range(repeats + 1):
        leaf = {**data, "hidden": data["hidden"].detach().requires_grad_(), "scales": data["scales"].detach().requires_grad_()}
        before = _start_peak(device)
        began = time.perf_counter()
        loss = SIDES[side](leaf, geometry.blocks)
        loss.backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        took = time.perf_counter() - began
        if repeat == 0:  # the first pass touches fresh memory and warms up; it is the one whose memory is read
            extra = _peak(device) - before
        else:
            seconds.append(took)
    gradient = leaf["hidden"].grad
    assert gradient is not None
    norm = float(gradient.float().norm())
    return {"seconds": statistics.median(seconds), "extra_bytes": extra, "loss": float(loss.detach()), "gradient_norm": norm}


def _start_peak(device: torch.device) -> int:
    """Forget the peak so far; return what is in use now, in bytes."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else _status("VmHWM")


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise UserError(f"/proc/self/status has no {key}; the benchmark's memory figures need Linux")


def profile(config_file: str, overrides: list[str], steps: int) -> int:
    """Print the mean share of each part of a training step. Nothing is saved; parts are exclusive of one another."""
    from vllm_lilicorr.trainer.config import TrainConfig
    from vllm_lilicorr.trainer.loop import Trainer

    spent: dict[str, float] = {}

    def timed(owner: Any, name: str, part: str) -> None:
        inner = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return inner(*arguments, **options)
            finally:
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                spent[part] = spent.get(part, 0.0) + time.perf_counter() - began

        setattr(owner, name, call)

    with Trainer(TrainConfig.load(config_file, overrides)) as trainer:
        trainer.train_step()
        vocabulary = trainer.objective._vocabulary
        trainer.objective._vocabulary = lambda step: _timed_vocabulary(vocabulary(step), spent)  # type: ignore[method-assign]
        timed(trainer, "_batch", "data: states, anchors, padding")
        timed(trainer.objective, "draft_blocks", "forward: context and backbone")
        timed(trainer.objective, "head_sums", "forward: head and its losses")
        timed(trainer.engine, "backward", "backward")
        timed(trainer.engine, "step", "optimizer")
        began = time.perf_counter()
        tokens = 0.0
        for step in range(1, steps + 1):
            trainer.step = step
            values, _ = trainer.train_step()
            tokens += values["tokens_per_s"] * values["seconds"]
        total = time.perf_counter() - began
    spent["rest: logging, reductions"] = total - sum(spent.values())
    print("| part | ms a step | share |\n| --- | --- | --- |")
    for part, seconds in spent.items():
        print(f"| {part} | {1e3 * seconds / steps:.1f} | {100 * seconds / total:.0f} % |")
    print(f"| all | {1e3 * total / steps:.1f} | {tokens / total:.0f} tokens/s |")
    return 0


def _timed_vocabulary(apply: Callable[..., Any], spent: dict[str, float]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        began = time.perf_counter()
        found = apply(*arguments)
        part = "forward: vocabulary"
        spent[part] = spent.get(part, 0.0) + time.perf_counter() - began
        return found

    return call
