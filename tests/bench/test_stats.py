"""Acceptance from histograms, intervals, and when two figures are a tie."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_lilicorr.bench import _stats
from vllm_lilicorr.bench._plots import spread
from vllm_lilicorr.reference import acceptance_length

LENGTHS = st.lists(st.integers(0, 5), min_size=1, max_size=40)


def histogram(accepted: list[int]) -> np.ndarray:
    return np.bincount(accepted, minlength=6)


@given(LENGTHS)
def test_tau_of_a_histogram_is_the_acceptance_length_of_its_blocks(accepted):
    assert _stats.tau(histogram(accepted)) == pytest.approx(acceptance_length(accepted))


@given(LENGTHS)
def test_positions_are_shares_of_blocks_and_sum_to_the_accepted(accepted):
    shares = _stats.by_position(histogram(accepted))
    assert shares == pytest.approx([sum(a > s for a in accepted) / len(accepted) for s in range(5)])
    assert sum(shares) == pytest.approx(_stats.tau(histogram(accepted)) - 1)


def test_tau_weighs_blocks_not_prompts():
    assert _stats.tau(np.array([[8, 0, 0], [0, 0, 2]])) == pytest.approx((4 + 10) / 10)
    assert math.isnan(_stats.tau(np.zeros((2, 3))))


def test_the_interval_holds_the_figure_and_narrows_with_prompts():
    generator = np.random.default_rng(0)
    few, many = (generator.poisson([6, 3, 1], (n, 3)) + 1 for n in (10, 200))
    wide, narrow = (_stats.interval(_stats.Resampled({"a": len(t)}).taus({"a": t})["a"]) for t in (few, many))
    for found, table in ((wide, few), (narrow, many)):
        assert found.value == pytest.approx(_stats.tau(table)) and found.low < found.value < found.high
    assert narrow.high - narrow.low < 0.5 * (wide.high - wide.low)
    again = _stats.interval(_stats.Resampled({"a": len(few)}).taus({"a": few})["a"])
    assert again == wide


def test_ratios_are_paired_prompt_by_prompt():
    generator = np.random.default_rng(1)
    base = generator.poisson([6, 3, 1], (30, 3)) + 1
    # The same drafts but for one more accepted token in a tenth of the blocks of every prompt: sure, though prompts differ.
    better = base * 10
    better[:, 1] += base.sum(1)
    better[:, 0] -= base.sum(1).clip(max=better[:, 0])
    bootstrap = _stats.Resampled({"a": 30, "b": 30})
    taus = [bootstrap.taus({"a": t, "b": t[::-1]}) for t in (better, base)]
    ratio = _stats.interval(taus[0]["all"] / taus[1]["all"])
    alone = _stats.interval(taus[1]["all"])
    assert ratio.low > 1 and (ratio.high - ratio.low) < 0.5 * (alone.high - alone.low) / alone.value
    assert taus[1]["mean"][0] == pytest.approx(_stats.tau(base))


def test_a_win_is_a_lead_of_more_than_the_floor_over_every_other():
    assert _stats.best({"a": 1.0301, "b": 1.0, "c": 0.5}, 0.03) == ("a", {"a"})
    assert _stats.best({"a": 1.0299, "b": 1.0, "c": 0.5}, 0.03) == ("a", {"a", "b"})
    assert _stats.best({"a": 1.0, "b": math.nan}, 0.03) == ("a", {"a"})
    assert _stats.best({"b": math.nan}, 0.03) == (None, set())


def test_the_noise_floor_is_the_largest_null_difference_and_no_less_than_the_papers():
    assert _stats.noise_floor([1.002, 0.96, 1.03]) == pytest.approx(0.04)
    assert _stats.noise_floor([1.002]) == _stats.noise_floor([]) == 0.01


def test_mean_and_deviation_are_the_samples():
    assert _stats.mean_and_deviation([1.0, 2.0, 3.0]) == (2.0, 1.0)
    assert math.isnan(_stats.mean_and_deviation([1.0])[1])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.floats(0.01, 0.3))
def test_labels_keep_their_order_and_their_distance(values, gap):
    heights = spread(values, gap)
    pairs = sorted(zip(values, heights))
    assert all(b[1] - a[1] >= gap - 1e-9 for a, b in zip(pairs, pairs[1:]) if a[0] < b[0] or a[1] != b[1])
    assert sum(heights) == pytest.approx(sum(values))
    if all(abs(a - b) >= gap for i, a in enumerate(values) for b in values[:i]):
        assert heights == pytest.approx(values)
