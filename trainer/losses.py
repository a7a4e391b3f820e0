"""The losses on a lattice of candidates, as sums over slots (paper, Section 3.3 and Appendix E).

Sums, because the denominators are global: a rank knows its own slots only. Shapes: N blocks, S slots, K candidates.
Teacher forcing makes every slot independent of the others, so all slots' scores come from one gather.
"""

from __future__ import annotations

import torch
from torch import Tensor


def position_weights(num_slots: int, beta: float, device: torch.device) -> Tensor:
    """Return w_s = exp(-(s-1) / beta) [S] for s = 1..S, in fp32."""
    return torch.exp(-torch.arange(num_slots, dtype=torch.float32, device=device) / beta)


def ground_truth_candidates(candidate_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return (index [N, S], covered [N, S]): which candidate of candidate_ids [N, S, K] is the label [N, S], if any.

    The index of a slot that is not covered is 0 and means nothing.
    """
    match = candidate_ids == labels[..., None]
    return match.int().argmax(-1), match.any(-1)


def leading_run(flags: Tensor) -> Tensor:
    """Return the maximal leading run of True along the last dimension, as a mask of the same shape."""
    return flags.int().cumprod(-1).bool()


def teacher_forced_scores(start: Tensor, pair: Tensor, truth: Tensor) -> Tensor:
    """Return z [N, S, K]: the scores of each slot's candidates after the ground truth of the slot before it.

    start [N, K]; pair [N, S-1, K, K]; truth [N, S] the ground truth's candidate index.
    """
    rows = truth[:, :-1, None, None].expand(-1, -1, 1, pair.shape[-1])
    return torch.cat((start[:, None], pair.gather(2, rows)[:, :, 0]), dim=1)


def cross_entropy_sum(scores: Tensor, truth: Tensor, mask: Tensor) -> Tensor:
    """Return - sum over masked slots of log softmax(z)[truth]; exactly 0 over none."""
    losses = -scores.log_softmax(-1).gather(-1, truth[..., None])[..., 0]
    return torch.where(mask, losses, 0.0).sum()


def distractor_sum(scores: Tensor, costs: Tensor, mask: Tensor) -> Tensor:
    """Return the sum over masked slots of sum_k P(k) * relu(log q(g) - log q(c_k)); exactly 0 over none.

    costs [N, S, K] holds log q(g) - log q(c_k), which is a constant: the target is frozen.
    """
    penalties = (scores.softmax(-1) * costs.clamp_min(0.0)).sum(-1)
    return torch.where(mask, penalties, 0.0).sum()


@torch.no_grad()
def target_costs(final: Tensor, lm_head: Tensor, labels: Tensor, candidate_ids: Tensor) -> Tensor:
    """Return log q(g) - log q(c_k) [P, K] from the target's final hidden states [P, H], labels [P], candidates [P, K].

    The log-partition cancels in the difference of two logits of one position, so K + 1 gathered rows of lm_head [V, H]
    do; the target's logits over the vocabulary never exist. In fp32 (fp64 in fp64), a bounded number of rows at a time.
    """
    wide = torch.promote_types(final.dtype, torch.float32)
    tokens = torch.cat((labels[:, None], candidate_ids), dim=1)
    costs = torch.empty(candidate_ids.shape, dtype=wide, device=final.device)
    step = max(1, (16 << 20) // (tokens.shape[1] * final.shape[-1] * wide.itemsize))
    for at in range(0, len(tokens), step):
        part = slice(at, at + step)
        logits = torch.bmm(lm_head[tokens[part]].to(wide), final[part, :, None].to(wide))[..., 0]
        costs[part] = logits[:, :1] - logits[:, 1:]
    return costs
