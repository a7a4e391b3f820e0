"""DSpark's objective: the corrected distribution against the ground truth and against the target's distribution.

    L = ce * CE + l1 * L1 + confidence * BCE          0.1, 0.9, 1.0; each a mean over supervised slots with weights
                                                      w_s = exp(-(s-1) / 4)
    CE_s  = - log p_s(g_s)                            p_s = softmax(<lm_head, d_s> + w2(w1[g_{s-1}])), g_0 the anchor's token
    L1_s  = sum_v |p_s(v) - q_s(v)|                   q_s the target's next-token distribution at the position before
    BCE_s = cross-entropy of confidence_s and 1 - L1_s / 2, the probability that rejection sampling accepts the slot

Sources: the method's public description for weights and decay (0.1 CE + 0.9 L1, 4); vLLM's `speculators`, which trains the
same heads, for teacher forcing, the confidence's label sum_v min(p, q) (a constant, like q) and its weight. It divides by
the number of slots where we divide by the sum of their weights: one factor for all terms.

`common` replaces 0.1 CE + 0.9 L1 by L_DFlash on p_s, with its decay; the confidence is trained as before.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_lilicorr.config import DSparkConfig, HeadConfig

from ..data import Batch
from ..losses import position_weights
from ..settings import require
from .base import Blocks, Terms, left_out
from .config import ObjectiveConfig
from .sequential import SequentialObjective


class DSparkObjective(SequentialObjective):
    """ce * CE + l1 * L1 + confidence * BCE on the Markov head's logits; with `head_anchors`, L1 and BCE on those only."""

    head_config = DSparkConfig

    @classmethod
    def check(cls, config: ObjectiveConfig, head: HeadConfig | None) -> None:
        super().check(config, head)
        l1 = config.loss == "own" and config.dspark.l1 > 0
        confidence = isinstance(head, DSparkConfig) and head.enable_confidence_head
        require(
            config.head_anchors is None or head is None or l1 or confidence,
            "objective.head_anchors",
            "limits DSpark's L1 and confidence losses, and this run has neither; set it to null",
        )

    @property
    def table(self) -> nn.Parameter:
        return self.draft.head.markov_head.markov_w2.weight  # type: ignore[union-attr, return-value]

    @property
    def beta(self) -> float:
        return self.config.dspark.beta if self.config.loss == "own" else self.config.beta

    def weights(self, step: int) -> dict[str, float]:
        loss = self.config.dspark
        ce, l1 = (loss.ce, loss.l1) if self.config.loss == "own" else (1.0, 0.0)
        confidence = {} if self.draft.head.confidence_head is None else {"confidence": loss.confidence}
        return {"ce": ce, "l1": l1} | confidence

    def corrections(self, blocks: Blocks) -> Tensor:
        return self.draft.head.markov_head.markov_w1(blocks.previous)  # type: ignore[union-attr, operator]

    def forward(self, batch: Batch, step: int = 0) -> Terms:
        blocks = self.draft_blocks(batch)
        index = self.lattice_blocks(blocks, len(batch.ids))
        correct = self.corrected(step)
        extra = self.corrections(blocks)
        chosen, near = blocks.select(index), extra[index]
        rest = left_out(blocks, index)
        slots = blocks.labels.shape[1]

        final = batch.final.flatten(0, 1)[chosen.final_rows.flatten()]
        inside = correct(chosen.slot_hidden.flatten(0, 1), near.flatten(0, 1), chosen.labels.flatten(), final)
        outside = correct(blocks.slot_hidden[rest], extra[rest], blocks.labels[rest], None)
        l1 = inside.l1.view(-1, slots)

        beta, mask = self.beta, chosen.supervised
        everything, some = self.normaliser(blocks.supervised, beta), self.normaliser(mask, beta)
        accepted = 1 - l1.detach() / 2
        ce = self.weighted(-inside.target.view(-1, slots), mask, beta)
        ce = ce - (position_weights(slots, beta, ce.device).expand(rest.shape)[rest] * outside.target).sum()
        values = {
            "ce": (ce, everything),
            "l1": (self.weighted(l1, mask, beta), some),
        }
        if self.draft.head.confidence_head is not None:
            bce = F.binary_cross_entropy_with_logits(self.confidence(chosen, near).to(accepted), accepted, reduction="none")
            values["confidence"] = (self.weighted(bce, mask, beta), some)
        loss, sums = self.total(values, step)
        sums["accept_rate"] = (torch.where(mask, accepted, 0.0).sum(), mask.sum().float())
        sums["selected_prefix"] = self.selected_prefix(inside.top.view(-1, slots), chosen)
        return loss, sums

    def confidence(self, blocks: Blocks, embedded: Tensor) -> Tensor:
        """Return the confidence's logits [N, S]; embedded [N, S, r]: w1 of the tokens before."""
        head = self.draft.head
        x = blocks.slot_hidden.to(embedded.dtype)
        if head.with_markov:
            x = torch.cat((x, embedded), dim=-1)
        return head.confidence_head.proj(x)[..., 0]  # type: ignore[union-attr, operator]
