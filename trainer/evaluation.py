"""Acceptance length by exact simulation of greedy speculative decoding along the target's own answers.

A greedy target's answer is one fixed sequence, so what a verifier would accept at any anchor is how long the draft there
agrees with it. Every position of every held-out turn is drafted once, teacher-forced; each decode rule then walks from
block to block over its own accepted lengths. That is the run `vllm_lilicorr.reference` would make, block for block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist

from .corpus import Conversation, Corpus
from .data import Anchors, collate
from .objectives import Objective
from .settings import require
from .states import StateSource


@dataclass(frozen=True)
class EvaluationConfig:
    """every: optimizer steps between evaluations on the conversations held out by `data.holdout` (0: at the end only).

    conversations: at most this many of them, while training; the last evaluation takes all. anchors: positions drafted
    in one pass.
    """

    every: int = 0
    conversations: int | None = None
    anchors: int = 256

    def __post_init__(self) -> None:
        require(self.every >= 0, "every", f"must not be negative, got {self.every}")
        few = self.conversations
        require(few is None or few >= 1, "conversations", f"must be at least 1, or null for all of them; got {few}")
        require(self.anchors >= 1, "anchors", f"must be at least 1, got {self.anchors}")


@dataclass(frozen=True)
class Acceptance:
    """accepted draft tokens and verified blocks; `tau`, the block-weighted acceptance length."""

    accepted: int
    blocks: int

    @property
    def tau(self) -> float:
        return (self.accepted + self.blocks) / self.blocks if self.blocks else float("nan")


def simulate(accepted: np.ndarray) -> Acceptance:
    """Return the blocks of one turn whose verifier would accept `accepted[i]` drafts from the turn's i-th position.

    The first token comes from the prefill; a block is anchored at the last committed token while the turn goes on.
    """
    at, total, blocks = 0, 0, 0
    while at < len(accepted):
        total += int(accepted[at])
        blocks += 1
        at += int(accepted[at]) + 1
    return Acceptance(total, blocks)


def turn_labels(conversation: Conversation, span: tuple[int, int], tail: Sequence[int], slots: int) -> np.ndarray:
    """Return the target's own tokens [end - 1 - start, slots] after each anchor of a turn, `tail` standing past its end."""
    start, end = span
    extended = np.concatenate((conversation.ids[start:end].astype(np.int64), np.asarray(tail, np.int64)))
    return np.lib.stride_tricks.sliding_window_view(extended[1:], slots)[: end - 1 - start]


class Evaluator:
    """Evaluates one objective's drafter on held-out conversations, dealt over the ranks."""

    def __init__(
        self, corpus: Corpus, held_out: np.ndarray, states: StateSource, max_length: int, slots: int, config: EvaluationConfig
    ) -> None:
        self.corpus, self.held_out, self.states = corpus, held_out, states
        self.max_length, self.slots, self.config = max_length, slots, config
        self._tails: dict[int, list[list[int]]] = {}  # online, each costs a decode of the target

    def prepare(self) -> None:
        """Look up all continuations of held-out turns; raises UserError where the cache lacks one."""
        for index in map(int, self.held_out):
            self._tails[index] = self.states.tails(index, self.corpus[index], self.max_length, self.slots - 1)

    @torch.no_grad()
    def run(self, objective: Objective, device: torch.device, everything: bool) -> dict[str, Acceptance]:
        """Return the acceptance of every decode rule and, for rules that choose among candidates, of `coverage`: the path
        that follows the candidates' best.

        All ranks must call it together; each gets the sums over all of them.
        """
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if self.states.partitioned:
            rank, world = 0, 1  # the target runs on all ranks together, so each rank evaluates everything
        chosen = self.held_out if everything else self.held_out[: self.config.conversations]
        mine = chosen[rank::world]
        work = [chunk for index in mine for chunk in self._chunks(int(index))]
        # Ranks that share weights run in step: those with less to do repeat a chunk and drop its result.
        passes = torch.tensor([len(work)])
        if world > 1:
            passes = passes.to(device)
            dist.all_reduce(passes, op=dist.ReduceOp.MAX)
        spare = work or list(self._chunks(int(chosen[0])))[:1]
        was_training = objective.training
        objective.eval()
        accepted: dict[tuple[int, int], dict[str, list[np.ndarray]]] = {}
        for number in range(int(passes)):
            index, turn, anchors, labels = work[number] if number < len(work) else spare[0]
            lengths = self._accepted(objective, device, index, anchors, labels)
            if number < len(work):
                for rule, values in lengths.items():
                    accepted.setdefault((index, turn), {}).setdefault(rule, []).append(values)
        objective.train(was_training)
        sums: dict[str, list[int]] = {}
        for by_rule in accepted.values():
            for rule, parts in by_rule.items():
                result = simulate(np.concatenate(parts))
                entry = sums.setdefault(rule, [0, 0])
                entry[0] += result.accepted
                entry[1] += result.blocks
        return _sum_over_ranks(sums, objective, device, world)

    def _chunks(self, index: int) -> Iterator[tuple[int, int, np.ndarray, np.ndarray]]:
        conversation = self.corpus[index]
        if index not in self._tails:
            self._tails[index] = self.states.tails(index, conversation, self.max_length, self.slots - 1)
        for turn, ((start, end), tail) in enumerate(zip(conversation.spans, self._tails[index])):
            end = min(end, self.max_length)
            if end - start < 2:
                continue
            anchors = np.arange(start, end - 1)
            labels = turn_labels(conversation, (start, end), tail, self.slots)
            for at in range(0, len(anchors), self.config.anchors):
                part = slice(at, at + self.config.anchors)
                yield index, turn, anchors[part], labels[part]

    def _accepted(
        self, objective: Objective, device: torch.device, index: int, anchors: np.ndarray, labels: np.ndarray
    ) -> dict[str, np.ndarray]:
        conversation = self.corpus[index]
        ends = np.full(len(anchors), len(conversation.ids) + 2 * self.slots)
        drawn = Anchors(anchors, ends, np.arange(len(anchors)))
        batch = collate([conversation], [drawn], self.states.of([index], [conversation], self.max_length), self.max_length)
        blocks = objective.draft_blocks(batch.to(device))
        truth = torch.from_numpy(labels.copy()).to(device)
        blocks = replace(blocks, labels=truth)
        drafted, oracle = objective.drafts(blocks)
        lengths = {rule: (tokens == truth).int().cumprod(-1).sum(-1) for rule, tokens in drafted.items()}
        if oracle is not None:
            lengths["coverage"] = oracle
        return {rule: values.cpu().numpy() for rule, values in lengths.items()}


def _sum_over_ranks(sums: dict[str, list[int]], objective: Objective, device: torch.device, world: int) -> dict[str, Acceptance]:
    rules = [*objective.rules, *(["coverage"] if objective.bounded else [])]
    table = torch.tensor([sums.get(rule, [0, 0]) for rule in rules], dtype=torch.long, device=device)
    if world > 1:
        dist.all_reduce(table)
    return {rule: Acceptance(*map(int, row)) for rule, row in zip(rules, table.tolist())}
