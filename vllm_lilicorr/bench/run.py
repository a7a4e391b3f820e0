"""A whole grid from one configuration file: acceptance, serve and cost in turn, then the report with its plots.

The file has a section for each (or a list of sections, run one after another), whose keys are that benchmark's options without
their dashes; what stands under `common` goes to every section that has such an option. Of a section whose prompts are all missing
they are named, and the others run. However the run ends, the report is written. Interrupted, the same command goes on.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from ..errors import UserError, nearest
from ..yaml_files import read_yaml
from . import _datasets
from ._results import Results

BENCHMARKS = ("acceptance", "serve", "cost")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="such as configs/bench/cpu.yaml")
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS), help="of the file's sections")
    parser.add_argument("--output", type=Path, metavar="DIR", help="instead of the file's `output`")


def main(args: argparse.Namespace) -> int:
    from . import report

    output, sections = read(args.config, args.output)
    results = Results(output)
    chosen = [(name, arguments) for name, arguments in sections if name in args.only]
    without: list[_datasets.NoPrompts] = []
    try:
        for name, arguments in chosen:
            try:
                importlib.import_module(f"vllm_lilicorr.bench.{name}").measure(arguments, results)
            except _datasets.NoPrompts as error:  # days of other sections may stand before it and after it
                results.note_missing(error.missing, [])
                without.append(error)
    finally:
        report.write(results, output)
        print(f"{output}: report.md is written", file=sys.stderr)
    if chosen and len(without) == len(chosen):
        raise without[-1]
    return 0


def read(path: Path, output: Path | None = None) -> tuple[Path, list[tuple[str, argparse.Namespace]]]:
    """Return the output folder and (benchmark, options) of every section, in the order in which they run.

    Raises UserError naming file, section and key for everything that is not as it should be.
    """
    values = read_yaml(path, "configs/bench/cpu.yaml")
    known = ("output", "common", *BENCHMARKS)
    for key in values:
        if key not in known:
            raise UserError(f"{path}: {key} is no known section{nearest(str(key), known)}")
    folder = output or values.get("output")
    if not isinstance(folder, (str, Path)) or not str(folder):
        raise UserError(f"{path}: output is missing; add the folder that results are kept in")
    common = values.get("common") or {}
    sections = []
    used = {"output"}
    for name in BENCHMARKS:
        entries = values.get(name) or []
        for number, entry in enumerate(entries if isinstance(entries, list) else [entries]):
            where = f"{name}[{number}]" if isinstance(entries, list) else name
            if not isinstance(entry, Mapping) or not isinstance(common, Mapping):
                raise UserError(f"{path}: {where} and common must be sections of keys")
            parser = _Parser(f"{path}: {where}")
            importlib.import_module(f"vllm_lilicorr.bench.{name}").add_arguments(parser)
            options = {action.dest.replace("_", "-") for action in parser._actions} - {"help", "output"}
            for key in entry:
                if key not in options:
                    raise UserError(f"{path}: {where}.{key} is no option of bench {name}{nearest(str(key), options)}")
            shared = {key: value for key, value in common.items() if key in options}
            used |= set(shared)
            sections.append((name, parser.parse_args(arguments({**shared, **entry, "output": str(folder)}))))
    for key in common:
        if key not in used:
            raise UserError(f"{path}: common.{key} is an option of none of the sections; remove it")
    if not sections:
        raise UserError(f"{path}: has none of the sections {', '.join(BENCHMARKS)}; add one")
    return Path(folder), sections


def arguments(options: Mapping[str, Any]) -> list[str]:
    """Return options as a command line holds them: a list is several values, true a flag, false or null nothing."""
    found: list[str] = []
    for key, value in options.items():
        if value is None or value is False:
            continue
        found.append(f"--{key}")
        if value is not True:
            found += [str(item) for item in (value if isinstance(value, list) else [value])]
    return found


class _Parser(argparse.ArgumentParser):
    """Says what is wrong with a section in one sentence, where argparse would print the usage of a command nobody typed."""

    def __init__(self, where: str) -> None:
        super().__init__(add_help=False, allow_abbrev=False)
        self.where = where

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.where}: {message.replace('argument --', '')}")
