"""Candidates and walks."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_lilicorr.model.lattice import candidate_features, path_score, top_candidates, walk

seeds = st.integers(0, 2**31)


def lattice(seed, n=3, slots=4, topk=4):
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(n, topk, generator=generator, dtype=torch.float64)
    return start, torch.randn(n, slots - 1, topk, topk, generator=generator, dtype=torch.float64)


@given(seeds, st.integers(2, 60), st.data())
def test_candidates_are_the_most_probable_in_order_with_ties_to_the_lower_id(seed, vocab, data):
    k = data.draw(st.integers(1, min(vocab, 16)))
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-3, 3, (5, vocab), generator=generator).to(torch.bfloat16)  # ties everywhere
    logits[0, ::2] = -math.inf
    ids, log_probs = top_candidates(logits, k)
    for row, chosen, probs in zip(logits.double(), ids, log_probs):
        expected = sorted(range(vocab), key=lambda token: (-float(row[token]), token))[:k]
        assert chosen.tolist() == expected
        torch.testing.assert_close(probs.double(), row.log_softmax(-1)[expected], atol=1e-5, rtol=1e-5)


def test_more_candidates_than_tokens_are_refused():
    with pytest.raises(ValueError, match="1..3"):
        top_candidates(torch.zeros(1, 3), 4)


def test_features_are_the_papers_five():
    log_probs = torch.tensor([[[0.5, 0.25]]]).log()
    expected = [[math.log(0.5), 0.5, 0, 0, 1], [math.log(0.25), 0.25, math.log(0.5), 1, 0]]
    torch.testing.assert_close(candidate_features(log_probs)[0, 0], torch.tensor(expected))
    assert candidate_features(log_probs[..., :1])[0, 0, 0, 3] == 0


@given(seeds, st.integers(1, 5), st.sampled_from([1, 2, 3, 4]))
def test_greedy_follows_the_best_next_candidate(seed, slots, topk):
    start, pair = lattice(seed, slots=slots, topk=topk)
    path = walk(start, pair, "greedy")
    for n, index in enumerate(path.index.tolist()):
        rows = [start[n], *(pair[n, s, index[s]] for s in range(slots - 1))]
        for s, row in enumerate(rows):
            assert index[s] == int(row.argmax())
            ordered = row.sort(descending=True).values
            assert path.margin[n, s] == (ordered[0] - ordered[1] if topk > 1 else math.inf)


def test_ties_go_to_the_lower_rank():
    for rule in ("greedy", "exact", "exact-normalized"):
        assert walk(torch.zeros(1, 4), torch.zeros(1, 2, 4, 4), rule).index.tolist() == [[0, 0, 0]]


@given(seeds, st.integers(1, 4), st.sampled_from([1, 2, 3]))
def test_exact_is_the_best_of_all_paths(seed, slots, topk):
    start, pair = lattice(seed, slots=slots, topk=topk)
    for rule, scores in (("exact", (start, pair)), ("exact-normalized", (start.log_softmax(-1), pair.log_softmax(-1)))):
        found = path_score(*scores, walk(start, pair, rule).index)
        paths = torch.tensor(list(itertools.product(range(topk), repeat=slots)))
        every = torch.stack([path_score(*scores, path.expand(len(start), -1)) for path in paths])
        torch.testing.assert_close(found, every.amax(0))


@given(seeds)
def test_greedy_never_scores_above_exact(seed):
    start, pair = lattice(seed, slots=6)
    greedy, exact = (path_score(start, pair, walk(start, pair, rule).index) for rule in ("greedy", "exact"))
    assert bool((greedy <= exact + 1e-12).all())


def test_exact_margin_is_zero_when_two_paths_draw_and_positive_else():
    start, pair = torch.tensor([[0.0, 0.0]]), torch.zeros(1, 1, 2, 2)
    assert walk(start, pair, "exact").margin.min() == 0
    pair[0, 0, 1, 1] = 1.0
    path = walk(start, pair, "exact")
    assert path.index.tolist() == [[1, 1]] and path.margin.min() == 1


@settings(max_examples=10)
@given(seeds, st.sampled_from([0.5, 1.0, 2.0]))
def test_sampled_walks_occur_as_often_as_their_proposal_says(seed, temperature):
    start, pair = lattice(seed, n=1, slots=2, topk=4)
    draws = 40_000
    path = walk(start.expand(draws, -1), pair.expand(draws, -1, -1, -1), "sampled", temperature, torch.Generator().manual_seed(1))
    expected = (start[0] / temperature).softmax(-1)[:, None] * (pair[0, 0] / temperature).softmax(-1)
    counts = torch.zeros(4, 4).index_put_((path.index[:, 0], path.index[:, 1]), torch.ones(draws), accumulate=True)
    expected = draws * expected
    small = expected < 5
    counts, expected = (torch.cat([cells[~small], cells[small].sum()[None]]) for cells in (counts, expected))
    statistic = ((counts - expected)[expected > 0] ** 2 / expected[expected > 0]).sum()
    assert statistic < 80  # chi-square, at most 15 degrees of freedom: p < 1e-9, for as many examples as are tried
    torch.testing.assert_close(path.probs[:, 0], (start / temperature).softmax(-1).expand(draws, -1))
    rows = (pair[0, 0] / temperature).softmax(-1)[path.index[:, 0]]
    torch.testing.assert_close(path.probs[:, 1], rows)


def test_rows_at_temperature_zero_are_greedy_in_a_mixed_batch():
    start, pair = lattice(2, n=4)
    temperature = torch.tensor([0.0, 1.0, 0.0, 1e-42])
    path = walk(start, pair, "sampled", temperature, torch.Generator().manual_seed(0))
    greedy = walk(start, pair, "greedy").index
    assert torch.equal(path.index[[0, 2]], greedy[[0, 2]])
    assert torch.equal(path.index[3], greedy[3]) and not path.probs.isnan().any()
    assert torch.equal(path.probs[0].gather(-1, greedy[0, :, None]), torch.ones(4, 1, dtype=torch.float64))


@given(seeds, st.floats(0, 1, exclude_max=True))
def test_a_candidate_of_zero_mass_is_never_drawn(seed, uniform):
    start, pair = lattice(seed)
    start[:, [0, 3]] = -math.inf
    pair[..., 1] = -math.inf
    uniforms = torch.full((3, 4), uniform, dtype=torch.float64)
    path = walk(start, pair, "sampled", 1.0, uniforms=uniforms)
    assert bool((path.probs.gather(-1, path.index[..., None]) > 0).all())


def test_wrong_calls_say_what_was_expected():
    start, pair = lattice(0)
    with pytest.raises(ValueError, match="known are greedy"):
        walk(start, pair, "best")
    with pytest.raises(ValueError, match="needs a temperature"):
        walk(start, pair, "sampled")
    with pytest.raises(ValueError, match="at least 0"):
        walk(start, pair, "sampled", -1.0)
    with pytest.raises(ValueError, match=r"pair must be \[3, S-1, 4, 4\]"):
        walk(start, pair[..., :2], "greedy")
