"""Benchmark prompts by name: from a folder of JSON Lines files, or from the Hugging Face hub through `datasets`.

A row is a conversation as `vllm_lilicorr.chat` reads it (`{"turns": [...]}`), and may carry a `category`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..chat import BadPrompt, Conversation, parse_row, read_rows
from ..errors import UserError, nearest

Row = Mapping[str, Any]

_MATHS = "{}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
_CODE = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{}\n```"
_CONTEST = (
    "You are an expert Python programmer. You will be given a programming problem; write a correct Python program that solves it "
    "and passes all tests.\n\n{}\n\n{}"
)
_HUB = "https://huggingface.co/datasets/{}/resolve/main/{}"
# What stands in SPEED-Bench for prompts that its authors may not redistribute.
_WITHHELD = "FULL BENCHMARK DATA SHOULD BE FETCHED"


def _contest(row: Row) -> list[str]:
    starter = row.get("starter_code")
    return [_CONTEST.format(row["question_content"], f"Begin with:\n```python\n{starter}\n```" if starter else "")]


def _speed(row: Row) -> list[str]:
    turns = row["turns"] if "turns" in row else [message["content"] for message in row["messages"] if message["role"] == "user"]
    if any(turn.startswith(_WITHHELD) for turn in turns):
        raise BadPrompt("is withheld by the hub: prepare SPEED-Bench with its authors' script and give its folder with --prompts-dir")
    return list(turns)


@dataclass(frozen=True)
class Source:
    """One benchmark. title: as the paper writes it; hub, subset, split: where its rows are; turns: a row's user turns.

    files: files of the hub's repository to read as JSON where it has no table `datasets` could load; aliases: other names its
    file may have in a folder.
    """

    title: str
    hub: str
    turns: Callable[[Row], list[str]]
    split: str = "test"
    subset: str | None = None
    files: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()


def _speed_source(title: str, subset: str, *aliases: str) -> Source:
    return Source(title, "nvidia/SPEED-Bench", _speed, subset=subset, aliases=(subset, *aliases))


SOURCES = {
    "gsm8k": Source("GSM8K", "openai/gsm8k", lambda row: [_MATHS.format(row["question"])], subset="main"),
    "math500": Source("MATH-500", "HuggingFaceH4/MATH-500", lambda row: [_MATHS.format(row["problem"])], aliases=("math-500",)),
    "aime2025": Source("AIME 2025", "math-ai/aime25", lambda row: [_MATHS.format(row["problem"])], aliases=("aime25",)),
    "humaneval": Source("HumanEval", "openai/openai_humaneval", lambda row: [_CODE.format(row["prompt"])]),
    "mbpp": Source("MBPP", "google-research-datasets/mbpp", lambda row: [row["prompt"]], subset="sanitized"),
    "livecodebench": Source(
        "LiveCodeBench",
        "livecodebench/code_generation_lite",
        _contest,
        files=("test.jsonl", *(f"test{n}.jsonl" for n in range(2, 7))),
    ),
    "alpaca": Source(
        "Alpaca", "tatsu-lab/alpaca_eval", lambda row: [row["instruction"]], files=("alpaca_eval.json",), aliases=("alpaca-eval",)
    ),
    "mt-bench": Source("MT-Bench", "HuggingFaceH4/mt_bench_prompts", lambda row: list(row["prompt"]), split="train"),
    "speed": _speed_source("SPEED", "qualitative", "speed-qualitative"),
    "speed-1k": _speed_source("SPEED 1K", "throughput_1k", "speed-throughput-1k"),
    "speed-2k": _speed_source("SPEED 2K", "throughput_2k", "speed-throughput-2k"),
}
"""The paper's nine benchmarks, and the throughput splits of SPEED that its concurrency sweep uses."""

BENCHMARKS = tuple(name for name in SOURCES if not name.startswith("speed-"))


def title(name: str) -> str:
    """Return the benchmark's name as tables print it: `speed:coding` is "SPEED (coding)"."""
    base, _, category = name.partition(":")
    known = SOURCES[base].title if base in SOURCES else base
    return f"{known} ({category})" if category else known


@dataclass(frozen=True)
class Prompts:
    """A benchmark's conversations, the first so many of its file in order; `fingerprint` names their text."""

    name: str
    conversations: tuple[Conversation, ...]

    @property
    def fingerprint(self) -> str:
        text = json.dumps([[conversation.messages, conversation.turns] for conversation in self.conversations])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def load(names: Sequence[str] | None, folder: Path | None, limit: int | None) -> tuple[list[Prompts], dict[str, str]]:
    """Return the prompts of the benchmarks `names`, at most `limit` of each, and {name: why} of those that are not to be had.

    NAME:CATEGORY takes the rows of one category. Without names: every file in `folder`, or the paper's nine. Raises UserError
    for a name that is neither known nor a file, or has a '/' (names are steps of the results' keys), for a folder that is none,
    and NoPrompts when nothing at all was found.
    """
    if folder is not None and not folder.is_dir():
        raise UserError(f"--prompts-dir {folder}: is no folder; give one with JSON Lines files such as gsm8k.jsonl")
    names = list(names or (_in_folder(folder) if folder is not None else BENCHMARKS))
    found, missing = [], {}
    for name in names:
        if "/" in name:
            raise UserError(f"--datasets {name}: must be NAME or NAME:CATEGORY without '/'; rename the file or the category")
        base, _, category = name.partition(":")
        file = _file(base, folder)
        if base not in SOURCES and file is None:
            known = [*SOURCES, *(_in_folder(folder) if folder is not None else [])]
            raise UserError(f"--datasets {name}: is no known benchmark{nearest(base, known)}; known are {', '.join(known)}")
        try:
            rows = _folder_rows(file, base, folder) if folder is not None else _hub_rows(SOURCES[base])
            conversations = _take(rows, category, limit)
        except _Missing as error:
            missing[name] = str(error)
            continue
        found.append(Prompts(name, tuple(conversations)))
    if not found:
        raise NoPrompts(missing)
    return found, missing


class NoPrompts(UserError):
    """None of the benchmarks asked for can be had; `missing` is {name: why}."""

    def __init__(self, missing: Mapping[str, str]) -> None:
        super().__init__("; ".join(f"{name}: {reason}" for name, reason in missing.items()) or "no benchmark was named")
        self.missing = dict(missing)


class _Missing(Exception):
    """A benchmark cannot be had; the text says why and what to do."""


def _in_folder(folder: Path) -> list[str]:
    """Return the benchmarks in a folder, the paper's first and in its order."""
    known = [name for name in SOURCES if _file(name, folder)]
    taken = {_file(name, folder) for name in known}
    return [*known, *(path.stem for path in sorted(folder.glob("*.jsonl")) if path not in taken)]


def _file(name: str, folder: Path | None) -> Path | None:
    if folder is None:
        return None
    aliases = SOURCES[name].aliases if name in SOURCES else ()
    return next((path for stem in (name, *aliases) if (path := folder / f"{stem}.jsonl").is_file()), None)


def _folder_rows(file: Path | None, name: str, folder: Path) -> Iterator[tuple[str, Any]]:
    if file is None:
        raise _Missing(f"{folder} has no {name}.jsonl")
    for number, row in read_rows(file):
        yield f"{file}, line {number}", row


def _hub_rows(source: Source) -> Iterator[tuple[str, Any]]:
    try:
        import datasets
    except ImportError:
        raise _Missing("needs the package datasets (pip install datasets), or a folder given with --prompts-dir") from None
    try:
        if source.files:
            files = [_HUB.format(source.hub, file) for file in source.files]
            table = datasets.load_dataset("json", data_files=files, split="train")
        else:
            table = datasets.load_dataset(source.hub, source.subset, split=source.split)
    except Exception as error:  # the hub client and the readers raise dozens of unrelated kinds
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise _Missing(f"{source.hub} cannot be loaded ({reason}); give a folder with --prompts-dir") from None
    for number, row in enumerate(table):
        try:
            yield f"{source.hub}, row {number}", {"turns": source.turns(row), "category": row.get("category")}
        except BadPrompt as error:
            raise _Missing(f"{source.hub}, row {number} {error}") from None
        except KeyError as error:
            raise _Missing(f"{source.hub} has no column {error} any more; give a folder with --prompts-dir") from None


def _take(rows: Iterator[tuple[str, Any]], category: str, limit: int | None) -> list[Conversation]:
    conversations: list[Conversation] = []
    categories = set()
    for where, row in rows:
        if limit is not None and len(conversations) >= limit:
            break
        if category:
            categories.add(str(row.get("category")) if isinstance(row, Mapping) else "")
            if not isinstance(row, Mapping) or row.get("category") != category:
                continue
        try:
            conversations.append(parse_row(row))
        except BadPrompt as error:
            raise UserError(f"{where}: {error}; mend or remove the row") from None
    if not conversations:
        raise _Missing(f"has no row of category '{category}'; it has {', '.join(sorted(categories))}" if category else "holds no prompt")
    return conversations
