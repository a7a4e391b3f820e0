"""Time of the LiLiCorr head per stage and whole, against eager, compiled and vLLM's own, and against the machine's limits."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vllm_lilicorr.bench.resources import DTYPES, GEOMETRIES, Geometry
from vllm_lilicorr.config import DraftConfig, LiLiCorrConfig
from vllm_lilicorr.errors import UserError
from vllm_lilicorr.model import fused as fused_module
from vllm_lilicorr.model.fused import FusedLiLiCorrHead
from vllm_lilicorr.model.heads.lilicorr import LiLiCorrHead
from vllm_lilicorr.model.lattice import walk

Thunk = Callable[[], Any]

_LAUNCHES = {"topk_logprobs": 2, "linear_silu": 2}
"""Kernels of ours and cuBLAS's a call launches on CUDA where it is not one (a cuBLAS product that splits its sum launches one more)."""


@dataclass(frozen=True)
class Call:
    """One operation of the head as it was called: what it reads and writes at least (bytes), its matrix arithmetic (FLOP), and itself."""

    name: str
    bytes: int
    flop: int
    launches: int
    run: Thunk


@dataclass(frozen=True)
class Line:
    """One line of the report; times in microseconds."""

    geometry: str
    dtype: str
    blocks: int
    what: str
    median: float
    fastest: float
    floor: float
    bytes: int
    flop: int
    launches: int


class Inputs:
    """Random inputs of n blocks at a geometry; the embedding table is a short one whose rows are looked up at random."""

    def __init__(self, g: Geometry, n: int, dtype: torch.dtype, device: torch.device) -> None:
        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=device).to(dtype)

        self.logits = torch.cat([normal(g.slots, g.vocab) * 3 for _ in range(n)])
        self.embedding = normal(g.vocab, g.hidden)
        self.slot_hidden, self.anchor_hidden = normal(n, g.slots, g.hidden), normal(n, g.hidden)
        self.anchor_valid = torch.ones(n, dtype=torch.bool, device=device)


def make_head(g: Geometry, dtype: torch.dtype, device: torch.device) -> LiLiCorrHead:
    """Returns a head of geometry g with random weights none of which is zero."""
    config = DraftConfig(
        hidden_size=g.hidden, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=64, intermediate_size=64,
        vocab_size=g.vocab, rms_norm_eps=1e-6, max_position_embeddings=4096, rope_theta=1e6, attention_bias=False,
        block_size=g.block_size, num_target_layers=8, mask_token_id=g.vocab - 1, target_layer_ids=(1,),
        head=LiLiCorrConfig(g.topk, g.width, g.layers, g.heads, g.mlp_ratio, g.factor_dim, vector_eps=1e-4, logit_scale=8.0),
        conv=None, target_name=None, tokenizer_hash=None,
    )  # fmt: skip
    head = LiLiCorrHead(config)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if "norm" not in name:
                parameter.normal_(std=0.02)
    return head.to(device, dtype).eval().requires_grad_(False)


@contextlib.contextmanager
def recorded() -> Iterator[list[Call]]:
    """Collects every operation the serving head calls inside, with its arguments: the stages are those of the code that runs."""
    calls: list[Call] = []
    originals: list[tuple[Any, str, Any]] = []

    def wrap(owner: Any, attribute: str, name: str, cost: Callable[..., tuple[int, int]]) -> None:
        original = getattr(owner, attribute)

        def record(*args: Any, **kwargs: Any) -> Any:
            bytes_, flop = cost(*args, **kwargs)
            calls.append(Call(name, bytes_, flop, _LAUNCHES.get(name, 1), lambda: original(*args, **kwargs)))
            return original(*args, **kwargs)

        originals.append((owner, attribute, original))
        setattr(owner, attribute, record)

    def tensors(*args: Any, **kwargs: Any) -> tuple[int, int]:
        flat = [t for arg in (*args, *kwargs.values()) for t in (arg if isinstance(arg, tuple) else (arg,)) if isinstance(t, torch.Tensor)]
        return sum(t.numel() * t.element_size() for t in flat), 0

    def nodes(ids: torch.Tensor, log_probs: torch.Tensor, embedding: Any, *rest: Any) -> tuple[int, int]:
        rows = 0 if embedding is None else ids.numel() * embedding.shape[1] * embedding.element_size()
        return tensors(ids, log_probs, *rest)[0] + rows, 0

    def attention(q: torch.Tensor, *rest: Any) -> tuple[int, int]:
        n, count, heads, dim = q.shape
        return 4 * q.numel() * q.element_size(), 4 * n * heads * count * count * dim

    def scores(out: torch.Tensor, incoming: torch.Tensor, anchor: torch.Tensor, ids: torch.Tensor, *rest: Any) -> tuple[int, int]:
        n, slots, topk = ids.shape
        return tensors(out, incoming, anchor, ids)[0], 2 * n * slots * topk * topk * out.shape[1]

    def fused_product(x: torch.Tensor, weight: torch.Tensor, bias: Any, out: torch.Tensor, **options: Any) -> tuple[int, int]:
        return tensors(x, weight, out)[0], 2 * x.shape[0] * weight.numel()

    def product(linear: Any, *args: torch.Tensor | None) -> tuple[int, int]:
        x = args[-1] if args[-1] is not None and args[-1].shape[-1] == linear.in_features else args[0]
        assert x is not None
        rows, size = x.shape[0], x.element_size()
        weight = linear.in_features * linear.out_features
        return (weight + rows * (linear.in_features + linear.out_features)) * size, 2 * rows * weight

    wrap(fused_module, "topk_logprobs", "topk_logprobs", lambda logits, *rest: tensors(logits))
    wrap(fused_module, "lattice_nodes", "lattice_nodes", nodes)
    wrap(fused_module, "lattice_attention", "lattice_attention", attention)
    wrap(fused_module, "score_and_walk", "score_and_walk", scores)
    wrap(fused_module, "fused_linear", "fused_linear", fused_product)
    for name in ("rms_norm", "anchor_operand", "bias_silu"):
        wrap(fused_module, name, name, tensors)
    for attribute, name in (("__call__", "linear"), ("silu", "linear_silu"), ("add_to", "linear_add")):
        wrap(fused_module.PackedLinear, attribute, name, product)
    try:
        yield calls
    finally:
        for owner, attribute, original in originals:
            setattr(owner, attribute, original)


class Timer:
    """Times thunks: in a replayed CUDA graph where there is a GPU, else on the host clock."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        self.device, self.seconds = device, seconds

    def __call__(self, thunks: list[Thunk]) -> tuple[float, float]:
        """Returns (median, fastest) microseconds of one thunk. They should do the same on different data: a graph holds one of each, so
        that none finds its weights in the cache from the last time, as it would not in a server."""
        if self.device.type == "cuda":
            return self._graph(thunks)
        thunks[0]()
        times: list[float] = []
        stop = time.perf_counter() + self.seconds
        while time.perf_counter() < stop or len(times) < 5:
            start = time.perf_counter()
            thunks[len(times) % len(thunks)]()
            times.append((time.perf_counter() - start) * 1e6)
        return statistics.median(times), min(times)

    def _graph(self, thunks: list[Thunk]) -> tuple[float, float]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for thunk in thunks:
                thunk()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for thunk in thunks:
                thunk()
        for _ in range(3):
            graph.replay()
        times: list[float] = []
        stop = time.perf_counter() + self.seconds
        while time.perf_counter() < stop or len(times) < 5:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / len(thunks))
        return statistics.median(times), min(times)


@dataclass(frozen=True)
class Limits:
    """What the machine was measured to do: bytes/s copied (read + written), and FLOP/s of a large product, by dtype name."""

    bandwidth: float
    rate: dict[str, float]

    def floor(self, bytes_: int, flop: int, dtype: str) -> float:
        """Returns the microseconds under which this traffic and arithmetic cannot be done."""
        return max(bytes_ / self.bandwidth, flop / self.rate[dtype]) * 1e6


def measure_limits(device: torch.device, dtypes: list[str], timer: Timer) -> Limits:
    size = (1 << 30) if device.type == "cuda" else (1 << 27)
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    bandwidth = 2 * size / (timer([lambda: target.copy_(source)])[1] * 1e-6)
    rate, side = {}, 8192 if device.type == "cuda" else 1024
    for name in dtypes:
        a, b = (torch.randn(side, side, device=device).to(DTYPES[name]) for _ in range(2))
        out = torch.empty_like(a)
        rate[name] = 2 * side**3 / (timer([partial(torch.mm, a, b, out=out)])[1] * 1e-6)
    return Limits(bandwidth, rate)


def eager_step(head: LiLiCorrHead, forward: Callable[..., Any], x: Inputs) -> Thunk:
    """Returns a thunk doing what the serving head does, with the readable module `forward` and torch's own top-K and log-sum-exp."""
    n, slots, _ = x.slot_hidden.shape

    def step() -> torch.Tensor:
        values, ids = x.logits.topk(head.config.candidate_topk, dim=-1)
        log_probs = values.float() - x.logits.float().logsumexp(-1, keepdim=True)
        ids, log_probs = ids.view(n, slots, -1), log_probs.view(n, slots, -1)
        start, pair = forward(torch.nn.functional.embedding(ids, x.embedding), log_probs, x.slot_hidden, x.anchor_hidden, x.anchor_valid)
        return ids.gather(-1, walk(start, pair, "greedy").index[..., None])

    return step


def measure(
    name: str, dtype: str, n: int, device: torch.device, timer: Timer, limits: Limits, compiled: bool, eager: bool
) -> list[Line]:
    """Returns the lines of one geometry, dtype and block count: every operation, their sum as one run, and the baselines.

    The operations are those of a server on this device: on a CPU the embedding is projected at load, on a GPU it is not, and the whole
    with the other arrangement is an extra line.
    """
    g = GEOMETRIES[name]
    copies = 4 if device.type == "cuda" else 1
    lines: list[Line] = []
    head = make_head(g, DTYPES[dtype], device)
    inputs = Inputs(g, n, DTYPES[dtype], device)

    def add(what: str, thunks: list[Thunk], bytes_: int, flop: int, launches: int) -> None:
        median, fastest = timer(thunks)
        lines.append(Line(name, dtype, n, what, median, fastest, limits.floor(bytes_, flop, dtype), bytes_, flop, launches))

    def step(fused: FusedLiLiCorrHead) -> Thunk:
        def run() -> Any:
            fused.candidates(inputs.logits)
            return fused.propose(inputs.slot_hidden, inputs.anchor_hidden, inputs.anchor_valid, embedding=inputs.embedding)

        return run

    def build(products: str, projected: bool) -> list[FusedLiLiCorrHead]:
        heads = [FusedLiLiCorrHead(head, max_blocks=n, products=products) for _ in range(copies)]
        for fused in heads if projected else ():
            fused.project_embedding(inputs.embedding)
        return heads

    served_projected = device.type == "cpu"  # as `serving.head` does
    total = (0, 0)
    for products in ("library", "fused"):
        if products == "fused" and (device.type != "cuda" or n * g.nodes > fused_module.FUSED_ROWS):
            continue
        heads = build(products, served_projected)
        recordings = []
        for fused in heads:
            with recorded() as calls:
                step(fused)()
            recordings.append(calls)
        for index, call in enumerate(recordings[0]):
            add(f"{index:2d} {call.name}", [calls[index].run for calls in recordings], call.bytes, call.flop, call.launches)
        launches = sum(call.launches for call in recordings[0])
        if products == "library":  # the least traffic and arithmetic of the head, whoever does it
            total = sum(call.bytes for call in recordings[0]), sum(call.flop for call in recordings[0])
        add(f"whole: {products} products", [step(fused) for fused in heads], *total, launches)
        if device.type == "cuda":
            print(f"  {name} {dtype} N={n}, {products} products: {count_kernels(step(heads[0]))} kernels run", flush=True)
        if g.width != g.hidden:
            # With kernels, token_proj is part of another product.
            other, more = ("not projected", 1) if served_projected else ("projected", 0)
            add(f"whole: {products}, {other}", [step(fused) for fused in build(products, not served_projected)], *total, launches + more)
    if eager:
        thunk = eager_step(head, head.forward, inputs)
        add("whole: eager", [thunk], *total, 0)
        if device.type == "cuda":
            print(f"  {name} {dtype} N={n}, eager: {count_kernels(thunk)} kernels run", flush=True)
    if compiled:
        add("whole: torch.compile", [eager_step(head, torch.compile(head.forward, dynamic=False), inputs)], *total, 0)
    return lines


def count_kernels(thunk: Thunk) -> int:
    """Returns how many kernels `thunk` runs on the GPU, as its profiler saw them."""
    thunk()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        thunk()
        torch.cuda.synchronize()
    return sum(event.count for event in profile.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA)


def show(lines: list[Line]) -> None:
    print(f"\n{lines[0].geometry} {lines[0].dtype}, {lines[0].blocks} block(s); microseconds")
    print(f"  {'operation':<24}{'median':>10}{'fastest':>10}{'floor':>9}{'x floor':>9}{'MB':>9}{'GFLOP':>8}{'launches':>10}")
    for line in lines:
        ratio = line.median / line.floor if line.floor else float("nan")
        launches = str(line.launches) if line.launches else ""
        print(
            f"  {line.what:<24}{line.median:>10.1f}{line.fastest:>10.1f}{line.floor:>9.1f}{ratio:>9.1f}{line.bytes / 1e6:>9.2f}"
            f"{line.flop / 1e9:>8.3f}{launches:>10}"
        )
    whole = {line.what.removeprefix("whole: "): line.median for line in lines if line.what.startswith("whole: ")}
    for products in ("library products", "fused products"):
        for baseline in ("eager", "torch.compile"):
            if products in whole and baseline in whole:
                print(f"  {products} / {baseline}: {whole[products] / whole[baseline]:.3f}")


def compare_vllm(names: list[str], dtypes: list[str], blocks: list[int], rounds: int) -> list[dict[str, Any]]:
    """Returns, per setting, the time of our scores and walk relative to vLLM's head on the same weights and inputs, in this process.

    Ours is what the server runs on a CPU, the embedding projected at load; `unprojected` is given the candidates' embeddings, as vLLM's
    head is. vLLM's makes the scores only. They take turns, so that what else the machine does falls on all; ratios are of medians.
    """
    from vllm_lilicorr.bench._stock import StockHeads

    results = []
    device = torch.device("cpu")
    with StockHeads() as build:
        for name in names:
            for dtype in dtypes:
                g = GEOMETRIES[name]
                head = make_head(g, DTYPES[dtype], device)
                stock = build(head)
                for n in blocks:
                    results.append(_compare(stock, head, g, dtype, n, rounds) | {"geometry": name})
                    r = results[-1]
                    print(
                        f"{name} {dtype} N={n}: vLLM's head {r['vllm_ms']:.2f} ms; ours, with the walk, {r['ours_ms']:.2f} ms, ratio {r['ratio']:.3f}; "
                        f"embedding not projected at load {r['unprojected_ms']:.2f} ms, ratio {r['unprojected_ratio']:.3f}; "
                        f"scores differ by {r['largest_score_difference']:.1e}",
                        flush=True,
                    )
    return results


def _compare(stock: Any, head: LiLiCorrHead, g: Geometry, dtype: str, n: int, rounds: int) -> dict[str, Any]:
    fused, unprojected = (FusedLiLiCorrHead(head, max_blocks=n) for _ in range(2))
    x = Inputs(replace(g, vocab=4096), n, DTYPES[dtype], torch.device("cpu"))
    fused.project_embedding(x.embedding)
    ids, log_probs = (found.clone() for found in fused.candidates(x.logits))
    unprojected.candidates(x.logits)
    embeddings, arguments = x.embedding[ids], (x.slot_hidden, x.anchor_hidden, x.anchor_valid)
    thunks: dict[str, Thunk] = {
        "vllm": lambda: stock(embeddings, log_probs, *arguments),
        # Where the head is as wide as the target there is nothing to project, and the embedding itself is gathered from.
        "ours": lambda: fused.propose(*arguments, embedding=x.embedding),
        "unprojected": lambda: unprojected.propose(*arguments, token_embeddings=embeddings),
    }
    with torch.inference_mode():
        theirs = thunks["vllm"]()
        thunks["ours"](), thunks["unprojected"]()
        times: dict[str, list[float]] = {key: [] for key in thunks}
        for _ in range(rounds):
            for key, run in thunks.items():
                start = time.perf_counter()
                run()
                times[key].append((time.perf_counter() - start) * 1e3)
    medians = {key: statistics.median(values) for key, values in times.items()}
    return {
        "dtype": dtype,
        "blocks": n,
        **{f"{key}_ms": median for key, median in medians.items()},
        **{f"{key}_fastest_ms": min(values) for key, values in times.items()},
        "ratio": medians["ours"] / medians["vllm"],
        "unprojected_ratio": medians["unprojected"] / medians["vllm"],
        "largest_score_difference": (theirs - fused._walked.pair_scores[:n]).abs().max().item(),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--geometry", nargs="+", choices=GEOMETRIES, default=list(GEOMETRIES))
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=None, help="default bf16; with --compare-vllm bf16 and fp32")
    parser.add_argument("--blocks", type=int, nargs="+", default=None, help="concurrent blocks; default 1 2 4 8 16 32 with a GPU, else 1 8")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="CPU threads (default: all)")
    parser.add_argument("--seconds", type=float, default=0.3, help="time spent on each line")
    parser.add_argument("--no-eager", action="store_true", help="leave the readable module out")
    parser.add_argument("--compile", action="store_true", help="also time the readable module under torch.compile")
    parser.add_argument("--compare-vllm", action="store_true", help="on the CPU: our head relative to vLLM's in this process")
    parser.add_argument("--rounds", type=int, default=30, help="of --compare-vllm")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number there too")


def main(args: argparse.Namespace) -> int:
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: this machine's torch sees no GPU; leave the option out to use the CPU")
    if args.device == "cpu":
        torch.set_num_threads(args.threads)
    if args.compare_vllm:
        results: Any = compare_vllm(args.geometry, args.dtype or ["bf16", "fp32"], args.blocks or [1, 8], args.rounds)
        if args.json:
            args.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
        return 0
    device, dtypes = torch.device(args.device), args.dtype or ["bf16"]
    blocks = args.blocks or ([1, 2, 4, 8, 16, 32] if args.device == "cuda" else [1, 8])
    timer = Timer(device, args.seconds)
    with torch.inference_mode():
        limits = measure_limits(device, dtypes, timer)
        where = torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {args.threads} thread(s)"
        rates = ", ".join(f"{name} {rate / 1e12:.2f}" for name, rate in limits.rate.items())
        print(f"{where}; torch {torch.__version__}; copies {limits.bandwidth / 1e9:.0f} GB/s; products, TFLOP/s: {rates}")
        lines: list[Line] = []
        for name in args.geometry:
            for dtype in dtypes:
                for n in blocks:
                    part = measure(name, dtype, n, device, timer, limits, args.compile, not args.no_eager)
                    show(part)
                    sys.stdout.flush()
                    lines += part
    if args.json:
        report = {"device": where, "torch": torch.__version__, "limits": asdict(limits), "lines": [asdict(line) for line in lines]}
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0
