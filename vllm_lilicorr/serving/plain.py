"""The readable heads behind the calls of the fused ones: the module itself and the reference walk.

Serving uses `FusedLiLiCorrHead` and `FusedDFlash2Head`. These twins are what they are compared with, inside the engine too:
LILICORR_PLAIN_HEAD=1 drafts with them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..model.lattice import top_candidates, walk


@dataclass(frozen=True)
class PlainProposal:
    """As `FusedProposal`, in fresh tensors."""

    tokens: Tensor
    index: Tensor
    ids: Tensor
    log_probs: Tensor
    scores: Tensor
    probs: Tensor

    def dense(self, vocab_size: int, out: Tensor | None = None) -> Tensor:
        """Return probs [N, S, vocab_size], zero off the candidates."""
        shape = (*self.ids.shape[:2], vocab_size)
        out = torch.zeros(shape, dtype=torch.float32, device=self.ids.device) if out is None else out.zero_()
        return out.scatter_(-1, self.ids, self.probs)


class PlainHead:
    """The fused heads' `candidates` and the end of their `propose` on any device, with host synchronisation and allocations."""

    def __init__(self, head: Any, *, num_slots: int, **_: Any) -> None:
        self.head, self.num_slots = head, num_slots
        self._found: tuple[Tensor, Tensor] | None = None
        self.timed: Callable[[str], AbstractContextManager[Any]] = nullcontext

    def for_slots(self, num_slots: int) -> PlainHead:
        """Return a head for another draft length, with the same weights."""
        return type(self)(self.head, num_slots=num_slots)

    @property
    def topk(self) -> int:
        raise NotImplementedError

    def candidates(self, logits: Tensor, *, vocab_size: int | None = None) -> tuple[Tensor, Tensor]:
        ids, log_probs = top_candidates(logits[:, :vocab_size].unflatten(0, (-1, self.num_slots)), self.topk)
        self._found = ids, log_probs.float()
        return self._found

    def candidates_from_hidden(
        self, slot_hidden: Tensor, lm_head: Callable[[Tensor], Tensor], *, vocab_size: int | None = None
    ) -> tuple[Tensor, Tensor]:
        return self.candidates(lm_head(slot_hidden.flatten(0, 1)), vocab_size=vocab_size)

    def _walked(
        self,
        start: Tensor,
        pair: Tensor,
        *,
        rule: str = "greedy",
        temperature: Tensor | None = None,
        rows: Tensor | None = None,
        uniforms: Tensor | None = None,
        seeds: Tensor | None = None,
        positions: Tensor | None = None,
        tokens_out: Tensor | None = None,
        draft_logits: Tensor | None = None,
        cached_ids: Tensor | None = None,
    ) -> PlainProposal:
        """Return the walk of start [N, K] and pair [N, S-1, K, K] over the last candidates; options as the fused heads'."""
        ids, log_probs = self._candidates()
        n = len(ids)
        rows = torch.arange(n, device=ids.device) if rows is None else rows.long()
        live = rows >= 0
        at = rows.clamp_min(0)
        if rule == "sampled":
            assert temperature is not None
            if uniforms is None:
                assert seeds is not None and positions is not None
                uniforms = _uniforms(seeds[at], positions)
            with self.timed("walk"):
                path = walk(start, pair, rule, temperature[at], uniforms=uniforms)
        else:
            with self.timed("walk"):
                path = walk(start, pair, rule)
        scores = torch.cat((start[:, None], _predecessor_rows(pair, path.index)), 1)
        one_hot = torch.zeros_like(scores).scatter_(-1, path.index[..., None], 1.0)
        tokens = ids.gather(-1, path.index[..., None])[..., 0]
        if tokens_out is not None:
            tokens_out[:n] = torch.where(live[:, None], tokens, tokens_out[:n])
        if draft_logits is not None and cached_ids is not None:
            for block in live.nonzero()[:, 0].tolist():
                state = int(rows[block])
                draft_logits[state].scatter_(-1, cached_ids[state], -torch.inf)
                draft_logits[state].scatter_(-1, ids[block], scores[block])
                cached_ids[state] = ids[block]
        return PlainProposal(tokens, path.index, ids, log_probs, scores, one_hot if path.probs is None else path.probs)

    def _candidates(self) -> tuple[Tensor, Tensor]:
        assert self._found is not None, "candidates come first"
        return self._found


class PlainLiLiCorrHead(PlainHead):
    """`FusedLiLiCorrHead`."""

    @property
    def topk(self) -> int:
        return self.head.config.candidate_topk

    def propose(
        self,
        slot_hidden: Tensor,
        anchor_hidden: Tensor,
        anchor_valid: Tensor,
        *,
        embedding: Tensor | None = None,
        token_embeddings: Tensor | None = None,
        **options: Any,
    ) -> PlainProposal:
        ids, log_probs = self._candidates()
        if token_embeddings is None:
            assert embedding is not None
            token_embeddings = torch.nn.functional.embedding(ids, embedding)
        return self._walked(*self.head(token_embeddings, log_probs, slot_hidden, anchor_hidden, anchor_valid), **options)


class PlainDFlash2Head(PlainHead):
    """`FusedDFlash2Head`."""

    @property
    def topk(self) -> int:
        return self.head.top_k

    def propose(self, slot_hidden: Tensor, anchor_ids: Tensor, **options: Any) -> PlainProposal:
        return self._walked(*self.head(*self._candidates(), slot_hidden, anchor_ids), **options)


def _predecessor_rows(pair: Tensor, index: Tensor) -> Tensor:
    """Return [N, S-1, K]: the scores each later slot was decided by, given the candidate taken before it."""
    at = index[:, :-1, None, None].expand(-1, -1, 1, pair.shape[-1])
    return pair.gather(2, at)[:, :, 0]


def _uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return draws [N, S] in [0, 1) that depend on (seed, position) alone."""
    draws = []
    for seed, row in zip(seeds.tolist(), positions.tolist(), strict=True):
        draws.append([_draw(seed, position) for position in row])
    return torch.tensor(draws, dtype=torch.float32, device=seeds.device)


def _draw(seed: int, position: int) -> float:
    generator = torch.Generator().manual_seed((seed * 0x9E3779B97F4A7C15 + position * 0xBF58476D1CE4E5B9) % 2**63)
    return float(torch.rand((), generator=generator))
