"""Checks and times the kernels on the GPU of this machine, within six minutes, into one file.

    python kernels/gpu_check.py [--out gpu_check.txt] [--minutes 6]

From a checkout, nothing installed: it needs torch (built for CUDA), triton, transformers, pytest and hypothesis, and no vLLM. In order: the
kernel tests on CUDA tensors (graph capture and replay with changed inputs, a hundred repeats of the same bits, the backward), every kernel under
compute-sanitizer (memcheck, racecheck), and `python -m vllm_lilicorr.bench head`. What the later parts run is compiled beside the tests, which
most of the time would go to otherwise. Each part has a time limit; a part that is cut off is reported as such, and the exit status is 0 only if
every part ran and passed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def site(folder: Path) -> Path:
    """Returns a folder to put on PYTHONPATH, with the package laid out as it is installed."""
    package = folder / "vllm_lilicorr"
    shutil.copytree(ROOT / "vllm_lilicorr", package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("kernels", "trainer"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, package / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def exercise(where: str = "cuda") -> None:
    """Runs every kernel once, at sizes with ragged edges: what compute-sanitizer watches."""
    import torch

    from vllm_lilicorr.bench.head import Inputs, make_head
    from vllm_lilicorr.bench.resources import Geometry
    from vllm_lilicorr.kernels.corrected_argmax import Best, Correction, corrected_argmax
    from vllm_lilicorr.kernels.gru_cell import FEW_ROWS, gru_cell
    from vllm_lilicorr.kernels.lattice_attention import lattice_attention
    from vllm_lilicorr.kernels.score_and_walk import RULES
    from vllm_lilicorr.model.fused import FusedLiLiCorrHead

    device, n, states = torch.device(where), 2, 3
    g = Geometry(hidden=80, width=72, factor_dim=40, heads=3, vocab=5003, slots=5)
    for dtype in (torch.bfloat16, torch.float32):
        head, x = make_head(g, dtype, device), Inputs(g, n, dtype, device)
        for products in ("library", "fused"):
            fused = FusedLiLiCorrHead(head, max_blocks=n, products=products)
            table = torch.full((states, g.slots, g.vocab), -torch.inf, device=device)
            cached = torch.zeros(states, g.slots, g.topk, dtype=torch.int64, device=device)
            for rule in RULES:
                fused.merge_candidates(fused.shard_candidates(x.logits, vocab_start=0)[None], vocab_size=g.vocab)
                fused.candidates(x.logits)
                fused.propose(
                    x.slot_hidden, x.anchor_hidden, x.anchor_valid, embedding=x.embedding, rule=rule, rows=torch.tensor([2, -1], device=device),
                    temperature=torch.ones(states, device=device), seeds=torch.arange(states, device=device),
                    positions=torch.zeros(n, g.slots, dtype=torch.int64, device=device), draft_logits=table, cached_ids=cached,
                )  # fmt: skip
        leaves = [torch.randn(n, g.nodes, g.heads, 24, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]
        tables = [torch.randn(*s, device=device, dtype=dtype, requires_grad=True) for s in ((g.heads, 2 * g.block_size - 1), (g.heads,))]
        lattice_attention(*leaves, *tables, g.topk).sum().backward()  # type: ignore[call-arg]
        # A slot of DSpark and of Domino, in tiles of both sizes.
        for rows in (n, FEW_ROWS + 1):
            state, gates = torch.zeros(rows, 72, device=device, dtype=dtype), torch.randn(216, g.hidden + 72, device=device, dtype=dtype)
            ids, best = torch.randint(g.vocab, (rows,), device=device), Best.empty(rows, device)
            of_input, of_state = (part.contiguous() for part in gates.split((g.hidden, 72), dim=1))
            state = gru_cell(x.embedding, ids, state, of_input, of_state, torch.empty_like(state))
            weight, scores = torch.randn(g.vocab, 72, device=device, dtype=dtype), torch.empty(rows, g.vocab, device=device)
            logits, withheld = x.logits[torch.zeros_like(ids)], ids % 2 == 0
            corrected_argmax(logits, Correction(state, weight), ids, best)
            corrected_argmax(logits, Correction(weight, weight, ids), torch.empty_like(ids), best, withheld=withheld, scores=scores)
            corrected_argmax(logits, None, ids, best)
    if device.type == "cuda":
        torch.cuda.synchronize()
    print("exercised")


def find_sanitizer() -> str | None:
    """Returns the path of compute-sanitizer, which CUDA does not always put on the PATH."""
    places = [os.environ.get("PATH", ""), *(f"{os.environ[name]}/bin" for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ), "/usr/local/cuda/bin"]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(places))


def start(command: list[str], environment: dict[str, str], output: Any) -> subprocess.Popen[bytes]:
    """Returns the process started, in a group of its own (`stop`)."""
    # Not in the checkout: Python looks in its working folder first, and there the package lacks its kernels.
    folder = environment["PYTHONPATH"].split(os.pathsep)[0]
    return subprocess.Popen(command, env=environment, cwd=folder, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and all that it started, which would go on using the GPU."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class Report:
    """The result file, written as the parts end."""

    def __init__(self, path: Path, minutes: float) -> None:
        self.path, self.stop, self.failed = path.resolve(), time.monotonic() + 60 * minutes, False
        self.path.write_text("", encoding="utf-8")

    def add(self, text: str) -> None:
        print(text, flush=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text + "\n")

    def run(self, title: str, command: list[str], seconds: float, environment: dict[str, str]) -> None:
        """Runs a part for at most `seconds`, or what is left of the whole time; what it printed goes to the file."""
        seconds = min(seconds, self.stop - time.monotonic())
        if seconds < 5:
            self.failed = True
            self.add(f"\n===== {title}: NOT RUN, no time was left")
            return
        began = time.monotonic()
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
            process = start(command, environment, output)
            try:
                status = str(process.wait(timeout=seconds))
            except subprocess.TimeoutExpired:
                status = f"CUT OFF after {seconds:.0f} s"
            finally:
                stop(process)
            output.seek(0)
            text = output.read()
        self.failed |= status != "0"
        self.add(f"\n===== {title}: exit {status}, {time.monotonic() - began:.0f} s\n{text.rstrip()}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_check.txt"))
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--exercise", action="store_true", help="only run every kernel once, in this process")
    args = parser.parse_args()
    if args.exercise:
        exercise()
        return 0

    with tempfile.TemporaryDirectory() as folder:
        path = os.pathsep.join([str(site(Path(folder))), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "4"}
        environment.pop("TRITON_INTERPRET", None)
        report = Report(args.out, args.minutes)
        python = sys.executable
        report.run("machine", [python, "-c", MACHINE], 60, environment)
        if report.failed:
            report.add("no usable GPU, torch or triton: nothing else was run")
            return 1
        tests = [
            python, "-m", "pytest", "-q", "-rs", "--durations=5", "-o", "addopts=", "--import-mode=importlib", "-p", "no:cacheprovider",
            "--rootdir", str(ROOT), "--confcutdir", str(ROOT / "tests/kernels"), "--ignore", str(ROOT / "tests/kernels/test_resources.py"),
        ]  # fmt: skip
        if subprocess.run([python, "-c", "import xdist"], env=environment, capture_output=True).returncode == 0:
            tests += ["-n", str(min(8, os.cpu_count() or 1))]  # compiling is what takes the time
        bench, own = [python, "-m", "vllm_lilicorr.bench", "head"], [python, str(Path(__file__).resolve()), "--exercise"]
        parts = {
            "head, 8B": ["--geometry", "8b", "--blocks", "1", "8", "32", "--seconds", "0.05"],
            "head, 8B, compiled": ["--geometry", "8b", "--blocks", "1", "--seconds", "0.05", "--compile"],
            "head, other geometries": ["--geometry", "4b", "smollm2", "--blocks", "1", "32", "--seconds", "0.03"],
        }
        # Nobody reads what these print: they leave what the parts below need in Triton's and torch's caches.
        beside = [start(command, environment, subprocess.DEVNULL) for command in (own, *([*bench, *options] for options in parts.values()))]
        try:
            began = time.monotonic()
            report.run("tests on the GPU", [*tests, str(ROOT / "tests/kernels")], 150, environment)
            for process in beside:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=max(began + 150 - time.monotonic(), 0))
        finally:
            for process in beside:
                stop(process)
        report.run("head, 8B", [*bench, *parts["head, 8B"]], 60, environment)
        if sanitizer := find_sanitizer():
            # Without the caching allocator every tensor is its own allocation, and an access beside it is seen. Only the library's
            # products are left out of the search for races: their use of shared memory is not ours, and slow to follow.
            careful = environment | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
            for tool, options in {"memcheck": [], "racecheck": ["--kernel-name", "kns=_kernel"]}.items():
                command = [sanitizer, "--tool", tool, "--target-processes", "application-only", "--error-exitcode", "9", *options, *own]
                report.run(tool, command, 60, careful)
        else:
            report.failed = True
            report.add("\n===== compute-sanitizer: NOT RUN, it is neither on the PATH nor in CUDA's folder")
        report.run("head, 8B, compiled", [*bench, *parts["head, 8B, compiled"]], 60, environment)
        report.run("head, other geometries", [*bench, *parts["head, other geometries"]], 60, environment)
        report.add(f"\n===== {'FAILED or incomplete' if report.failed else 'all parts passed'}")
        return int(report.failed)


MACHINE = """
import torch, triton, transformers
assert torch.cuda.is_available(), "torch sees no GPU"
p = torch.cuda.get_device_properties(0)
print(p.name, f"sm_{p.major}{p.minor}, {p.multi_processor_count} multiprocessors; torch {torch.__version__}, triton {triton.__version__}, transformers {transformers.__version__}")
"""

if __name__ == "__main__":
    sys.exit(main())
