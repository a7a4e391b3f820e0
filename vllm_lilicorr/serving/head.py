"""From slot states to a path, inside vLLM: candidates over a sharded vocabulary, their embeddings, scores, walk."""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor

from .plain import PlainHead
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
        logits = model.shard_logits(slot_hidden.flatten(0, 1))
        if model.tp_size == 1:
            ids, _ = head.candidates(logits, vocab_size=model.shard_size)
        else:
            packed = head.shard_candidates(logits, vocab_start=model.shard_start, vocab_size=model.shard_size)
            ids, _ = head.merge_candidates(model.gather_shards(packed))
        if withheld is not None:
            # K times the same candidate: whatever is scored and walked, the path and the proposal are that token's.
            ids.masked_fill_(withheld[:, None, None], null_token)
        embedding = model.plain_embedding()
        if embedding is None:
            options["token_embeddings"] = model.embed_candidates(ids)
        else:
            options["embedding"] = embedding
        proposal = head.propose(slot_hidden, anchor_hidden, anchor_valid, rule=rule, **options)
        if self._debug:
            check_indices(proposal, model.config.vocab_size)
        return proposal


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
