"""From slot states to a path, inside vLLM: candidates over a sharded vocabulary, their embeddings, scores, walk."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from .plain import PlainHead, PlainProposal
from .timing import Timing
from .trace import debug

PLAIN_VARIABLE = "LILICORR_PLAIN_HEAD"


class DraftingHead:
    """The served model's head, laid out for `max_blocks` concurrent blocks; one instance an engine.

    A draft length is laid out the first time it is asked for: vLLM's dynamic speculation changes it between steps.
    """

    def __init__(self, model: Any, max_blocks: int) -> None:
        self.model, self.max_blocks = model, max_blocks
        self._heads: dict[int, Any] = {}
        self._debug = debug()
        self.timing = Timing.from_environment()

    def _head(self, num_slots: int) -> Any:
        if num_slots not in self._heads:
            self._heads[num_slots] = build_head(self.model.head, max_blocks=self.max_blocks, num_slots=num_slots)
        return self._heads[num_slots]

    def propose(
        self,
        slot_hidden: Tensor,
        anchor_hidden: Tensor,
        anchor_valid: Tensor,
        rule: str,
        withheld: Tensor | None = None,
        null_token: int = 0,
        **options: Any,
    ) -> Any:
        """Return the proposal of N blocks from slot_hidden [N, S, H]; options as `FusedLiLiCorrHead.propose`.

        Blocks marked in withheld [N] bool propose `null_token` in every slot, and nothing else.
        """
        model, head = self.model, self._head(slot_hidden.shape[1])
        with self.timing.part("candidates"):
            if model.tp_size == 1:
                ids, log_probs = head.candidates_from_hidden(slot_hidden, model.shard_logits, vocab_size=model.shard_size)
            else:
                logits = model.shard_logits(slot_hidden.flatten(0, 1))
                packed = head.shard_candidates(logits, vocab_start=model.shard_start, vocab_size=model.shard_size)
                ids, log_probs = head.merge_candidates(model.gather_shards(packed))
        with self.timing.part("head and walk"):
            if rule == "argmax":
                proposal = first_candidates(ids, log_probs, withheld, null_token, options)
            else:
                proposal = self._correlate(
                    head, ids, slot_hidden, anchor_hidden, anchor_valid, rule, withheld, null_token, options
                )
        if self._debug:
            check_indices(proposal, model.config.vocab_size)
        return proposal

    def _correlate(
        self,
        head: Any,
        ids: Tensor,
        slot_hidden: Tensor,
        anchor_hidden: Tensor,
        anchor_valid: Tensor,
        rule: str,
        withheld: Tensor | None,
        null_token: int,
        options: dict[str, Any],
    ) -> Any:
        if withheld is not None:
            # K times the same candidate: whatever is scored and walked, the path and the proposal are that token's.
            ids.masked_fill_(withheld[:, None, None], null_token)
        embedding = self.model.plain_embedding()
        if embedding is None:
            options["token_embeddings"] = self.model.embed_candidates(ids)
        else:
            options["embedding"] = embedding
        return head.propose(slot_hidden, anchor_hidden, anchor_valid, rule=rule, **options)


def first_candidates(
    ids: Tensor, log_probs: Tensor, withheld: Tensor | None, null_token: int, options: dict[str, Any]
) -> PlainProposal:
    """Return each slot's most probable token as the proposal: what the drafter is worth without its head."""
    tokens = ids[..., 0]
    if withheld is not None:
        tokens = tokens.masked_fill(withheld[:, None], null_token)
    out, rows = options.get("tokens_out"), options.get("rows")
    if out is not None:
        live = tokens.new_ones(len(tokens), dtype=torch.bool) if rows is None else rows >= 0
        out[: len(tokens)].copy_(torch.where(live[:, None], tokens, out[: len(tokens)]))
    index = torch.zeros_like(tokens)
    one_hot = torch.zeros_like(log_probs).scatter_(-1, index[..., None], 1.0)
    return PlainProposal(tokens, index, ids, log_probs, log_probs, one_hot)


def build_head(head: Any, *, max_blocks: int, num_slots: int) -> Any:
    """Return the fused head, or its readable twin under LILICORR_PLAIN_HEAD=1."""
    if os.environ.get(PLAIN_VARIABLE, "") not in ("", "0"):
        return PlainHead(head, max_blocks=max_blocks, num_slots=num_slots)
    from ..model.fused import FusedLiLiCorrHead

    return FusedLiLiCorrHead(head, max_blocks=max_blocks, num_slots=num_slots)


def check_indices(proposal: Any, vocab_size: int) -> None:
    """Raise IndexError when anything a later step indexes with is out of range (LILICORR_DEBUG=1)."""
    for name, tensor, end in (
        ("candidate ids", proposal.ids, vocab_size),
        ("tokens", proposal.tokens, vocab_size),
        ("path", proposal.index, proposal.ids.shape[-1]),
    ):
        low, high = int(tensor.min()), int(tensor.max())
        if low < 0 or high >= end:
            raise IndexError(f"drafting: {name} lie in {low}..{high}, expected 0..{end - 1}")
