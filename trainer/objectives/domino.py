"""Domino's objective: the backbone's own logits first, then the ones its recurrent head has corrected.

    L = w * CE_base + (1 - w) * CE_corrected          w falls linearly from `base` to 0 over the share `base_until` of the
                                                      steps; each CE a mean over supervised slots with weights
                                                      w_s = exp(-(s-1) / beta)
    CE_base      = - log softmax(<lm_head, d_s>)[g_s]
    CE_corrected = - log softmax(<lm_head, d_s> + embed_proj([d_s, GRU(anchor, g_1 .. g_{s-1})]))[g_s]

The first `pure_draft_prefix_len` slots are not corrected, so both are the same there. That both logits are trained, the
backbone's first, is the method's public description (a base-anchored curriculum). Its schedule's numbers are not part of
it as we know it: `base` 1 and `base_until` 0.5 are this trainer's reading, and keys for that reason.

`common` is L_DFlash on the corrected logits alone, from the first step.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vllm_lilicorr.config import DominoConfig, HeadConfig

from ..data import Batch
from ..losses import leading_run, position_weights
from ..settings import require
from .base import Blocks, Terms
from .config import ObjectiveConfig
from .sequential import SequentialObjective


class DominoObjective(SequentialObjective):
    """w * CE_base + (1 - w) * CE_corrected; with `head_anchors`, CE_corrected on those only."""

    head_config = DominoConfig

    @classmethod
    def check(cls, config: ObjectiveConfig, head: HeadConfig | None) -> None:
        super().check(config, head)
        require(
            config.head_anchors is None or config.loss == "own",
            "objective.head_anchors",
            "would leave the other anchors without any loss under objective.loss 'common'; set it to null",
        )

    @property
    def table(self) -> nn.Parameter:
        return self.draft.head.embed_proj[2].weight  # type: ignore[index, union-attr, return-value]

    def base_weight(self, step: int) -> float:
        """Return w of optimizer step `step`, counted from 0."""
        loss = self.config.domino
        if self.config.loss == "common":
            return 0.0
        if loss.base_until is None:
            return loss.base
        return loss.base * max(0.0, 1.0 - step / (loss.base_until * self.steps))

    def weights(self, step: int) -> dict[str, float]:
        base = self.base_weight(step)
        return {"base": base, "corrected": 1.0 - base}

    def corrections(self, blocks: Blocks) -> Tensor:
        head = self.draft.head
        states = head.states(self.target.embed(blocks.previous))  # type: ignore[operator]
        project, activation = head.embed_proj[0], head.embed_proj[1]  # type: ignore[index]
        extra = activation(project(torch.cat((blocks.slot_hidden.to(states.dtype), states), dim=-1)))
        corrected = torch.arange(extra.shape[1], device=extra.device) >= head.pure_prefix
        return torch.where(corrected[:, None], extra, 0.0)

    def forward(self, batch: Batch, step: int = 0) -> Terms:
        blocks = self.draft_blocks(batch)
        chosen = blocks.select(self.lattice_blocks(blocks, len(batch.ids)))
        slots, beta, mask = blocks.labels.shape[1], self.config.beta, blocks.supervised

        # Without a weight, the base logits are looked at only to be logged.
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.base_weight(step) > 0):
            plain = self._vocabulary(step)(blocks.slot_hidden[mask], blocks.labels[mask], 1)
        base = -(position_weights(slots, beta, mask.device).expand(mask.shape)[mask] * plain.target).sum()
        top1 = torch.zeros_like(mask).masked_scatter(mask, plain.ids[:, 0] == blocks.labels[mask])
        found = self.corrected(step)(
            chosen.slot_hidden.flatten(0, 1), self.corrections(chosen).flatten(0, 1), chosen.labels.flatten(), None
        )
        values = {
            "base": (base, self.normaliser(mask, beta)),
            "corrected": (
                self.weighted(-found.target.view(-1, slots), chosen.supervised, beta),
                self.normaliser(chosen.supervised, beta),
            ),
        }
        loss, sums = self.total(values, step)
        whole = blocks.eligible
        sums["top1_prefix"] = (leading_run(top1 & whole[:, None]).sum().float(), whole.sum().float())
        sums["selected_prefix"] = self.selected_prefix(found.top.view(-1, slots), chosen)
        return loss, sums
