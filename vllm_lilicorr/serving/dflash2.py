"""DFlash2's selector as it is served: candidates, gathers, one launch for scores, walk and proposal, in static buffers.

The scores go through `score_and_walk`, which knows inner products of normalised vectors. It divides a vector by the greater of
its norm and eps, so with eps beyond every norm it divides by eps, a power of two, and multiplies by its square again, sigma:
both exact, and what is left are the bare inner products

    score(p, c) = log p(c) + <predecessor[p] * gate_s, successor[c]> = <[predecessor[p], 1], [gate_s * successor[c], log p(c)]>
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_lilicorr.kernels.score_and_walk import DraftLogits, Randomness, Walked
from vllm_lilicorr.kernels.topk_logprobs import merge_topk, topk_logprobs, topk_shard

from ..model.fused import FusedProposal, walk_part
from ..model.heads.dflash2 import DFlash2Head

_BEYOND_NORMS = 2.0**20

_CHUNK = 32  # blocks whose logits and vectors are held at a time


class FusedDFlash2Head:
    """The selector behind the calls of `FusedLiLiCorrHead`, for up to `max_blocks` concurrent blocks of `num_slots` slots."""

    def __init__(self, head: DFlash2Head, *, max_blocks: int, num_slots: int) -> None:
        self.head, self.max_blocks, self.num_slots, self.topk = head, max_blocks, num_slots, head.top_k
        self.timed: Callable[[str], AbstractContextManager[Any]] = nullcontext
        device, rank = head.predecessor_codebook.device, head.predecessor_codebook.shape[1]
        shape = (max_blocks, num_slots, self.topk)
        with torch.inference_mode(False):
            self._ids = torch.zeros(shape, dtype=torch.int64, device=device)
            self._log_probs = torch.zeros(shape, dtype=torch.float32, device=device)
            self._walked = Walked.empty(*shape, device)
            # Of one chunk: [predecessor, 1] and [gate * successor, log p] side by side, by node; [predecessor, 1] of the anchors.
            chunk = min(max_blocks, _CHUNK)
            self._vectors = torch.ones(chunk * num_slots * self.topk, 2, rank + 1, device=device)
            self._anchors = torch.ones(chunk, rank + 1, device=device)

    def for_slots(self, num_slots: int) -> FusedDFlash2Head:
        """Return a head for another draft length, with its own buffers and the same weights."""
        return FusedDFlash2Head(self.head, max_blocks=self.max_blocks, num_slots=num_slots)

    def candidates_from_hidden(
        self, slot_hidden: Tensor, lm_head: Callable[[Tensor], Tensor], *, vocab_size: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return ids and log-probabilities [N, S, K] of slot states [N, S, H]; lm_head maps [rows, H] to logits."""
        n = len(slot_hidden)
        for start in range(0, n, _CHUNK):
            stop = min(start + _CHUNK, n)
            topk_logprobs(lm_head(slot_hidden[start:stop].flatten(0, 1)), self.topk, vocab_size, self._flat(start, stop))
        return self._ids[:n], self._log_probs[:n]

    def shard_candidates(self, logits: Tensor, *, vocab_start: int, vocab_size: int | None = None) -> Tensor:
        """Return a shard's candidates packed as `FusedLiLiCorrHead.shard_candidates` packs them."""
        ids, values, lse = topk_shard(logits, self.topk, vocab_start, vocab_size)
        return torch.cat((ids.int().view(torch.float32), values, lse), dim=1)

    def merge_candidates(self, gathered: Tensor, *, vocab_size: int) -> tuple[Tensor, Tensor]:
        """Return what `candidates_from_hidden` would return on the whole vocabulary, from the shards [R, N*S, 2K+2]."""
        n = gathered.shape[1] // self.num_slots
        ids, values, lse = gathered.split((self.topk, self.topk, 2), dim=-1)
        merge_topk(ids.view(torch.int32), values, lse, self._flat(0, n))
        return self._ids[:n], self._log_probs[:n]

    def _flat(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        return self._ids[start:stop].flatten(0, 1), self._log_probs[start:stop].flatten(0, 1)

    def propose(
        self,
        slot_hidden: Tensor,
        anchor_ids: Tensor,
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
    ) -> FusedProposal:
        """Return the drafted blocks; slot_hidden [N, S, H], anchor_ids [N], the rest as `FusedLiLiCorrHead.propose`."""
        head, n = self.head, len(slot_hidden)
        table = None if draft_logits is None or cached_ids is None else DraftLogits(draft_logits, cached_ids)
        gate = head.hidden_projection(slot_hidden.to(head.successor_codebook.dtype)).float()
        for start in range(0, n, _CHUNK):
            part = slice(start, min(start + _CHUNK, n))
            ids, log_probs, gates = self._ids[part], self._log_probs[part], gate[part]
            vectors, anchors = self._vectors[: ids.numel()], self._anchors[: len(ids)]
            # What is not written stays 1.
            vectors[:, 0, :-1] = F.embedding(ids, head.predecessor_codebook).flatten(0, 2)
            vectors[:, 1, :-1] = (gates[:, :, None] * F.embedding(ids, head.successor_codebook)).flatten(0, 2)
            vectors[:, 1, -1] = log_probs.flatten()
            anchors[:, :-1] = F.embedding(anchor_ids[part], head.predecessor_codebook)
            with self.timed("walk"):
                walk_part(
                    part, vectors[:, 0], vectors[:, 1], anchors, self._ids, rule, _BEYOND_NORMS**2, _BEYOND_NORMS, self._walked,
                    rows, temperature, Randomness(uniforms, seeds, positions), tokens_out, table,
                )  # fmt: skip
        w = self._walked
        return FusedProposal(w.tokens[:n], w.index[:n], self._ids[:n], self._log_probs[:n], w.scores[:n], w.probs[:n])
