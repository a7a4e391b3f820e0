"""Registers, spills and shared memory of every kernel, compiled for sm_80, sm_90 and sm_100 without a GPU."""

from __future__ import annotations

import argparse
import contextlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vllm_lilicorr.errors import UserError

TARGETS = (80, 90, 100)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Most shared memory one program may have, in bytes, by compute capability (CUDA C++ Programming Guide, "Technical Specifications")."""


@dataclass(frozen=True)
class Geometry:
    """Sizes a head is compiled or timed at: target width H, head width W, d, heads, vocabulary V, slots S, candidates K, layers, MLP ratio."""

    hidden: int
    width: int
    factor_dim: int
    heads: int
    vocab: int
    slots: int = 15
    topk: int = 8
    layers: int = 2
    mlp_ratio: float = 2.0

    @property
    def block_size(self) -> int:
        return self.slots + 1

    @property
    def nodes(self) -> int:
        return self.slots * self.topk


GEOMETRIES = {
    "8b": Geometry(4096, 1024, 1024, 8, 151936),
    "4b": Geometry(2560, 1024, 1024, 8, 151936),
    "smollm2": Geometry(576, 576, 256, 8, 49152),  # as wide as its target
    "smollm2-135m": Geometry(576, 256, 256, 8, 49152, slots=7),  # configs/smollm2-135m.yaml
}


@dataclass(frozen=True)
class Usage:
    """What one compiled kernel takes: registers a thread, spilled bytes a thread, shared memory a program (bytes), threads a program."""

    kernel: str
    dtype: str
    target: int
    registers: int
    spills: int
    shared: int
    threads: int


class _OfflineDriver:
    """Answers what Triton asks a driver while it compiles; there is no device to launch on."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self):
        return self.target

    def get_current_device(self) -> int:
        # One device a target: Triton caches compiled kernels by device.
        return self.target.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")


def launches(name: str, dtype: torch.dtype, n: int) -> dict[str, Callable[[], Any]]:
    """Returns {operation: thunk} that launches every operation of the heads on meta tensors of geometry `name` with n blocks."""
    from vllm_lilicorr.kernels.anchor_fusion import anchor_operand
    from vllm_lilicorr.kernels.bias_silu import bias_silu
    from vllm_lilicorr.kernels.corrected_argmax import Best, Correction, corrected_argmax
    from vllm_lilicorr.kernels.fused_linear import Norm, fused_linear
    from vllm_lilicorr.kernels.gru_cell import FEW_ROWS, gru_cell
    from vllm_lilicorr.kernels.lattice_attention import lattice_attention
    from vllm_lilicorr.kernels.lattice_nodes import FeatureWeights, lattice_nodes
    from vllm_lilicorr.kernels.rms_norm import rms_norm
    from vllm_lilicorr.kernels.score_and_walk import RULES, DraftLogits, Randomness, Walked, score_and_walk
    from vllm_lilicorr.kernels.topk_logprobs import merge_topk, topk_logprobs

    g = GEOMETRIES[name]
    rows, width, head_dim = n * g.nodes, g.width, g.width // g.heads

    def make(*shape: int, dtype: torch.dtype = dtype, grad: bool = False) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=grad)

    ids, log_probs = make(n, g.slots, g.topk, dtype=torch.int64), make(n, g.slots, g.topk, dtype=torch.float32)
    stream, constant = make(rows, width), make(width, dtype=torch.float32)
    features = FeatureWeights(make(5), make(5), make(5, width), make(width))
    embedding, states, positions = make(g.vocab, g.hidden), make(n * g.slots, width), make(g.nodes, width)
    operand = make(rows, g.hidden + width)
    tokens, active = (None if width == g.hidden else operand[:, : g.hidden]), operand[:, g.hidden :]
    tables = (make(g.heads, 2 * g.block_size - 1), make(g.heads))
    vectors = make(rows, 2 * g.factor_dim).split(g.factor_dim, dim=1)

    def attention(grad: bool) -> torch.Tensor:
        q, k, v = make(n, g.nodes, 3, g.heads, head_dim, grad=grad).unbind(2)
        out = lattice_attention(q, k, v, *tables, g.topk)
        if grad:
            out.sum().backward()
        return out

    def product(kind: str) -> torch.Tensor:
        few, mlp = min(rows, 256), int(g.width * g.mlp_ratio)
        norm = None if kind == "add" else Norm(make(width), 1e-6)
        out = {"norm": 3 * width, "norm SiLU": mlp}.get(kind, width)
        if kind == "anchor":
            row, anchor = make(1, width + g.factor_dim)[:, :width], make(1, width)
            return fused_linear(make(few, width), make(out, 2 * width), row, make(few, out), norm=norm, anchor=anchor, silu=True)
        x = make(few, mlp if kind == "add" else width)
        return fused_linear(x, make(out, x.shape[1]), make(out), make(few, out), norm=norm, silu="SiLU" in kind, add=kind == "add")

    def walked(rule: str) -> Walked:
        return score_and_walk(
            vectors[0], vectors[1], make(n, width + g.factor_dim)[:, width:], ids, rule, 8.0, 1e-4, Walked.empty(n, g.slots, g.topk, "meta"),
            make(n * g.slots, dtype=torch.int64)[:: g.slots], make(n, dtype=torch.float32),
            Randomness(seeds=make(n, dtype=torch.int64), positions=make(n, g.slots, dtype=torch.int64)),
            make(n, g.slots, dtype=torch.int64), DraftLogits(make(n, g.slots, g.vocab, dtype=torch.float32), ids),
        )  # fmt: skip

    tokens_before, emb_dim, gru = make(n, g.slots, dtype=torch.int64)[:, 0], 256, 1024  # SPEC 7

    def corrected(kind: str) -> torch.Tensor:
        gathered = kind == "DSpark"
        x, weight = make(g.vocab if gathered else n, emb_dim), make(g.vocab, emb_dim)
        return corrected_argmax(
            make(n, g.slots, g.vocab)[:, 0], None if kind == "nothing" else Correction(x, weight, tokens_before if gathered else None),
            tokens_before, Best.empty(n, "meta"), withheld=make(n, dtype=torch.bool), null_token=g.vocab - 1,
            scores=make(n, g.vocab, dtype=torch.float32) if gathered else None,
        )  # fmt: skip

    def cell(rows: int) -> torch.Tensor:
        weights, of_state = make(3 * gru, g.hidden), make(3 * gru, gru)
        return gru_cell(embedding, make(rows, 2, dtype=torch.int64)[:, 0], make(rows, gru), weights, of_state, make(rows, gru))

    return {
        "topk_logprobs": lambda: topk_logprobs(make(n * g.slots, g.vocab), g.topk),
        "merge_topk": lambda: merge_topk(
            ids.view(1, -1, g.topk).expand(4, -1, -1), log_probs.view(1, -1, g.topk).expand(4, -1, -1), constant[:2].expand(4, n * g.slots, 2)
        ),
        "lattice_nodes": lambda: lattice_nodes(ids, log_probs, embedding, states, positions, features, tokens, active, stream),
        "rms_norm": lambda: (rms_norm(stream, make(width), 1e-6, constant), rms_norm(states, make(width), 1e-6, constant, make(n * g.slots, dtype=torch.bool))),
        "lattice_attention": lambda: attention(False),
        "lattice_attention_backward": lambda: attention(True),
        "bias_silu": lambda: bias_silu(stream, make(1, width)),
        "anchor_operand": lambda: anchor_operand(stream, constant, make(width), 1e-6, make(n, width), make(rows, 2 * width)),
        **{f"fused_linear ({kind})": partial(product, kind) for kind in ("norm", "norm SiLU", "add", "anchor")},
        **{f"score_and_walk ({rule})": partial(walked, rule) for rule in RULES},
        "gru_cell": lambda: (cell(n), cell(FEW_ROWS + n)),
        "fused_linear (Domino)": lambda: fused_linear(
            make(n, gru), make(emb_dim, g.hidden + gru)[:, g.hidden :], make(n, g.slots, emb_dim)[:, 0], make(n, emb_dim), silu=True
        ),
        **{f"corrected_argmax ({kind})": partial(corrected, kind) for kind in ("DSpark", "Domino", "nothing")},
    }


@contextlib.contextmanager
def _compile_only(capability: int) -> Iterator[list[tuple[str, Any]]]:
    """Collects (kernel name, compiled kernel) of every launch inside; nothing is launched. The specialisation (alignment, constant
    arguments) is the launch's own, so what is reported is what runs."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    compiled: list[tuple[str, Any]] = []
    run = JITFunction.run

    def warm_up(self, *args, grid, warmup, **kwargs):
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        compiled.append((self.fn.__name__.strip("_"), kernel))
        return kernel

    previous = driver._active
    JITFunction.run = warm_up
    driver.set_active(_OfflineDriver(capability))
    try:
        yield compiled
    finally:
        JITFunction.run = run
        driver._active = previous


def _cuobjdump() -> Path:
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        raise UserError(f"the installed triton package has no {tool.name} at {tool}; install the Linux x86-64 wheel of triton")
    return tool


def usage_of(cubin: bytes) -> tuple[int, int]:
    """Returns (registers a thread, local-memory bytes a thread: its stack frame and spills) of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([_cuobjdump(), "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
    numbers = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return numbers["REG"], numbers["STACK"] + numbers["LOCAL"]


def measure(target: int, dtype: str, geometry: str = "8b", n: int = 1, only: str | None = None) -> list[Usage]:
    """Returns the usage of every kernel the head launches for n blocks of `geometry`, compiled for compute capability `target`.

    `only` limits it to operations whose name starts so. Raises UserError where triton is missing or interprets its kernels.
    """
    from vllm_lilicorr.kernels._triton import HAS_TRITON, INTERPRETED

    if not HAS_TRITON or INTERPRETED:
        raise UserError("compiling kernels needs the triton package, and TRITON_INTERPRET unset")
    found: dict[str, Any] = {}
    with _compile_only(target) as compiled:
        for name, launch in launches(geometry, DTYPES[dtype], n).items():
            if only and not name.startswith(only):
                continue
            compiled.clear()
            launch()
            rule = re.search(r"\(.*\)", name)
            for kernel, binary in compiled:
                label = kernel + (f" {rule[0]}" if rule else "")
                registers, spills = usage_of(binary.asm["cubin"])
                shared, threads = binary.metadata.shared, binary.metadata.num_warps * 32
                known = found.get(label)
                if known is None or (spills, shared, registers) > (known.spills, known.shared, known.registers):
                    found[label] = Usage(label, dtype, target, registers, spills, shared, threads)
    return list(found.values())


def table(rows: list[Usage]) -> str:
    """Returns a Markdown table: one line a kernel and dtype; registers / spilled bytes / shared bytes per target."""
    targets = sorted({row.target for row in rows})
    cells = {(row.kernel, row.dtype, row.target): row for row in rows}
    lines = ["| kernel | dtype | threads | " + " | ".join(f"sm_{t}" for t in targets) + " |", "| --- | --- | --- |" + " --- |" * len(targets)]
    for kernel, dtype in dict.fromkeys((row.kernel, row.dtype) for row in rows):
        entries = [cells.get((kernel, dtype, t)) for t in targets]
        threads = next(e.threads for e in entries if e)
        text = [f"{e.registers} / {e.spills} / {e.shared}" if e else "" for e in entries]
        lines.append(f"| `{kernel}` | {dtype} | {threads} | " + " | ".join(text) + " |")
    return "\n".join(lines)


BEGIN, END = "<!-- resources: begin -->", "<!-- resources: end -->"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--geometry", choices=GEOMETRIES, default="8b")
    parser.add_argument("--targets", type=int, nargs="+", choices=TARGETS, default=TARGETS, help="compute capabilities times ten")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--blocks", type=int, nargs="+", default=[1, 32], help="block counts; the worst of them is reported")
    parser.add_argument("--write", type=Path, metavar="FILE", help=f"put the table between '{BEGIN}' and '{END}' in this file")


def main(args: argparse.Namespace) -> int:
    worst: dict[tuple[str, str, int], Usage] = {}
    for dtype in args.dtypes:
        for target in args.targets:
            for n in args.blocks:
                for row in measure(target, dtype, args.geometry, n):
                    key = (row.kernel, row.dtype, row.target)
                    if key not in worst or (row.spills, row.shared, row.registers) > (worst[key].spills, worst[key].shared, worst[key].registers):
                        worst[key] = row
            print(f"sm_{target} {dtype}: compiled", file=sys.stderr)
    text = table(list(worst.values()))
    print(text)
    if args.write:
        document = args.write.read_text(encoding="utf-8")
        if BEGIN not in document or END not in document:
            raise UserError(f"{args.write} lacks the line '{BEGIN}' or '{END}' between which the table goes; add both")
        head, rest = document.split(BEGIN, 1)
        args.write.write_text(f"{head}{BEGIN}\n{text}\n{END}{rest.split(END, 1)[1]}", encoding="utf-8")
    return 0
