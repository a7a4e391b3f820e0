"""Acceptance length of drafters per benchmark: every decode rule at temperature 0, sampled and point proposals at temperature 1.

At temperature 0 the target's answer is one fixed sequence. It is decoded once; each drafter then drafts at every position of it,
teacher-forced, and every rule walks from block to block over its own accepted lengths: block for block the run that
`vllm_lilicorr.reference` would make, for all rules at the price of one. `coverage` is the bound that no rule over the same
candidates can pass: the draft that follows the target for as long as the target's token is among a slot's candidates.

Above temperature 0 the answers depend on the drafts, so the reference decoder runs each drafter with each seed. `sampled`
proposals are drawn; `point` proposals are the drafter's own rule without drawing (the paper's argmax proposals).

Tau is block-weighted: accepted tokens and blocks are summed before dividing. Figures are stored as histograms a prompt
(blocks by accepted drafts), from which tables, intervals and plots are made by `bench report`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import multiprocessing
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..chat import Conversation, render
from ..errors import UserError
from . import _datasets, _stats
from ._results import Results, checkpoint_digest

COVERAGE = "coverage"
PROPOSALS = ("sampled", "point")
BATCH_TOKENS = 8192
"""Prompt tokens prefilled together: attention masks and logits of a batch grow with its longest prompt."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", required=True, help="the target's folder, or its hub id")
    parser.add_argument("--draft", nargs="+", required=True, metavar="CKPT", help="drafters, as CKPT or NAME=CKPT; the first is what others are compared with")
    parser.add_argument("--datasets", nargs="+", metavar="NAME", help=f"NAME or NAME:CATEGORY; default: all files of --prompts-dir, or {', '.join(_datasets.BENCHMARKS)}")
    parser.add_argument("--prompts-dir", type=Path, help="folder of NAME.jsonl, rows {\"turns\": [...]}; default: the Hugging Face hub")
    parser.add_argument("--num-prompts", type=int, help="only the first N of each benchmark")
    parser.add_argument("--max-tokens", type=int, default=512, help="tokens an answer")
    parser.add_argument("--max-prompt-tokens", type=int, help="leave longer prompts out; default: what the target can take")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43, 44], help="runs above temperature 0")
    parser.add_argument("--proposals", nargs="+", choices=PROPOSALS, default=list(PROPOSALS), help="above temperature 0")
    parser.add_argument("--num-slots", type=int, help="draft only this many leading slots")
    parser.add_argument("--batch-size", type=int, default=16, help="prompts decoded together")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", help="default: cuda where there is one, else cpu")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads a process")
    parser.add_argument("--processes", type=int, default=1, help="processes that share the benchmarks out")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="where results.json is kept; run again to resume")


def main(args: argparse.Namespace) -> int:
    from . import report

    results = Results(args.output)
    measure(args, results)
    print(report.acceptance_tables(results))
    return 0


@dataclass(frozen=True)
class Setup:
    """What a worker needs to know, in a form that travels to another process."""

    target: str
    drafts: dict[str, str]
    dtype: str
    device: str
    threads: int
    batch_size: int
    max_tokens: int
    max_prompt_tokens: int | None
    num_slots: int | None


@dataclass(frozen=True)
class Task:
    """One piece of work: a benchmark's greedy answers and what each drafter accepts of them, or one sampled run of one drafter.

    parts: {drafter: (key, settings)} of what it yields.
    """

    prompts: _datasets.Prompts
    parts: dict[str, tuple[str, dict[str, Any]]]
    temperature: float = 0.0
    proposal: str = ""
    seed: int = 0

    def __str__(self) -> str:
        sampled = f", {next(iter(self.parts))}, {self.proposal}, seed {self.seed}" if self.temperature else ""
        return f"{self.prompts.name}, T={self.temperature:g}{sampled}"


def measure(args: argparse.Namespace, results: Results) -> None:
    """Measure what `results` lacks, part by part."""
    for name in ("num_prompts", "max_tokens", "max_prompt_tokens", "num_slots", "batch_size", "threads", "processes"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    prompts, missing = _datasets.load(args.datasets, args.prompts_dir, args.num_prompts)
    results.note_missing(missing, [one.name for one in prompts])
    drafts = named(args.draft)
    setup = Setup(
        args.target, drafts, args.dtype, args.device or _device(), args.threads, args.batch_size, args.max_tokens,
        args.max_prompt_tokens, args.num_slots,
    )  # fmt: skip
    check(setup)
    results.note_order("acceptance", list(drafts))
    tasks = list(plan(args, setup, prompts, results))
    for task, found in run(setup, tasks, args.processes):
        for name, result in found.items():
            results.put(*task.parts[name], result)
        print(f"acceptance: {task}: {', '.join(f'{name} {summary(result)}' for name, result in found.items())}", file=sys.stderr)


def named(drafts: Sequence[str]) -> dict[str, str]:
    """Return {name: checkpoint} of `[NAME=]CKPT` arguments; a nameless one is called by its folder."""
    found: dict[str, str] = {}
    for text in drafts:
        name, separator, path = text.partition("=")
        name, path = (name, path) if separator else (Path(text).name, text)
        if not name or not path or "/" in name:
            raise UserError(f"--draft {text}: must be a checkpoint, or NAME=CHECKPOINT with a name without '/'")
        if name in found:
            raise UserError(f"--draft {text}: the name '{name}' is taken; give NAME={path} another name")
        found[name] = path
    return found


def check(setup: Setup) -> None:
    """Raise UserError, before anything is decoded, where a drafter does not fit the target or has too few slots."""
    from ..config import DraftConfig
    from ..model.checkpoint import resolve_folder
    from ..target import TargetShape, check_fits, load_tokenizer

    tokenizer, shape = load_tokenizer(setup.target), TargetShape.load(setup.target)
    for name, path in setup.drafts.items():
        config = DraftConfig.load(resolve_folder(path))
        for warning in check_fits(config, shape, tokenizer):
            print(f"warning: {warning}", file=sys.stderr)
        if setup.num_slots is not None and setup.num_slots > config.num_slots:
            raise UserError(f"--num-slots is {setup.num_slots}, but {name} drafts at most {config.num_slots}; lower it")


def plan(args: argparse.Namespace, setup: Setup, prompts: Sequence[_datasets.Prompts], results: Results) -> Iterator[Task]:
    """Yield the work whose parts are not in `results` yet."""
    named = ("target", "dtype", "max_tokens", "max_prompt_tokens", "num_slots")
    common = {key: value for key, value in asdict(setup).items() if key in named}
    digests = {name: checkpoint_digest(path) for name, path in setup.drafts.items()}
    offered = {name: proposals(path) for name, path in setup.drafts.items()}
    for temperature in args.temperature:
        for one in prompts:
            settings = {**common, "prompts": one.fingerprint, "temperature": temperature}
            if temperature == 0:
                parts = {
                    name: (f"acceptance/T0/{one.name}/{name}", {**settings, "draft": path, "checkpoint": digests[name]})
                    for name, path in setup.drafts.items()
                }
                absent = {name: part for name, part in parts.items() if results.get(*part) is None}
                if absent:
                    yield Task(one, absent)
                continue
            for name, path in setup.drafts.items():
                for proposal in (kind for kind in args.proposals if kind in offered[name]):
                    for seed in args.seeds:
                        key = f"acceptance/T{temperature:g}/{one.name}/{name}/{proposal}/seed{seed}"
                        mine = {**settings, "draft": path, "checkpoint": digests[name], "batch_size": setup.batch_size, "seed": seed}
                        if results.get(key, mine) is None:
                            yield Task(one, {name: (key, mine)}, temperature, proposal, seed)


def proposals(path: str) -> dict[str, str]:
    """Return {kind of proposal: rule} of the drafter in `path`: every head has a rule of its own, some can also draw."""
    import torch

    from ..config import DraftConfig
    from ..model import Draft
    from ..model.checkpoint import resolve_folder

    with torch.device("meta"):
        rules = Draft(DraftConfig.load(resolve_folder(path))).head.rules
    return {"point": rules[0], **({"sampled": "sampled"} if "sampled" in rules else {})}


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def summary(result: dict[str, Any]) -> str:
    return ", ".join(f"{rule} {_stats.tau(histograms):.3f}" for rule, histograms in result["rules"].items())


def run(setup: Setup, tasks: Sequence[Task], processes: int) -> Iterator[tuple[Task, dict[str, Any]]]:
    """Yield each task with its results {drafter: result} as it is finished, in `processes` processes."""
    if processes == 1 or len(tasks) < 2:
        worker = Worker(setup) if tasks else None
        for task in tasks:
            assert worker is not None
            yield task, worker.do(task)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(processes, len(tasks)), context, initializer=_start, initargs=(setup,)) as pool:
        futures: dict[Future[dict[str, Any]], Task] = {pool.submit(_do, task): task for task in tasks}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


_worker: Worker | None = None


def _start(setup: Setup) -> None:
    global _worker
    # Ctrl-C ends a worker without a word, and a parent that is killed takes its workers along (PR_SET_PDEATHSIG, Linux).
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    _worker = Worker(setup)


def _do(task: Task) -> dict[str, Any]:
    assert _worker is not None
    return _worker.do(task)


@dataclass(frozen=True)
class Answer:
    """A turn's prompt and answer (token ids); the tokens the target would have gone on with; per drafted block, the accepted."""

    prompt: list[int]
    tokens: list[int]
    tail: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)


class Worker:
    """A process' target and drafters."""

    def __init__(self, setup: Setup) -> None:
        import torch

        from ..reference import DTYPES, stop_token_ids
        from ..target import load_target, load_tokenizer

        if setup.device == "cpu":
            torch.set_num_threads(setup.threads)
        self.setup, self.dtype = setup, DTYPES[setup.dtype]
        self.tokenizer = load_tokenizer(setup.target)
        self.target = load_target(setup.target, (), self.dtype, setup.device)
        self.stop_ids = stop_token_ids(self.target, self.tokenizer)
        self._drafts: dict[str, Any] = {}

    def draft(self, name: str) -> tuple[Any, Any]:
        """Return the drafter and the target tapped for it, one model under all of them."""
        from ..model.checkpoint import load_draft
        from ..target import Target

        if name not in self._drafts:
            draft = load_draft(self.setup.drafts[name], self.setup.device, self.dtype)
            self._drafts[name] = (draft, Target(self.target.model, draft.config.target_layer_ids))
        return self._drafts[name]

    def do(self, task: Task) -> dict[str, Any]:
        """Return {drafter: result}; a result holds the drafter's architecture and whether it has a convolution, `rules` as
        {rule: histograms [prompts][S + 1]}, and counts."""
        return self._sampled(task) if task.temperature else self._greedy(task)

    def _slots(self, name: str) -> int:
        return self.setup.num_slots or self.draft(name)[0].config.num_slots

    def _greedy(self, task: Task) -> dict[str, Any]:
        from ..reference import ReferenceDecoder

        most = max(self._slots(name) for name in task.parts)
        decoder = ReferenceDecoder(self.target)
        limit = self.setup.max_tokens

        def decode(batch: list[list[int]]) -> Iterator[Answer]:
            # On past the answer's end: what a verifier accepts of a last block is counted before the end cuts it.
            for prompt, decoded in zip(batch, decoder.decode(batch, limit + most - 1), strict=True):
                end = answer_length(decoded.output_ids, self.stop_ids, limit)
                yield Answer(prompt, decoded.output_ids[:end], decoded.output_ids[end:])

        answers = self._ask(task.prompts.conversations, decode)
        return {name: self._result(name, answers, self._walk(name, answers)) for name in task.parts}

    def _walk(self, name: str, answers: list[list[Answer]]) -> dict[str, list[list[int]]]:
        """Return histograms [prompts][S + 1] of every rule of a drafter along the target's answers."""
        draft, target = self.draft(name)
        slots = self._slots(name)
        rules = [rule for rule in draft.head.rules if rule != "sampled"]
        histograms: dict[str, list[list[int]]] = {}
        for row, turns in enumerate(answers):
            for answer in turns:
                for rule, accepted in accepted_along(target, draft, answer, rules, slots).items():
                    table = histograms.setdefault(rule, [[0] * (slots + 1) for _ in answers])
                    for count in blocks_of(accepted):
                        table[row][count] += 1
        return histograms

    def _sampled(self, task: Task) -> dict[str, Any]:
        from ..reference import ReferenceDecoder, Sampling

        (name,) = task.parts
        draft, target = self.draft(name)
        rule = {"point": draft.head.rules[0], "sampled": "sampled"}[task.proposal]
        sampling = Sampling(task.temperature, task.seed)
        decoder = ReferenceDecoder(target, draft, rule, sampling, sorted(self.stop_ids), self._slots(name))

        def decode(batch: list[list[int]]) -> Iterator[Answer]:
            for prompt, decoded in zip(batch, decoder.decode(batch, self.setup.max_tokens), strict=True):
                yield Answer(prompt, decoded.output_ids, accepted=decoded.accepted)

        answers = self._ask(task.prompts.conversations, decode)
        table = [[0] * (self._slots(name) + 1) for _ in answers]
        for row, turns in enumerate(answers):
            for answer in turns:
                for count in answer.accepted:
                    table[row][count] += 1
        return {name: self._result(name, answers, {rule: table})}

    def _result(self, name: str, answers: list[list[Answer]], histograms: dict[str, list[list[int]]]) -> dict[str, Any]:
        tokens = sum(len(answer.tokens) for turns in answers for answer in turns)
        counts = {"answered": sum(map(bool, answers)), "prompts": len(answers), "tokens": tokens}
        config = self.draft(name)[0].config
        return {"architecture": config.architecture, "convolution": config.conv is not None, **counts, "rules": histograms}

    def _ask(
        self, conversations: Sequence[Conversation], decode: Callable[[list[list[int]]], Iterator[Answer]]
    ) -> list[list[Answer]]:
        """Return the answers to every conversation's turns, one after another, each after the answers before it.

        A turn that leaves the target no room for an answer, or is longer than asked for, is not asked, nor are those after it.
        """
        most = min(self.target.max_positions - 1, self.setup.max_prompt_tokens or self.target.max_positions)
        messages = [list(conversation.messages) for conversation in conversations]
        answers: list[list[Answer]] = [[] for _ in conversations]
        for turn in range(max(len(conversation.turns) for conversation in conversations)):
            rows = []
            for index, conversation in enumerate(conversations):
                if turn < len(conversation.turns) and len(answers[index]) == turn:
                    messages[index].append({"role": "user", "content": conversation.turns[turn]})
                    prompt = render(self.tokenizer, messages[index])
                    if len(prompt) <= most:
                        rows.append((index, prompt))
            rows.sort(key=lambda row: len(row[1]))  # prompts of one length leave no holes
            for batch in batches(rows, self.setup.batch_size):
                for (index, _), answer in zip(batch, decode([prompt for _, prompt in batch]), strict=True):
                    answers[index].append(answer)
                    text = self.tokenizer.decode(answer.tokens, skip_special_tokens=True)
                    messages[index].append({"role": "assistant", "content": text})
        return answers


def batches(rows: Sequence[tuple[int, list[int]]], most: int) -> Iterator[Sequence[tuple[int, list[int]]]]:
    """Yield runs of at most `most` rows (index, prompt), sorted by length, whose padded prompts stay within BATCH_TOKENS."""
    first = 0
    for end in range(1, len(rows) + 1):
        if end == len(rows) or end - first == most or (end + 1 - first) * len(rows[end][1]) > BATCH_TOKENS:
            yield rows[first:end]
            first = end


def answer_length(tokens: Sequence[int], stop_ids: set[int], limit: int) -> int:
    """Return how many of the decoded tokens are the answer: up to the limit or a stop token, that one included."""
    end = next((index + 1 for index, token in enumerate(tokens) if token in stop_ids), limit)
    return min(end, limit, len(tokens))


def accepted_along(target: Any, draft: Any, answer: Answer, rules: Sequence[str], slots: int) -> dict[str, list[int]]:
    """Return, for every rule and `coverage`, how many drafts a greedy verifier accepts at each anchor of an answer [n - 1];
    -1 where the block would pass the drafter's maximum length, so that there is none."""
    import torch

    from ..reference import blocks_at

    config = draft.config
    anchors = range(len(answer.prompt), len(answer.prompt) + len(answer.tokens) - 1)
    fit = [anchor for anchor in anchors if anchor + slots + config.first_slot <= config.max_position_embeddings]
    # No token is -1: past the target's own maximum length nothing is accepted.
    following = [*answer.tokens[1:], *answer.tail, *[-1] * slots]
    truth = torch.tensor([following[i : i + slots] for i in range(len(fit))], device=target.device)
    found: dict[str, list[int]] = {}
    at = 0
    for block in blocks_at(target, draft, [*answer.prompt, *answer.tokens], fit, slots):
        labels = truth[at : at + len(block.anchor_ids)]
        at += len(labels)
        drafted = draft.head.proposals(block, target.vocabulary, rules)
        matches = {rule: proposal.tokens == labels for rule, proposal in drafted.items()}
        candidates = drafted[rules[0]].candidate_ids
        if candidates.shape[-1] > 1:
            matches[COVERAGE] = (candidates == labels[..., None]).any(-1)
        for rule, match in matches.items():
            found.setdefault(rule, []).extend(match.long().cumprod(1).sum(1).tolist())
    return {rule: [*lengths, *[-1] * (len(anchors) - len(fit))] for rule, lengths in found.items()}


def blocks_of(accepted: Sequence[int]) -> Iterator[int]:
    """Yield the accepted drafts of the blocks one run verifies, `accepted[i]` being what it would accept from the i-th anchor.

    The first token comes from the prefill; a block is anchored at the last committed token for as long as the answer goes on.
    A step without a draft commits one token and is no block.
    """
    at = 0
    while at < len(accepted):
        if accepted[at] >= 0:
            yield accepted[at]
        at += max(accepted[at], 0) + 1
