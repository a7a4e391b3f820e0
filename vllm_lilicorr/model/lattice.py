"""The lattice of candidates and the walks through it (paper, Sections 3.2 and 3.5).

Shapes: N blocks, S slots, K candidates a slot, V the full target vocabulary. `start` [N, K] scores the anchor against the
first slot's candidates, `pair` [N, S-1, K, K] scores candidate k of a slot against candidate k' of the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

NUM_FEATURES = 5


def top_candidates(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return ids and log-probabilities [..., k] of the k most probable tokens of logits [..., V], in rank order.

    Log-probabilities are normalised over the full vocabulary, in fp32 (fp64 in fp64). Equal logits go to the lower id.
    Raises ValueError when k exceeds V.
    """
    vocab = logits.shape[-1]
    if not 1 <= k <= vocab:
        raise ValueError(f"k must lie in 1..{vocab} (the vocabulary), got {k}")
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    values, ids = torch.topk(wide, k, dim=-1)
    # topk promises no order among equal values, neither inside the k nor at their edge. Ties are rare, so the exact
    # selection (one stable sort) is paid for by the rows that have one. -inf columns tie with each other but are ties too.
    tied = ((wide >= values[..., -1:]).sum(-1) > k) | (values[..., 1:] == values[..., :-1]).any(-1)
    if tied.any():
        values, ids = values.clone(), ids.clone()  # what topk returned belongs to the gradient
        order = wide[tied].sort(dim=-1, descending=True, stable=True)
        values[tied], ids[tied] = order.values[..., :k], order.indices[..., :k]
    return ids, values - wide.logsumexp(-1, keepdim=True)


def candidate_features(log_probs: Tensor) -> Tensor:
    """Return the features [N, S, K, 5] of candidates with log-probabilities [N, S, K] (paper, Appendix A).

    [log p, p, log p - max_k log p, k / (K-1), 1 if k == 0 else 0], computed in fp32 (fp64 in fp64); with one candidate
    the rank feature is 0.
    """
    wide = log_probs.to(torch.promote_types(log_probs.dtype, torch.float32))
    topk = wide.shape[-1]
    rank = torch.arange(topk, dtype=wide.dtype, device=wide.device)
    columns = (
        wide,
        wide.exp(),
        wide - wide.amax(-1, keepdim=True),
        (rank / max(topk - 1, 1)).expand_as(wide),
        (rank == 0).to(wide.dtype).expand_as(wide),
    )
    return torch.stack(columns, dim=-1)


@dataclass(frozen=True)
class Walk:
    """A path through the lattice.

    index [N, S]: the candidate taken in each slot. margin [N, S]: by how much the decision was made (score difference to
    the runner-up; +inf where there was no choice, and for `sampled`). probs [N, S, K]: for `sampled`, the distribution each slot
    was drawn from, given its predecessor; rows at temperature 0 hold a one-hot.
    """

    index: Tensor
    margin: Tensor
    probs: Tensor | None = None


def walk(
    start: Tensor,
    pair: Tensor,
    rule: str,
    temperature: float | Tensor | None = None,
    generator: torch.Generator | None = None,
    uniforms: Tensor | None = None,
) -> Walk:
    """Return the path each block commits to under `rule`.

    greedy            k_1 = argmax start; k_{s+1} = argmax_k' pair[s, k_s, k'], ties to the lower rank (the method)
    sampled           k_s ~ softmax(z_s / T), z_s the row greedy would maximise; rows with T = 0 are greedy
    exact             the path with the largest sum of scores (Viterbi)
    exact-normalized  the same on row-log-softmaxed scores

    `temperature` is a number or [N]. The draws come from `uniforms` [N, S] in [0, 1) when given, else from `generator`.
    Raises ValueError on an unknown rule, a shape mismatch, or `sampled` without a temperature >= 0.
    """
    n, topk = start.shape
    if pair.ndim != 4 or pair.shape[0] != n or pair.shape[2:] != (topk, topk):
        raise ValueError(f"pair must be [{n}, S-1, {topk}, {topk}] beside start {tuple(start.shape)}, got {tuple(pair.shape)}")
    if rule not in WALKS:
        raise ValueError(f"unknown rule '{rule}'; known are {', '.join(WALKS)}")
    if rule != "sampled":
        return WALKS[rule](start, pair)
    if temperature is None:
        raise ValueError("the sampled rule needs a temperature")
    temperature = torch.as_tensor(temperature, dtype=start.dtype, device=start.device).expand(n)
    if not bool(torch.all(temperature >= 0)):
        raise ValueError("temperatures must be at least 0")
    if uniforms is None:
        # A generator draws on its own device alone.
        device = start.device if generator is None else generator.device
        uniforms = torch.rand(n, pair.shape[1] + 1, generator=generator, dtype=start.dtype, device=device).to(start.device)
    return _sampled(start, pair, temperature, uniforms)


def _rows(start: Tensor, pair: Tensor, choose: Callable[[int, Tensor], Tensor]) -> list[Tensor]:
    """Walk left to right: `choose(s, z_s [N, K])` picks each slot's candidate [N], which selects the next slot's row."""
    picks = [choose(0, start)]
    for s in range(pair.shape[1]):
        row = pair[:, s].gather(1, picks[-1][:, None, None].expand(-1, 1, pair.shape[-1]))[:, 0]
        picks.append(choose(s + 1, row))
    return picks


def _gap(values: Tensor) -> Tensor:
    """Return best minus runner-up over the last dimension; +inf when there is only one."""
    if values.shape[-1] == 1:
        return torch.full_like(values[..., 0], math.inf)
    best, second = values.topk(2, dim=-1).values.unbind(-1)
    return best - second


def _greedy(start: Tensor, pair: Tensor) -> Walk:
    margins = []

    def choose(_: int, row: Tensor) -> Tensor:
        margins.append(_gap(row))
        return row.argmax(-1)  # the first of equals: the lower rank

    return Walk(torch.stack(_rows(start, pair, choose), 1), torch.stack(margins, 1))


def _sampled(start: Tensor, pair: Tensor, temperature: Tensor, uniforms: Tensor) -> Walk:
    probs = []

    def choose(s: int, row: Tensor) -> Tensor:
        greedy = torch.zeros_like(row).scatter_(1, row.argmax(-1, keepdim=True), 1.0)
        # Relative to the row's maximum, so that a temperature near zero divides to 0 and -inf, never to NaN.
        warm = ((row - row.amax(-1, keepdim=True)) / temperature.clamp_min(torch.finfo(row.dtype).tiny)[:, None]).softmax(-1)
        slot = torch.where((temperature > 0)[:, None], warm, greedy)
        probs.append(slot)
        # Inverse of the cumulative distribution: the first candidate whose cumulative mass exceeds the draw, which is
        # never one of zero mass. Where rounding puts the draw at the total itself, the most probable one stands in.
        cumulative = slot.cumsum(-1)
        pick = (cumulative <= uniforms[:, s, None] * cumulative[:, -1:]).sum(-1)
        return torch.where(pick < row.shape[-1], pick, slot.argmax(-1))

    index = torch.stack(_rows(start, pair, choose), 1)
    return Walk(index, torch.full_like(start[:, :1], math.inf).expand(index.shape), torch.stack(probs, 1))


def _exact(start: Tensor, pair: Tensor) -> Walk:
    best, back, gaps = start, [], []
    for s in range(pair.shape[1]):
        through = best[:, :, None] + pair[:, s]  # [N, K, K']
        gaps.append(_gap(through.transpose(1, 2)))
        best, pointer = through.max(1)
        back.append(pointer)
    picks = [best.argmax(-1)]
    margins = [_gap(best)]
    for pointer, gap in zip(reversed(back), reversed(gaps)):
        margins.append(gap.gather(1, picks[-1][:, None])[:, 0])
        picks.append(pointer.gather(1, picks[-1][:, None])[:, 0])
    return Walk(torch.stack(picks[::-1], 1), torch.stack(margins[::-1], 1))


def _exact_normalized(start: Tensor, pair: Tensor) -> Walk:
    return _exact(start.log_softmax(-1), pair.log_softmax(-1))


WALKS: dict[str, Callable[..., Walk]] = {
    "greedy": _greedy,
    "sampled": _sampled,
    "exact": _exact,
    "exact-normalized": _exact_normalized,
}


def path_score(start: Tensor, pair: Tensor, index: Tensor) -> Tensor:
    """Return the sum of scores [N] along the paths index [N, S]."""
    rows = torch.arange(len(index), device=index.device)
    score = start[rows, index[:, 0]]
    for s in range(pair.shape[1]):
        score = score + pair[rows, s, index[:, s], index[:, s + 1]]
    return score
