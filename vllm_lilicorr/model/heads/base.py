"""What every head shares: its inputs, its result, and the argmax that ignores it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..lattice import WALKS, top_candidates, walk


@dataclass(frozen=True)
class TargetVocabulary:
    """The target's frozen input embedding and output head: embedding [V, H], lm_head [V, H]."""

    embedding: Tensor
    lm_head: Tensor

    def embed(self, ids: Tensor) -> Tensor:
        """Return [..., H] of token ids [...]."""
        return F.embedding(ids, self.embedding)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [..., V] of final-normed hidden states [..., H]."""
        return F.linear(hidden.to(self.lm_head.dtype), self.lm_head)


@dataclass(frozen=True)
class BlockStates:
    """What a head may look at, for N blocks: slot_hidden [N, S, H], the backbone's d_s; anchor_hidden [N, H], the context
    feature of the last position before the anchor; anchor_valid [N] bool, False where there is none; anchor_ids [N]."""

    slot_hidden: Tensor
    anchor_hidden: Tensor
    anchor_valid: Tensor
    anchor_ids: Tensor


@dataclass(frozen=True)
class Proposal:
    """A drafted block: tokens [N, S].

    candidate_ids [N, S, K] and their log_probs (full-vocabulary); probs [N, S, K]: for sampled proposals, the
    distribution each token was drawn from (zero outside the candidates), else None: the proposal is a point mass.
    margin [N]: the smallest score or log-probability gap that decided anything in the block (see near_tie.py).
    """

    tokens: Tensor
    candidate_ids: Tensor
    log_probs: Tensor
    probs: Tensor | None
    margin: Tensor


class Candidates(NamedTuple):
    """ids, log_probs [N, S, K] in rank order, and gap [N, S, K] to the next rank (the last one's to rank K+1)."""

    ids: Tensor
    log_probs: Tensor
    gap: Tensor


def ranked_candidates(logits: Tensor, k: int) -> Candidates:
    """Return the k most probable tokens of logits [N, S, V] with the gap below each (+inf below the vocabulary's last)."""
    ids, log_probs = top_candidates(logits, min(k + 1, logits.shape[-1]))
    below = log_probs[..., 1:] if log_probs.shape[-1] > k else F.pad(log_probs[..., 1:], (0, 1), value=-math.inf)
    return Candidates(ids[..., :k], log_probs[..., :k], log_probs[..., :k] - below)


class DraftHead(nn.Module):
    """A head behind the backbone. `prefix` stands before its tensors in a checkpoint; `rules` are what it offers, the first
    being the method itself."""

    prefix: ClassVar[str] = ""
    rules: ClassVar[tuple[str, ...]] = ("argmax",)

    def propose(
        self,
        block: BlockStates,
        target: TargetVocabulary,
        rule: str,
        temperature: float | Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Proposal:
        """Return the block's proposal under `rule`; `argmax` takes every slot's most probable token and ignores the head.

        Raises ValueError for a rule the head does not offer.
        """
        if rule not in self.rules:
            raise ValueError(f"{type(self).__name__} has no rule '{rule}'; it offers {', '.join(self.rules)}")
        if rule != "argmax":
            return self.correlate(block, target, rule, temperature, generator)
        found = ranked_candidates(target.logits(block.slot_hidden), 1)
        return Proposal(found.ids[..., 0], found.ids, found.log_probs, None, found.gap.amin((1, 2)))

    def proposals(self, block: BlockStates, target: TargetVocabulary, rules: Sequence[str]) -> dict[str, Proposal]:
        """Return the block's proposal under each of `rules`, none of them sampled; the same as `propose` one by one."""
        return {rule: self.propose(block, target, rule) for rule in rules}

    def correlate(
        self,
        block: BlockStates,
        target: TargetVocabulary,
        rule: str,
        temperature: float | Tensor | None,
        generator: torch.Generator | None,
    ) -> Proposal:
        """Return the block's proposal by the head's own rules (all but `argmax`)."""
        raise NotImplementedError


class LatticeHead(DraftHead):
    """A head that scores neighbouring candidates and walks the lattice of them; a subclass says what the scores are."""

    rules = (*WALKS, "argmax")

    def lattice(self, block: BlockStates, target: TargetVocabulary) -> tuple[Candidates, Tensor, Tensor]:
        """Return the candidates, start [N, K] and pair [N, S-1, K, K]."""
        raise NotImplementedError

    def correlate(
        self,
        block: BlockStates,
        target: TargetVocabulary,
        rule: str,
        temperature: float | Tensor | None,
        generator: torch.Generator | None,
    ) -> Proposal:
        return _walked(*self.lattice(block, target), rule, temperature, generator)

    def proposals(self, block: BlockStates, target: TargetVocabulary, rules: Sequence[str]) -> dict[str, Proposal]:
        """All rules read one lattice, which is what costs; `argmax` here carries all K candidates."""
        found, start, pair = self.lattice(block, target)
        first = Proposal(found.ids[..., 0], found.ids, found.log_probs, None, found.gap[..., 0].amin(1))
        return {rule: first if rule == "argmax" else _walked(found, start, pair, rule) for rule in rules}


def _walked(
    found: Candidates,
    start: Tensor,
    pair: Tensor,
    rule: str,
    temperature: float | Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Proposal:
    path = walk(start, pair, rule, temperature, generator)
    return Proposal(
        tokens=found.ids.gather(-1, path.index[..., None])[..., 0],
        candidate_ids=found.ids,
        log_probs=found.log_probs,
        probs=path.probs,
        margin=torch.minimum(found.gap.amin((1, 2)), path.margin.amin(1)),
    )
