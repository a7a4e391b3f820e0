"""What a step trains on: which conversations, which anchors, laid out as padded tensors.

Everything here is a pure function of (run seed, epoch, conversation): neither the number of ranks nor a resume changes
which anchors a conversation gets, and the order of conversations depends on (run seed, epoch) alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from vllm_lilicorr.errors import UserError

from .corpus import Conversation, Corpus
from .settings import require

_ORDER, _ANCHORS = 0, 1
"""Streams of the run's seed: one purpose never shifts another's draws."""


@dataclass(frozen=True)
class DataConfig:
    """path: the corpus folder. mode: `offline` reads states from `cache`, `online` computes them with the frozen target.

    cache: folder of cached states (default: `states` inside `path`). max_length: tokens of a conversation that are used.
    anchors: blocks a conversation and epoch. holdout: conversations kept for evaluation, spread evenly over the corpus.
    target_zero: online, partition the frozen target over the ranks (ZeRO stage 3) in place of a copy on each.
    """

    path: str
    mode: Literal["offline", "online"] = "offline"
    cache: str | None = None
    max_length: int = 3120
    anchors: int = 512
    holdout: int = 0
    target_zero: bool = False

    def __post_init__(self) -> None:
        require(self.max_length >= 2, "max_length", f"must be at least 2, got {self.max_length}")
        require(self.anchors >= 1, "anchors", f"must be at least 1, got {self.anchors}")
        require(self.holdout >= 0, "holdout", f"must not be negative, got {self.holdout}")


@dataclass(frozen=True)
class Anchors:
    """positions [M], rising; ends [M]: where each anchor's turn (or the sequence) ends; rank [M]: a random order of them."""

    positions: np.ndarray
    ends: np.ndarray
    rank: np.ndarray


def eligible_anchors(spans: Sequence[tuple[int, int]], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (positions, ends) of every token of an assistant turn that has a supervised token of its turn after it."""
    turns = [(start, min(end, length)) for start, end in spans]
    positions = [np.arange(start, end - 1) for start, end in turns if end - start > 1]
    ends = [np.full(end - 1 - start, end) for start, end in turns if end - start > 1]
    if not positions:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    return np.concatenate(positions), np.concatenate(ends)


def draw_anchors(seed: int, epoch: int, conversation: Conversation, length: int, limit: int) -> Anchors:
    """Return up to `limit` anchors of the conversation's first `length` tokens, drawn without replacement."""
    positions, ends = eligible_anchors(conversation.spans, length)
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, _ANCHORS, epoch, *conversation.key])))
    drawn = generator.permutation(len(positions))[:limit]
    order = np.argsort(drawn)
    return Anchors(positions[drawn[order]], ends[drawn[order]], order)


def epoch_order(seed: int, epoch: int, count: int) -> np.ndarray:
    """Return the order [count] in which an epoch visits the training conversations."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, _ORDER, epoch]))).permutation(count)


def split(corpus: Corpus, config: DataConfig) -> tuple[np.ndarray, np.ndarray, int]:
    """Return (training, held-out) indices into the corpus and how many conversations have no anchor and are left out.

    Parts of one conversation stay on one side. Raises UserError when nothing is left to train on.
    """
    usable, rows = [], []
    for index in range(len(corpus)):
        conversation = corpus[index]
        length = min(len(conversation.ids), config.max_length)
        if any(min(end, length) - start > 1 for start, end in conversation.spans):
            usable.append(index)
            rows.append(conversation.key[0])
    distinct = sorted(set(rows))
    if config.holdout >= len(distinct):
        raise UserError(
            f"data.holdout: {config.holdout} conversations cannot be kept of the {len(distinct)} usable ones in {corpus.folder}; "
            "lower it or give a larger corpus"
        )
    held = {distinct[int((i + 0.5) * len(distinct) / config.holdout)] for i in range(config.holdout)}
    train = np.array([index for index, row in zip(usable, rows) if row not in held], np.int64)
    kept = np.array([index for index, row in zip(usable, rows) if row in held], np.int64)
    return train, kept, len(corpus) - len(usable)


class Schedule:
    """Which conversations every optimizer step takes: floor(N / batch) steps an epoch, the last partial batch dropped."""

    def __init__(self, conversations: np.ndarray, batch_size: int, seed: int) -> None:
        if len(conversations) < batch_size:
            raise UserError(
                f"run.batch_size: {batch_size} exceeds the {len(conversations)} conversations to train on; lower it or give more"
            )
        self.conversations, self.batch_size, self.seed = conversations, batch_size, seed
        self.steps_per_epoch = len(conversations) // batch_size
        self._epoch, self._order = -1, np.empty(0, np.int64)

    def batch(self, step: int) -> tuple[int, np.ndarray]:
        """Return (epoch, corpus indices [batch_size]) of optimizer step `step`, counted from 0."""
        epoch, at = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, epoch_order(self.seed, epoch, len(self.conversations))
        return epoch, self.conversations[self._order[at * self.batch_size : (at + 1) * self.batch_size]]


@dataclass(frozen=True)
class Batch:
    """n conversations padded to T tokens, each with M blocks.

    ids [n, T]; lengths [n]; anchors [n, M] positions; ends [n, M] where supervision of the block stops (exclusive);
    valid [n, M] bool, False for padding; rank [n, M] a random order of a conversation's anchors;
    taps [n, T, n_taps*H] and final [n, T, H]: the target's states. names: what to call each conversation in an error.
    """

    ids: Tensor
    lengths: Tensor
    anchors: Tensor
    ends: Tensor
    valid: Tensor
    rank: Tensor
    taps: Tensor
    final: Tensor
    names: tuple[str, ...] = ()

    def to(self, device: torch.device) -> Batch:
        moved = {name: value.to(device, non_blocking=True) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return Batch(**moved, names=self.names)


def collate(
    conversations: Sequence[Conversation], anchors: Sequence[Anchors], states: Sequence[tuple[Tensor, Tensor]], max_length: int
) -> Batch:
    """Return the padded batch of conversations with their anchors and per-token states (taps [T_i, ...], final [T_i, H]).

    A conversation sees its own row only; what padding holds reaches nothing (blocks look at tokens before their anchor).
    """
    lengths = [min(len(conversation.ids), max_length) for conversation in conversations]
    n, tokens, blocks = len(conversations), max(lengths), max(len(a.positions) for a in anchors)
    ids = torch.zeros(n, tokens, dtype=torch.long)
    grid = {name: torch.zeros(n, blocks, dtype=torch.long) for name in ("positions", "ends", "rank")}
    valid = torch.zeros(n, blocks, dtype=torch.bool)
    taps, final = (torch.zeros(n, tokens, s.shape[-1], dtype=s.dtype) for s in states[0])
    for i, (conversation, drawn, (tap, last)) in enumerate(zip(conversations, anchors, states)):
        ids[i, : lengths[i]] = torch.from_numpy(conversation.ids[: lengths[i]].astype(np.int64))
        for name, values in grid.items():
            values[i, : len(drawn.positions)] = torch.from_numpy(np.asarray(getattr(drawn, name)))
        grid["rank"][i, len(drawn.positions) :] = blocks
        valid[i, : len(drawn.positions)] = True
        taps[i, : lengths[i]], final[i, : lengths[i]] = tap[: lengths[i]], last[: lengths[i]]
    names = tuple(f"{row}.{part}" if part else str(row) for row, part in (c.key for c in conversations))
    return Batch(ids, torch.tensor(lengths), grid["positions"], grid["ends"], valid, grid["rank"], taps, final, names)
