"""Model card and serving options of a trained drafter, from the run that made it and its acceptance lengths.

    python -m vllm_lilicorr.bench card CKPT --run RUNS/lilicorr --beside RUNS/dflash --results RUNS/acceptance \\
        --lengths RUNS/lengths --made-by 'PROMPTS=prompts trainer/recipes/smollm2-135m.sh'

Writes CKPT/README.md, which takes the place of the one that an export writes: geometry, data, hours, learning curve, acceptance
table. And CKPT/lilicorr.json, which `vllm serve --speculative-config` takes as it is. Every figure is read from a file of the run.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..config import DraftConfig
from ..errors import UserError
from ..io import write_file_atomically
from ..model.card import SERVING, model_card
from ..yaml_files import read_yaml
from . import report
from ._results import Results, checkpoint_digest, describe, short
from ._tables import number, table

ROWS = 8
"""Of a learning curve: each is the mean over an equal share of the steps."""
TERMS = {
    "loss": "loss", "dflash": "L_DFlash", "ce": "L_CE", "dist": "L_dist", "oracle_prefix": "oracle prefix",
    "selected_prefix": "right slots, head", "top1_prefix": "right slots, argmax",
}  # fmt: skip
"""Logged terms that a learning curve shows, and its column for each."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint", type=Path, metavar="CKPT", help="the drafter's folder; README.md and lilicorr.json are written there"
    )
    parser.add_argument("--run", type=Path, required=True, metavar="DIR", help="run.output of the training run that made it")
    parser.add_argument(
        "--beside", type=Path, nargs="*", default=[], metavar="DIR", help="runs of other arms, whose curves stand beside it"
    )
    parser.add_argument(
        "--results", type=Path, required=True, metavar="DIR", help="what `bench acceptance --output DIR` measured of it"
    )
    parser.add_argument("--made-by", required=True, metavar="COMMAND", help="the command that made it, as one types it")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--num-speculative-tokens", type=int, metavar="N", help="what lilicorr.json asks for, default all slots")
    length.add_argument(
        "--lengths", type=Path, metavar="DIR",
        help="take the fastest N: what `bench serve --output DIR` measured of systems that differ in num_speculative_tokens alone",
    )
    parser.add_argument(
        "--note", default="", metavar="TEXT", help="a paragraph of your own, such as why so many tokens are drafted"
    )


def main(args: argparse.Namespace) -> int:
    from ..model.checkpoint import count_parameters, resolve_folder

    folder = resolve_folder(args.checkpoint)
    config = DraftConfig.load(folder)
    slots, lengths = config.num_slots if args.num_speculative_tokens is None else args.num_speculative_tokens, ""
    served: dict[str, Any] = {"model": ".", "num_speculative_tokens": slots}
    if args.lengths:
        (slots, threshold), lengths = fastest(Results.read(args.lengths), folder)
        served["num_speculative_tokens"] = slots
        if threshold:
            served["confidence_threshold"] = threshold
    if not 1 <= slots <= config.num_slots:
        raise UserError(f"--num-speculative-tokens: must lie in 1..{config.num_slots}, the drafter's slots; got {slots}")
    results = Results.read(args.results)
    _require_measured(results, folder)
    sections = [training(args.run, args.beside, args.made_by), measured(results), *filter(None, [lengths, args.note])]
    write_file_atomically(folder / SERVING, json.dumps(served, indent=2) + "\n")
    write_file_atomically(
        folder / "README.md",
        model_card(config, count_parameters(_empty(config)), slots, "\n\n".join(sections), served.get("confidence_threshold", 0)),
    )
    print(f"{folder}: README.md and {SERVING} are written")
    return 0


def _empty(config: DraftConfig) -> Any:
    import torch

    from ..model import Draft

    with torch.device("meta"):
        return Draft(config)


def _require_measured(results: Results, folder: Path) -> None:
    """Raise UserError where the results are of another checkpoint than the one the card is for."""
    digest = checkpoint_digest(folder)
    if all(part["settings"].get("checkpoint") != digest for part in results.comparable().values()):
        raise UserError(f"{results.path}: holds no acceptance of the drafter in {folder}; run 'bench acceptance' with it first")


def fastest(results: Results, folder: Path) -> tuple[tuple[int, float], str]:
    """Return how many drafted tokens and which confidence threshold were fastest, and the section that shows it.

    Of the drafter in `folder`, at temperature 0 and the lowest concurrency, by the mean speed-up over the benchmarks. Raises
    UserError where nothing of it was measured.
    """
    digest = checkpoint_digest(folder)
    lengths = {
        place[4]: (settings["system"]["num_speculative_tokens"], settings["system"].get("confidence_threshold", 0))
        for place, settings, _ in results.under("serve/")
        if settings["system"].get("checkpoint") == digest and "num_speculative_tokens" in settings["system"]
    }
    cells = [(key, cell) for runs in report.grids(results).values() for key, cell in runs.items() if key[0] == "T0"]
    least = min((key[2] for key, _ in cells), default=0)
    some = [cell for key, cell in cells if key[2] == least]
    rows = {}
    for system, length in sorted(lengths.items(), key=lambda item: item[1]):
        measured = [cell for cell in some if system in cell]
        if measured:
            tau, speed_up = (np.mean([of(cell, system) for cell in measured]) for of in (report.served_tau, report.speed_up))
            rows[length] = float(tau), float(speed_up)
    if not rows:
        raise UserError(
            f"{results.path}: holds no speed of the drafter in {folder} with a num_speculative_tokens; run 'bench serve' with "
            "--systems n3=CKPT,num_speculative_tokens=3 and the like first"
        )
    best = max(rows, key=lambda length: rows[length][1])
    lines = [[str(n), str(threshold or "none"), number(tau, 3), number(up, 3)] for (n, threshold), (tau, up) in rows.items()]
    shown = table(["Tokens a block", "Confidence threshold", "tau", "Speed-up"], lines)
    text = (
        f"## Tokens a block\n\nOn conversations of the corpus that were held out for development, concurrency {least}, measured on "
        f"{describe(results.machine)}; {best[0]} {f'and a threshold of {best[1]}' if best[1] else 'without a threshold'} were "
        f"fastest:\n\n{shown}"
    )
    return best, text


def training(run: Path, beside: Sequence[Path], command: str) -> str:
    """Return the section on how the drafter was made: command, data, hours, settings, learning curves."""
    text = _text(run / "config.yaml")
    histories = [(folder.name, history(folder)) for folder in (run, *beside)]
    records = histories[0][1]
    names = " and then ".join(f"`{folder.name}`" for folder in passes(run))
    lines = [
        "## Training",
        f"```\n{command}\n```",
        f"{records[-1]['step']:,} steps in {hours(records):.2f} hours, evaluation included, as {names} of that command. {_data(run)}",
        *filter(None, [_begun([run, *beside])]),
    ]
    for name, told in histories:
        lines += [f"Learning curve of `{name}`, each row the mean over its steps:", curve(told)]
    evaluations = [(name, record) for name, told in histories for record in told if "evaluation_seconds" in record]
    if evaluations:
        rules = list(dict.fromkeys(key for _, record in evaluations for key in record if key.startswith("tau_")))
        rows = [[name, f"{record['step']:,}", *(number(record.get(rule), 3) for rule in rules)] for name, record in evaluations]
        header = ["Arm", "Step", *(rule.removeprefix("tau_") for rule in rules)]
        lines += ["Acceptance length on conversations of the corpus that were held out for development:", table(header, rows)]
    return "\n\n".join([*lines, "All settings:", f"```yaml\n{text.strip()}\n```"])


def _data(run: Path) -> str:
    """Return a sentence on the run's corpus. Raises UserError where that is not here any more."""
    from vllm_lilicorr.trainer.corpus import Corpus

    path = Path(read_yaml(run / "config.yaml", "configs/smollm2-135m.yaml").get("data", {}).get("path", ""))
    if not (path / "corpus.json").exists():
        raise UserError(f"{path}: the run's corpus is not there, of which the card tells; write the card where the run was made")
    corpus = Corpus(path)
    rows, answers = (sum(entry[key] for entry in corpus.reports) for key in ("rows", "answer_tokens"))
    sampling = f"temperature {corpus.sampling['temperature']:g}, at most {corpus.sampling['max_tokens']} tokens a turn"
    return f"Data: {rows:,} prompts answered by the target itself ({sampling}), {answers:,} answer tokens."


def _begun(runs: Sequence[Path]) -> str:
    """Return a sentence on the checkpoints from elsewhere that the runs began with; "" where all began with new weights."""
    firsts = [passes(run)[0] for run in runs]
    begun = [(first.name, warm_start(first)) for first in firsts]
    told = [f"`{name}` began with the weights of `{checkpoint}`" for name, checkpoint in begun if checkpoint]
    return f"{', '.join(told)}: its backbone, and where the head is of the same kind its head." if told else ""


def warm_start(run: Path) -> str | None:
    """Return the checkpoint that a run began with, as its configuration names it."""
    found: str | None = read_yaml(run / "config.yaml", "configs/smollm2-135m.yaml").get("run", {}).get("warm_start")
    return found


def passes(run: Path) -> list[Path]:
    """Return the runs that made a drafter, the first first: `run` began with the weights that the one before it exported, and so on.
    A checkpoint from elsewhere ends the row."""
    begun = warm_start(run)
    before = Path(begun).parent if begun else None
    return [*(passes(before) if before and (before / "metrics.jsonl").exists() else []), run]


def history(run: Path) -> list[dict[str, Any]]:
    """Return the records of a run and of those before it (`passes`), steps counted through."""
    told: list[dict[str, Any]] = []
    for folder in passes(run):
        done = told[-1]["step"] if told else 0
        told += [record | {"step": done + record["step"]} for record in read_metrics(folder)]
    return told


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Return the records of a run, steps and evaluations, in order. Raises UserError where there is no step among them."""
    path = run / "metrics.jsonl"
    try:
        records = [json.loads(line) for line in _text(path).splitlines() if line.strip()]
    except ValueError as error:
        raise UserError(f"{path}: is not JSON Lines ({error}); the run's own file is expected") from None
    if not any("loss" in record for record in records):
        raise UserError(f"{path}: holds no training step; name run.output of a run that has taken some")
    return records


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); name run.output of the training run") from None


def hours(records: Sequence[dict[str, Any]]) -> float:
    """Return the time of all steps and evaluations; what a run waited between two starts is not in it."""
    return sum(record.get("seconds", 0.0) + record.get("evaluation_seconds", 0.0) for record in records) / 3600


def curve(records: Sequence[dict[str, Any]]) -> str:
    """Return the learning curve as a table of at most ROWS rows."""
    steps = [record for record in records if "loss" in record]
    terms = {term: title for term, title in TERMS.items() if any(term in record for record in steps)}
    edges = np.linspace(0, len(steps), min(ROWS, len(steps)) + 1).round().astype(int)
    rows = []
    for first, end in itertools.pairwise(edges):
        some = steps[first:end]
        # A step that was not finite and was tolerated has null in place of its terms.
        means = [np.mean([record[term] for record in some if record.get(term) is not None] or [np.nan]) for term in terms]
        so_far = hours([record for record in records if record["step"] <= some[-1]["step"]])
        rows.append([f"{some[0]['step']:,}-{some[-1]['step']:,}", f"{so_far:.2f}", *(number(float(mean), 3) for mean in means)])
    return table(["Steps", "Hours", *terms.values()], rows)


def measured(results: Results) -> str:
    """Return the section on acceptance: the report's tables, and where and how they were measured."""
    runs = [run for run in results.invocations if "acceptance" in run["command"] or "bench run" in run["command"]]
    where = f"Measured on {describe(results.machine)}, on prompts that were never trained on:"
    commands = dict.fromkeys(f"- {run['date']}, commit {short(run['commit'])}: `{run['command']}`" for run in runs)
    return "\n\n".join([report.acceptance_tables(results), "\n".join([where, "", *commands])])
