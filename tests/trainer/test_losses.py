"""The losses against a slow fp64 implementation that loops over blocks, slots and candidates."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_lilicorr.trainer.losses import (
    cross_entropy_sum,
    distractor_sum,
    ground_truth_candidates,
    leading_run,
    position_weights,
    target_costs,
    teacher_forced_scores,
)


def lattice(seed: int, n: int, slots: int, k: int, hit: float, quantum: float | None):
    """A random lattice; each slot's label is among its candidates with probability `hit`; `quantum` makes ties."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.stack([torch.randperm(50, generator=g)[:k] for _ in range(slots)]) for _ in range(n)])
    covered = torch.rand(n, slots, generator=g) < hit
    pick = torch.randint(0, k, (n, slots), generator=g)
    labels = torch.where(covered, ids.gather(-1, pick[..., None])[..., 0], 99)
    start = torch.randn(n, k, generator=g, dtype=torch.float64) * 3
    pair = torch.randn(n, slots - 1, k, k, generator=g, dtype=torch.float64) * 3
    logits = torch.randn(n, slots, 100, generator=g, dtype=torch.float64) * 2
    if quantum:
        start, pair, logits = ((x / quantum).round() * quantum for x in (start, pair, logits))
    supervised = torch.rand(n, generator=g) < 0.8
    return ids, labels, start, pair, logits, supervised


def slow(ids, labels, start, pair, logits, supervised):
    """Return (CE sum, distractor sum, number of slots) by the formulas, one scalar at a time."""
    ce = dist = count = 0.0
    n, slots, k = ids.shape
    for b in range(n):
        if not supervised[b]:
            continue
        before = None
        for s in range(slots):
            row = [int(ids[b, s, j]) for j in range(k)]
            if int(labels[b, s]) not in row:
                break
            truth = row.index(int(labels[b, s]))
            z = [float(start[b, j]) if s == 0 else float(pair[b, s - 1, before, j]) for j in range(k)]
            total = sum(math.exp(v) for v in z)
            p = [math.exp(v) / total for v in z]
            log_q = torch.log_softmax(logits[b, s], -1)
            ce -= math.log(p[truth])
            dist += sum(p[j] * max(0.0, float(log_q[labels[b, s]] - log_q[row[j]])) for j in range(k))
            count += 1
            before = truth
    return ce, dist, count


@given(
    seed=st.integers(0, 100_000), n=st.integers(1, 4), slots=st.integers(1, 6), k=st.sampled_from([1, 2, 4, 8]),
    hit=st.sampled_from([0.0, 0.3, 0.8, 1.0]), quantum=st.sampled_from([None, 2.0]),
)  # fmt: skip
def test_losses_equal_the_slow_implementation(seed, n, slots, k, hit, quantum):
    ids, labels, start, pair, logits, supervised = lattice(seed, n, slots, k, hit, quantum)
    truth, covered = ground_truth_candidates(ids, labels)
    prefix = leading_run(covered & supervised[:, None])
    scores = teacher_forced_scores(start, pair, truth)
    # lm_head is the identity here, so final states are logits.
    costs = torch.zeros_like(scores)
    costs[prefix] = target_costs(logits[prefix], torch.eye(100, dtype=torch.float64), labels[prefix], ids[prefix])
    ce, dist, count = slow(ids, labels, start, pair, logits, supervised)
    assert int(prefix.sum()) == count
    if not count:
        assert float(cross_entropy_sum(scores, truth, prefix)) == float(distractor_sum(scores, costs, prefix)) == 0.0
    torch.testing.assert_close(float(cross_entropy_sum(scores, truth, prefix)), ce, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(float(distractor_sum(scores, costs, prefix)), dist, rtol=1e-9, atol=1e-9)


def test_an_empty_prefix_gives_exactly_zero_and_zero_gradients():
    scores = torch.randn(3, 4, 2, requires_grad=True)
    nothing = torch.zeros(3, 4, dtype=torch.bool)
    total = cross_entropy_sum(scores, torch.zeros(3, 4, dtype=torch.long), nothing) + distractor_sum(
        scores, torch.ones(3, 4, 2), nothing
    )
    total.backward()
    assert float(total.detach()) == 0.0 and not scores.grad.any()


def test_penalty_is_zero_when_the_target_prefers_the_candidate():
    scores, mask = torch.randn(1, 1, 4), torch.ones(1, 1, dtype=torch.bool)
    assert float(distractor_sum(scores, torch.tensor([[[0.0, -1.0, -2.0, -0.5]]]), mask)) == 0.0
    assert float(distractor_sum(scores, torch.tensor([[[0.0, 1.0, -2.0, -0.5]]]), mask)) > 0.0


def test_slot_weights_decay_from_one():
    torch.testing.assert_close(
        position_weights(3, 7.0, torch.device("cpu")), torch.tensor([1.0, math.exp(-1 / 7), math.exp(-2 / 7)])
    )
