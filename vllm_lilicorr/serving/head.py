"""From slot states to drafts, inside vLLM: what stands between the runners and a method's head, and the heads with a lattice.

A runner knows a `DraftingHead` and nothing of the method behind it; `methods.METHODS` says which class serves which checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..model.fused import FusedLiLiCorrHead
from ..model.heads import BlockStates
from .dflash2 import FusedDFlash2Head
from .plain import PlainDFlash2Head, PlainHead, PlainLiLiCorrHead, PlainProposal
from .timing import Timing
from .trace import debug

PLAIN_VARIABLE = "LILICORR_PLAIN_HEAD"

Observer = Callable[[Tensor, int | None], None]
"""Called with the scores that decided: [N*S, C] of all slots in order (slot None), or [N, C] of one slot."""


@dataclass(frozen=True)
class Step:
    """What a runner asks of one step beside tokens and proposal.

    Blocks marked in withheld [N] bool propose `null_token` in every slot, and nothing else. confidence_out [>=N, S] is where a
    head that says how likely its slots are accepted writes it. use_fp64: vLLM's `use_fp64_gumbel`.
    """

    withheld: Tensor | None = None
    null_token: int = 0
    observe: Observer | None = None
    confidence_out: Tensor | None = None
    use_fp64: bool = False


class DraftingHead:
    """The served model's head, laid out for `max_blocks` concurrent blocks; one instance an engine."""

    def __init__(self, model: Any, max_blocks: int) -> None:
        self.model, self.max_blocks = model, max_blocks
        self._debug = debug()
        self.timing = Timing.from_environment()

    def lay_out(self, num_slots: int, rule: str) -> None:
        """Do at load what the first proposal of `num_slots` drafts under `rule` would do: weights, tables and buffers."""

    def propose(self, block: BlockStates, rule: str, step: Step = Step(), **options: Any) -> Any:
        """Return the proposal of N blocks: tokens [N, S], ids [N, S, K] and what `dense` needs.

        rule: one of the method's, or `sampled`. Options, as `FusedLiLiCorrHead.propose` has them: temperature, rows, uniforms, or
        seeds and positions, tokens_out, draft_logits.
        """
        proposal = self.draft(block, rule, step, options)
        if self._debug:
            check_indices(proposal, self.model.config.vocab_size)
        return proposal

    def draft(self, block: BlockStates, rule: str, step: Step, options: dict[str, Any]) -> Any:
        """Return the proposal; arguments as `propose`."""
        raise NotImplementedError

    def dense(self, proposal: Any) -> Tensor:
        """Return a sampled proposal's distribution [N, S, V], in a buffer that the next step may overwrite."""
        raise NotImplementedError

    @property
    def has_confidence(self) -> bool:
        """Whether the head itself says how likely a slot is accepted."""
        return False


def plain_head() -> bool:
    """Whether the readable heads draft instead of the fused ones (LILICORR_PLAIN_HEAD=1)."""
    return os.environ.get(PLAIN_VARIABLE, "") not in ("", "0")


class LatticeDrafting(DraftingHead):
    """Candidates over a sharded vocabulary, scores, walk. `fused` is the head laid out for serving, `plain` its readable twin.

    A draft length is laid out the first time it is asked for: vLLM's dynamic speculation changes it between steps.
    """

    fused: ClassVar[type]
    plain: ClassVar[type]

    def __init__(self, model: Any, max_blocks: int) -> None:
        super().__init__(model, max_blocks)
        self._heads: dict[int, Any] = {}
        self._cached_ids: Tensor | None = None
        self._probs_buffer: Tensor | None = None
        self._written: Tensor | None = None

    def walk(self, head: Any, ids: Tensor, block: BlockStates, rule: str, options: dict[str, Any]) -> Any:
        """Return the proposal of `head`, which holds the candidates `ids` [N, S, K]."""
        raise NotImplementedError

    def lay_out(self, num_slots: int, rule: str) -> None:
        self._head(num_slots, rule)

    def layout(self) -> dict[str, Any]:
        """Return what else `fused` is built with."""
        return {}

    def precompute(self, head: Any) -> None:
        """Give the first `head` built whatever depends on the target's weights alone; further draft lengths share it."""

    def _head(self, num_slots: int, rule: str) -> Any:
        if num_slots not in self._heads:
            if self._heads:
                # Further lengths share the first one's weights: the KV cache has taken the memory for a second copy by then.
                head = next(iter(self._heads.values())).for_slots(num_slots)
            else:
                build = self.plain if plain_head() else self.fused
                head = build(self.model.head, max_blocks=self.max_blocks, num_slots=num_slots, **self.layout())
                if rule != "argmax":  # which scores nothing, and an engine that drafts by it drafts by no other rule
                    self.precompute(head)
            head.timed = self.timing.part
            self._heads[num_slots] = head
        return self._heads[num_slots]

    def draft(self, block: BlockStates, rule: str, step: Step, options: dict[str, Any]) -> Any:
        head = self._head(block.slot_hidden.shape[1], rule)
        with self.timing.part("candidates"):
            ids, log_probs = self._candidates(head, block.slot_hidden)
        with self.timing.part("head and walk"):
            if rule == "argmax":
                proposal = first_candidates(ids, log_probs, step, options)
            else:
                if step.withheld is not None:
                    # K times the same candidate: whatever is scored and walked, path and proposal are that token's.
                    ids.masked_fill_(step.withheld[:, None, None], step.null_token)
                if options.get("draft_logits") is not None:
                    options["cached_ids"] = self._cached(options["draft_logits"], ids)
                proposal = self.walk(head, ids, block, rule, options)
        if step.observe is not None:
            step.observe(proposal.scores.flatten(0, 1), None)
        return proposal

    def _candidates(self, head: Any, slot_hidden: Tensor) -> tuple[Tensor, Tensor]:
        model = self.model
        if model.tp_size == 1:
            return head.candidates_from_hidden(slot_hidden, model.shard_logits, vocab_size=model.shard_size)
        if isinstance(head, PlainHead):
            return head.candidates(model.full_logits(slot_hidden.flatten(0, 1)), vocab_size=model.config.vocab_size)
        logits = model.shard_logits(slot_hidden.flatten(0, 1))
        packed = head.shard_candidates(logits, vocab_start=model.shard_start, vocab_size=model.shard_size)
        return head.merge_candidates(model.gather_shards(packed), vocab_size=model.config.vocab_size)

    def _cached(self, draft_logits: Tensor, ids: Tensor) -> Tensor:
        """Return [R, S, K]: which entries of `draft_logits` [R, S, V] were written last. Made in the profiling run, which comes
        before any graph is captured."""
        if self._cached_ids is None:
            shape = (*draft_logits.shape[:2], ids.shape[-1])
            with torch.inference_mode(False):
                self._cached_ids = torch.zeros(shape, dtype=torch.int64, device=draft_logits.device)
        return self._cached_ids

    def dense(self, proposal: Any) -> Tensor:
        """Return [N, S, V], zero off the candidates.

        The runner hands it to the verifier before it drafts again. Only what was written is cleared: wiping the whole
        vocabulary for every slot of every step would take longer than the head.
        """
        batch, slots = proposal.tokens.shape
        buffer = self._probs_buffer
        if buffer is None or len(buffer) < batch or buffer.shape[1] != slots:
            buffer = self._probs_buffer = proposal.probs.new_zeros(batch, slots, self.model.config.vocab_size)
        elif self._written is not None:
            buffer[: len(self._written)].scatter_(-1, self._written, 0.0)
        self._written = proposal.ids.clone()
        # Added, not written: a withheld block's candidates are one token K times.
        return buffer[:batch].scatter_add_(-1, proposal.ids, proposal.probs)


class LiLiCorrDrafting(LatticeDrafting):
    """The lattice scored in sight of itself."""

    fused, plain = FusedLiLiCorrHead, PlainLiLiCorrHead

    def layout(self) -> dict[str, Any]:
        return {"dtype": self.model.head_dtype}

    def precompute(self, head: Any) -> None:
        # Where kernels run (a GPU, or its code interpreted) the embedding stays as it is: token_proj is a small part of a step
        # there, and the table (V x W, for Qwen3-8B 311 MB) would come out of the KV cache. The readable head has no such table.
        if not isinstance(head, FusedLiLiCorrHead) or head.kernels:
            return
        embedding = self.model.plain_embedding()
        if embedding is not None:
            head.project_embedding(embedding)

    def walk(self, head: Any, ids: Tensor, block: BlockStates, rule: str, options: dict[str, Any]) -> Any:
        embedding = self.model.plain_embedding()
        if embedding is None:
            options["token_embeddings"] = self.model.embed_candidates(ids)
        else:
            options["embedding"] = embedding
        return head.propose(block.slot_hidden, block.anchor_hidden, block.anchor_valid, rule=rule, **options)


class DFlash2Drafting(LatticeDrafting):
    """The lattice scored by two codebooks."""

    fused, plain = FusedDFlash2Head, PlainDFlash2Head

    def walk(self, head: Any, ids: Tensor, block: BlockStates, rule: str, options: dict[str, Any]) -> Any:
        return head.propose(block.slot_hidden, block.anchor_ids, rule=rule, **options)


def first_candidates(ids: Tensor, log_probs: Tensor, step: Step, options: dict[str, Any]) -> PlainProposal:
    """Return each slot's most probable token as the proposal: what the drafter is worth without its head."""
    tokens = ids[..., 0]
    if step.withheld is not None:
        tokens = tokens.masked_fill(step.withheld[:, None], step.null_token)
    write_live(options.get("tokens_out"), tokens, options.get("rows"))
    index = torch.zeros_like(tokens)
    one_hot = torch.zeros_like(log_probs).scatter_(-1, index[..., None], 1.0)
    return PlainProposal(tokens, index, ids, log_probs, log_probs, one_hot)


def write_live(out: Tensor | None, tokens: Tensor, rows: Tensor | None) -> None:
    """Copy tokens [N, S] to out [>=N, S], where there is one, but for blocks whose state row is -1: padding is inert."""
    if out is not None:
        live = tokens.new_ones(len(tokens), dtype=torch.bool) if rows is None else rows >= 0
        out[: len(tokens)].copy_(torch.where(live[:, None], tokens, out[: len(tokens)]))


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
