"""What DSpark and Domino share: one slot after another, each slot's logits corrected by the tokens chosen before it."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from .base import BlockStates, DraftHead, Proposal, TargetVocabulary


class SequentialHead(DraftHead):
    """Drafts a block left to right over the full vocabulary; a subclass says how a chosen token corrects the next slot."""

    rules: ClassVar[tuple[str, ...]] = ("greedy", "argmax")

    def begin(self, block: BlockStates, target: TargetVocabulary) -> Any:
        """Return the state in which the anchor's token has been read."""
        raise NotImplementedError

    def correction(self, state: Any, slot: int, block: BlockStates) -> Tensor | None:
        """Return what is added to slot `slot`'s logits [N, V], or None for nothing."""
        raise NotImplementedError

    def read(self, state: Any, tokens: Tensor, target: TargetVocabulary) -> Any:
        """Return the state after the tokens [N] chosen in the slot just drafted."""
        raise NotImplementedError

    def correlate(
        self,
        block: BlockStates,
        target: TargetVocabulary,
        rule: str,
        temperature: float | Tensor | None,
        generator: torch.Generator | None,
    ) -> Proposal:
        logits = target.logits(block.slot_hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        warm = _temperatures(temperature, logits) if rule == "sampled" else None
        state = self.begin(block, target)
        tokens, scores, probs = [], [], []
        for slot in range(logits.shape[1]):
            row = logits[:, slot]
            added = self.correction(state, slot, block)
            row = row if added is None else row + added
            chosen = row.argmax(-1)
            if warm is not None:
                greedy = torch.zeros_like(row).scatter_(1, chosen[:, None], 1.0)
                tiny = torch.finfo(row.dtype).tiny
                drawn = ((row - row.amax(-1, keepdim=True)) / warm.clamp_min(tiny)[:, None]).softmax(-1)
                distribution = torch.where((warm > 0)[:, None], drawn, greedy)
                chosen = torch.multinomial(distribution.to("cpu"), 1, generator=generator)[:, 0].to(row.device)
                probs.append(distribution)
            tokens.append(chosen)
            scores.append(row)
            if slot + 1 < logits.shape[1]:
                state = self.read(state, chosen, target)
        rows = torch.stack(scores, 1)
        best, second = rows.topk(2, dim=-1).values.unbind(-1)
        whole = torch.arange(rows.shape[-1], device=rows.device)
        return Proposal(
            tokens=torch.stack(tokens, 1),
            # Every token is a candidate: the distribution a slot was drawn from covers the vocabulary.
            candidate_ids=whole.expand_as(rows) if probs else torch.stack(tokens, 1)[..., None],
            log_probs=rows.log_softmax(-1) if probs else (best - rows.logsumexp(-1))[..., None],
            probs=torch.stack(probs, 1) if probs else None,
            margin=(best - second).amin(1),
        )


def _temperatures(temperature: float | Tensor | None, logits: Tensor) -> Tensor:
    if temperature is None:
        raise ValueError("the sampled rule needs a temperature")
    values = torch.as_tensor(temperature, dtype=logits.dtype, device=logits.device).expand(len(logits))
    if not bool((values >= 0).all()):
        raise ValueError("temperatures must be at least 0")
    return values
