"""LiLiCorr's objective (paper, Sections 3.3 and 3.4).

L = L_DFlash + gamma * (L_CE + lambda * L_dist)
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_lilicorr.config import LiLiCorrConfig
from vllm_lilicorr.model.lattice import walk

from ..losses import cross_entropy_sum, distractor_sum, leading_run, target_costs, teacher_forced_scores
from ..token_log_probs import TokenLogProbs
from .base import Blocks, HeadLoss
from .lattice import LatticeObjective


class LiLiCorrObjective(LatticeObjective):
    """L_DFlash + gamma * (L_CE + lambda * L_dist), the head's two terms over the oracle prefixes."""

    head_config = LiLiCorrConfig

    @property
    def topk(self) -> int:
        return self.draft.config.head.candidate_topk  # type: ignore[attr-defined]

    def weights(self, step: int) -> dict[str, float]:
        return {"dflash": 1.0, "ce": self.config.gamma, "dist": self.config.gamma * self.config.lambd}

    def head_sums(self, blocks: Blocks, lattice: TokenLogProbs, truth: Tensor, prefix: Tensor, final: Tensor) -> HeadLoss:
        start, pair = self.scores(blocks, lattice)
        scores = teacher_forced_scores(start, pair, truth)
        costs = torch.zeros_like(scores)
        costs[prefix] = target_costs(
            final[blocks.final_rows[prefix]], self.target.lm_head, blocks.labels[prefix], lattice.ids[prefix]
        ).to(costs.dtype)
        ce, dist = cross_entropy_sum(scores, truth, prefix), distractor_sum(scores, costs, prefix)
        slots, count = prefix.sum().to(scores.dtype), blocks.eligible.sum().to(scores.dtype)
        with torch.no_grad():
            taken = lattice.ids.gather(-1, walk(start, pair, "greedy").index[..., None])[..., 0]
            selected = leading_run((taken == blocks.labels) & blocks.eligible[:, None])
            spread = scores.amax(-1) - scores.amin(-1)
            correct = ((scores.argmax(-1) == truth) & prefix).sum().to(scores.dtype)
        return HeadLoss(
            value=ce + self.config.lambd * dist,
            weight=self.config.gamma,
            denominator=slots,
            sums={
                "ce": (ce.detach(), slots),
                "dist": (dist.detach(), slots),
                "slot_accuracy": (correct, slots),
                "score_spread": (torch.where(prefix, spread, 0.0).sum(), slots),
                "selected_prefix": (selected.sum().to(scores.dtype), count),
            },
        )

    def scores(self, blocks: Blocks, candidates: TokenLogProbs) -> tuple[Tensor, Tensor]:
        return self.draft.head(
            self.target.embed(candidates.ids), candidates.log_probs, blocks.slot_hidden, blocks.anchor_hidden, blocks.anchor_valid
        )
