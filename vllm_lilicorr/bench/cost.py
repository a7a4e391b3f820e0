"""The head's cost a block, by subtraction as in the paper's Appendix A, and by stage.

At concurrency one and temperature 0, acceptance length divided by throughput is the wall time of one verified block. A system's
head costs the median of its block time over the benchmarks minus the control's: the same backbone without a head, an argmax a
slot (a plain DFlash drafter). The figure is net of that argmax, and of everything that both do alike.

`--grid NAME` takes the runs of an earlier `bench serve --name NAME`, with `--control` naming one of its systems; otherwise they
are made here, the control being the first system's backbone. `--stages` also times the head's operations one by one
(`bench head`); on a CPU the served steps are split as well (see `bench serve`).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from ..errors import UserError, nearest
from . import serve
from ._results import Results
from .resources import GEOMETRIES

CONTROL = "control"
EXCLUDED = ("humaneval",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", help="the target's folder, or its hub id")
    parser.add_argument("--systems", nargs="+", metavar="SYSTEM", help="whose head is measured: NAME=CKPT or NAME=CKPT,KEY=VALUE,...")
    parser.add_argument("--grid", metavar="NAME", help="measure nothing: take the runs of this grid of bench serve")
    parser.add_argument("--control", help=f"the system without a head; default: '{CONTROL}', the first system's backbone")
    parser.add_argument("--exclude", nargs="*", default=list(EXCLUDED), metavar="NAME", help="benchmarks left out of the median: their short answers are mostly prefill")
    parser.add_argument("--repeats", type=int, default=3, help="rounds")
    parser.add_argument("--stages", choices=GEOMETRIES, help="also time each operation of a head of this size, one block")
    parser.add_argument("--stages-dtype", choices=["bf16", "fp32"], default="bf16")
    serve.add_common_arguments(parser)


def main(args: argparse.Namespace) -> int:
    from . import report

    results = Results(args.output)
    measure(args, results)
    print(report.cost_tables(results))
    return 0


def measure(args: argparse.Namespace, results: Results) -> None:
    """Measure what `results` lacks, and keep which grid and control the subtraction takes."""
    grid = args.grid or "cost"
    if args.grid is None:
        _serve(args, results)
    control = args.control or CONTROL
    known = sorted({steps[2] for steps, _, _ in results.under(f"serve/{grid}/T0/")})
    if not known:
        raise UserError(f"--grid {grid}: {results.path} holds no such runs; run bench serve --name {grid} first, or leave --grid out")
    if control not in known:
        raise UserError(f"--control {control}: grid '{grid}' has no such system{nearest(control, known)}; it has {', '.join(known)}")
    settings = {"grid": grid, "control": control, "exclude": args.exclude}
    if results.get(f"cost/{grid}", settings) is None:
        results.put(f"cost/{grid}", settings, settings)
    if args.stages:
        _stages(args, results)


def _serve(args: argparse.Namespace, results: Results) -> None:
    if not args.target or not args.systems:
        raise UserError("bench cost needs --target and --systems, or --grid with the name of an earlier bench serve")
    systems = list(args.systems)
    if args.control is None:
        first = serve.parse_system(systems[0])
        systems.append(f"{CONTROL}={first.draft},{serve.BACKBONE_ONLY}=true")
    whole = {**vars(args), "systems": systems, "temperature": [0.0], "concurrency": [1], "seeds": [], "name": "cost"}
    serve.measure(argparse.Namespace(**whole), results)


def _stages(args: argparse.Namespace, results: Results) -> None:
    key, settings = f"stages/{args.stages}/{args.stages_dtype}", {"geometry": args.stages, "dtype": args.stages_dtype, "blocks": 1}
    if results.get(key, settings) is not None:
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "stages.json"
        options = ["--geometry", args.stages, "--dtype", args.stages_dtype, "--blocks", "1", "--no-eager", "--json", str(file)]
        done = subprocess.run([sys.executable, "-m", "vllm_lilicorr.bench", "head", *options], capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"bench head failed ({(done.stderr.strip().splitlines() or ['it said nothing'])[-1]}); leave --stages out")
        results.put(key, settings, json.loads(file.read_text()))
