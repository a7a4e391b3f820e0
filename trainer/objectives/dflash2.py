"""DFlash2's objective: its selector's cross-entropy over the candidates, beside the backbone's own.

    L          = L_DFlash + selector * L_selector
    L_selector = - sum_s w_s log softmax_k(score(g_{s-1}, c_{s,k}))[g_s] / sum_s w_s      over all supervised slots
    score(p, c) = log p_s(c) + <predecessor[p] * hidden_projection(d_s), successor[c]>      g_0 the anchor's token

Where the ground truth g_s is not among a slot's candidates it takes the place of the last one, so that every slot has a
label and the candidates stay as many as serving ranks. The method's authors disclose no training recipe; the formula is
the one of the public third-party trainer (vLLM's `speculators`), the slot weights w_s are those of L_DFlash.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_lilicorr.config import DFlash2Config

from ..losses import leading_run, position_weights, teacher_forced_scores
from ..token_log_probs import TokenLogProbs
from .base import Blocks, HeadLoss
from .lattice import LatticeObjective


class DFlash2Objective(LatticeObjective):
    """L_DFlash + selector * L_selector."""

    head_config = DFlash2Config

    @property
    def topk(self) -> int:
        return self.draft.config.head.top_k  # type: ignore[attr-defined]

    def weights(self, step: int) -> dict[str, float]:
        return {"dflash": 1.0, "selector": self.config.dflash2.selector}

    def usable(self, blocks: Blocks) -> Tensor:
        # Every slot is a problem of its own, given its predecessor: a block that the turn's end cuts short has some too.
        return blocks.supervised.any(-1)

    def head_sums(self, blocks: Blocks, lattice: TokenLogProbs, truth: Tensor, prefix: Tensor, final: Tensor) -> HeadLoss:
        covered = lattice.ids.gather(-1, truth[..., None])[..., 0] == blocks.labels
        training, truth = with_ground_truth(lattice, blocks.labels, truth, covered)
        # The predecessor's row of `pair` is the ground truth's, which is now a candidate of every slot.
        scores = teacher_forced_scores(*self.scores(blocks, training), truth)
        weights = position_weights(scores.shape[1], self.config.beta, scores.device)
        losses = -scores.log_softmax(-1).gather(-1, truth[..., None])[..., 0]
        value = torch.where(blocks.supervised, weights * losses, 0.0).sum()
        denominator = self.normaliser(blocks.supervised, self.config.beta)
        with torch.no_grad():
            # As long as the ground truth is a candidate, training's candidates are serving's, and the greedy walk that has
            # followed it so far scores exactly these rows.
            correct = (scores.argmax(-1) == truth) & covered
            selected = leading_run(correct & blocks.eligible[:, None])
            spread = scores.amax(-1) - scores.amin(-1)
            slots, count = prefix.sum().to(scores.dtype), blocks.eligible.sum().to(scores.dtype)
        return HeadLoss(
            value=value,
            weight=self.config.dflash2.selector,
            denominator=denominator,
            sums={
                "selector": (value.detach(), denominator),
                "slot_accuracy": ((correct & prefix).sum().to(scores.dtype), slots),
                "score_spread": (torch.where(prefix, spread, 0.0).sum(), slots),
                "selected_prefix": (selected.sum().to(scores.dtype), count),
            },
        )

    def scores(self, blocks: Blocks, candidates: TokenLogProbs) -> tuple[Tensor, Tensor]:
        return self.draft.head(candidates.ids, candidates.log_probs, blocks.slot_hidden, blocks.anchor_ids)


def with_ground_truth(lattice: TokenLogProbs, labels: Tensor, truth: Tensor, covered: Tensor) -> tuple[TokenLogProbs, Tensor]:
    """Return the lattice with each label [N, S] that is no candidate in place of the last one, and the labels' indices."""
    last = torch.zeros_like(lattice.ids, dtype=torch.bool)
    last[..., -1] = ~covered
    ids = torch.where(last, labels[..., None], lattice.ids)
    log_probs = torch.where(last, lattice.target[..., None], lattice.log_probs)
    return TokenLogProbs(lattice.target, ids, log_probs), truth.where(covered, torch.full_like(truth, ids.shape[-1] - 1))
