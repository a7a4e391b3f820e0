"""What DSpark's and Domino's objectives share: losses on corrected logits, every slot after the ground truth's tokens.

Teacher forcing gives each slot the ground truth as the tokens before it, so that all slots are computed at once. Where
the drafter has followed the ground truth so far, these are the logits it decodes from: the leading run of correct argmaxes
is exactly what the greedy rule would have accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..corrected_log_probs import CorrectedLogProbs, corrected_log_probs
from ..data import Batch
from ..losses import leading_run, position_weights
from ..token_log_probs import chunk_rows
from .base import Blocks, Objective, Sums, Terms, over_ranks, world_size

Correct = Callable[[Tensor, Tensor, Tensor, Tensor | None], CorrectedLogProbs]
"""(slot states [R, H], corrections [R, r], labels [R], the target's final states [R, H] or None) -> log-probabilities."""


class SequentialObjective(Objective):
    """An objective on logits <lm_head, d_s> + <table, e_s>, the table being the head's own."""

    rules: ClassVar[tuple[str, ...]] = ("argmax", "greedy")
    bounded: ClassVar[bool] = False

    @property
    def table(self) -> nn.Parameter:
        """The head's last weight [V, r]."""
        raise NotImplementedError

    def outside_parameters(self) -> list[nn.Parameter]:
        return [self.table]

    def corrections(self, blocks: Blocks) -> Tensor:
        """Return e [N, S, r] of every slot after the ground truth's tokens before it."""
        raise NotImplementedError

    def usable(self, blocks: Blocks) -> Tensor:
        return blocks.supervised.any(-1)

    def corrected(self, step: int) -> Correct:
        """Return the fused operation of step `step`, over the full vocabulary or the step's sample of it."""
        sampled = self._frozen[1]
        if sampled is None or not self.training:
            weight, table = self.target.lm_head, self.table

            def full(hidden: Tensor, extra: Tensor, labels: Tensor, final: Tensor | None) -> CorrectedLogProbs:
                final = None if final is None else final.to(weight.dtype)
                return corrected_log_probs(hidden.to(weight.dtype), weight, extra.to(table.dtype), table, labels, final)

            return full
        drawn = sampled.draw(step)
        rows = self.table[drawn.ids]

        def present(hidden: Tensor, extra: Tensor, labels: Tensor, final: Tensor | None) -> CorrectedLogProbs:
            weight = drawn.weight
            final = None if final is None else final.to(weight.dtype)
            found = corrected_log_probs(
                hidden.to(weight.dtype), weight, extra.to(rows.dtype), rows, drawn.inside(labels), final, drawn.log_counts
            )
            return CorrectedLogProbs(found.target, found.l1, drawn.ids[found.top])

        return present

    def weighted(self, values: Tensor, supervised: Tensor, beta: float) -> Tensor:
        """Return the sum of values [N, S] over supervised slots with weights of decay `beta`; exactly 0 over none."""
        weights = position_weights(supervised.shape[1], beta, values.device)
        return torch.where(supervised, weights * values, 0.0).sum()

    def selected_prefix(self, top: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor]:
        """Return (slots, whole blocks): over the whole ones, how far the most probable tokens [N, S] are the labels."""
        run = leading_run((top == blocks.labels) & blocks.eligible[:, None])
        return run.sum().float(), blocks.eligible.sum().float()

    def total(self, values: dict[str, tuple[Tensor, Tensor]], step: int) -> tuple[Tensor, Sums]:
        """Return (this rank's loss, its sums) of terms {name: (value with gradient, denominator)} with `weights`."""
        weights = self.weights(step)
        totals = over_ranks(*(denominator for _, denominator in values.values()))
        loss = sum(
            world_size() * weights[name] * value / total for (name, (value, _)), total in zip(values.items(), totals, strict=True)
        )
        return loss, {name: (value.detach(), denominator) for name, (value, denominator) in values.items()}  # type: ignore[return-value]

    def forward(self, batch: Batch, step: int = 0) -> Terms:
        raise NotImplementedError

    @torch.no_grad()
    def drafts(self, blocks: Blocks) -> tuple[dict[str, Tensor], Tensor | None]:
        slots, lm_head = blocks.labels.shape[1], self.target.lm_head
        # The head decodes over the full vocabulary, so a few blocks at a time.
        step = max(1, chunk_rows(len(lm_head), torch.float32, lm_head.device) // slots)
        greedy = [
            self.draft.head.propose(blocks.select(slice(at, at + step)).states, self.target, "greedy").tokens
            for at in range(0, len(blocks.labels), step)
        ]
        return {"argmax": self._candidates(blocks, 1).ids[..., 0], "greedy": torch.cat(greedy)}, None
