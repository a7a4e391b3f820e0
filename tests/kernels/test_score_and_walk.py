"""Scores, walks, draws and proposals against the reference's walks, for every rule."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from vllm_lilicorr.kernels.score_and_walk import (
    RULES,
    DraftLogits,
    Randomness,
    Walked,
    philox_torch,
    score_and_walk,
    uniforms_torch,
)
from vllm_lilicorr.model.lattice import path_score, walk

from .conftest import BLOCKS, DEVICE, DTYPES, EXAMPLES, PER_DTYPE, TOLERANCE, error, examples, poisoned, randn, reseed

SIGMA, EPS, VOCAB = 8.0, 1e-4, 300
SHAPES = st.tuples(st.integers(1, BLOCKS), st.integers(1, 15), st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([3, 24, 130]))


def fresh(n: int, slots: int, topk: int) -> Walked:
    """Return poisoned outputs."""
    ids, reals = (n, slots), (n, slots, topk)
    return Walked(
        poisoned(*ids, dtype=torch.int64), poisoned(*ids, dtype=torch.int64), poisoned(*reals), poisoned(*reals), poisoned(*reals, topk),
        torch.zeros(n, dtype=torch.int32, device=DEVICE),
    )  # fmt: skip


def vectors(n, slots, topk, dim, dtype=torch.float32):
    """Return out and in vectors as columns of one product, the anchor's as columns of another, and distinct candidate ids."""
    out, incoming = randn(n * slots * topk, 2 * dim, dtype=dtype).split(dim, dim=1)
    anchor = randn(n, dim + 5, dtype=dtype)[:, 5:]
    ids = torch.stack([torch.randperm(VOCAB)[:topk] for _ in range(n * slots)]).view(n, slots, topk).to(DEVICE)
    return out, incoming, anchor, ids


def reference_scores(out, incoming, anchor, ids):
    n, slots, topk = ids.shape
    out, incoming, anchor = (F.normalize(x.double(), dim=-1, eps=EPS) for x in (out, incoming, anchor))
    out, incoming = out.view(n, slots, topk, -1), incoming.view(n, slots, topk, -1)
    start = SIGMA * torch.einsum("nd,nkd->nk", anchor, incoming[:, 0])
    return start, SIGMA * (out[:, :-1] @ incoming[:, 1:].transpose(-1, -2))


def as_pairs(pair_scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what was computed in the layout `walk` takes."""
    return pair_scores[:, 0, 0].double(), pair_scores[:, 1:].double()


@pytest.mark.parametrize("dtype", DTYPES)
@examples(PER_DTYPE)
@given(shape=SHAPES, seed=st.integers(0, 2**20))
def test_scores_are_the_references(shape, dtype, seed):
    reseed(seed)
    inputs = vectors(*shape, dtype)
    for each in inputs[:3]:
        each[1:2] = 0  # a zero vector scores 0, by the eps in its norm
    got = score_and_walk(*inputs, "greedy", SIGMA, EPS, fresh(*shape[:3]))
    start, pair = reference_scores(*inputs)
    assert error(got.pair_scores[:, 0], start[:, None].expand_as(got.pair_scores[:, 0])) <= TOLERANCE[dtype]
    assert error(got.pair_scores[:, 1:], pair) <= TOLERANCE[dtype]
    assert (got.arrivals == 0).all()


@examples(2 * EXAMPLES)
@given(SHAPES, st.sampled_from(RULES), st.booleans(), st.integers(0, 2**20))
def test_every_rule_walks_as_the_reference(shape, rule, ties, seed):
    """On the very scores that were computed, so that a difference is the walk's; with few distinct vectors, all is ties."""
    reseed(seed)
    n, slots, topk, _ = shape
    out, incoming, anchor, ids = vectors(*shape)
    if ties:
        out.copy_(out.sign()[:1].expand_as(out))
        incoming.copy_(torch.where(torch.rand(len(incoming), 1, device=DEVICE) < 0.5, incoming[:1], -incoming[:1]).sign())
    temperature = torch.rand(n, device=DEVICE) * 2
    temperature[0] = 0
    uniforms = torch.rand(n, slots, device=DEVICE)
    got = score_and_walk(
        out, incoming, anchor, ids, rule, SIGMA, EPS, fresh(n, slots, topk), temperature=temperature, random=Randomness(uniforms=uniforms)
    )
    start, pair = as_pairs(got.pair_scores)
    sampled = {"temperature": temperature.double(), "uniforms": uniforms.double()} if rule == "sampled" else {}
    expected = walk(start, pair, rule, **sampled)
    if rule.startswith("exact"):  # sums of scores round differently, so equally good paths may change places
        if rule == "exact-normalized":
            start, pair = start.log_softmax(-1), pair.log_softmax(-1)
        best, ours = path_score(start, pair, expected.index), path_score(start, pair, got.index)
        assert torch.allclose(ours, best, rtol=0, atol=1e-4)
    elif rule == "sampled":
        # A draw may fall within rounding of the edge between two candidates.
        cumulative = expected.probs.cumsum(-1)
        near = ((cumulative - uniforms[..., None] * cumulative[..., -1:]).abs().amin(-1) < 1e-5) & (temperature > 0)[:, None]
        agree = (got.index == expected.index) | near.cumsum(1).bool()
        assert agree.all()
        alike = (got.index == expected.index).cumprod(1).bool()  # after another candidate, another distribution
        alike = F.pad(alike[:, :-1], (1, 0), value=True)
        torch.testing.assert_close(got.probs[alike], expected.probs[alike].float(), rtol=1e-5, atol=1e-6)
    else:
        assert torch.equal(got.index, expected.index)
    check_outputs(got, ids, rule, temperature)


def check_outputs(got: Walked, ids: torch.Tensor, rule: str, temperature: torch.Tensor) -> None:
    """Tokens, realised scores and proposals follow from the path."""
    n, slots, topk = ids.shape
    assert ((got.index >= 0) & (got.index < topk)).all()
    assert torch.equal(got.tokens, ids.gather(-1, got.index[..., None])[..., 0])
    before = F.pad(got.index[:, :-1], (1, 0))
    z = got.pair_scores.gather(2, before[..., None, None].expand(n, slots, 1, topk))[:, :, 0]
    assert torch.equal(got.scores, z)
    if rule == "sampled":
        warm = temperature > 0
        torch.testing.assert_close(got.probs[warm], (z / temperature[:, None, None])[warm].softmax(-1), rtol=1e-5, atol=1e-6)
    else:
        warm = torch.zeros(n, dtype=torch.bool, device=DEVICE)
    assert torch.equal(got.probs[~warm], F.one_hot(got.index, topk).float()[~warm])


@examples()
@given(SHAPES, st.sampled_from(RULES), st.integers(0, 2**20))
def test_padded_rows_are_inert_and_the_proposal_table_holds_the_last_proposal_only(shape, rule, seed):
    reseed(seed)
    n, slots, topk, dim = shape
    states = n + 2
    table = torch.full((states, slots, VOCAB + 7), -torch.inf, device=DEVICE)
    cached = torch.zeros(states, slots, topk, dtype=torch.int64, device=DEVICE)
    temperature = torch.rand(states, device=DEVICE) + 0.1
    seeds = torch.randint(-(2**62), 2**62, (states,), device=DEVICE)
    tokens_out = poisoned(n + 1, slots, dtype=torch.int64)
    for step in range(2):
        out, incoming, anchor, ids = vectors(n, slots, topk, dim)
        flat = torch.randperm(states, device=DEVICE)[:n].repeat_interleave(slots)  # vLLM keeps a state row for each slot
        rows = flat[::slots]
        rows[0 if step else -1] = -1
        before, result = (table.clone(), tokens_out.clone()), fresh(n, slots, topk)
        positions = torch.randint(2**40, (n, slots), device=DEVICE)
        got = score_and_walk(
            out, incoming, anchor, ids, rule, SIGMA, EPS, result, rows, temperature,
            Randomness(seeds=seeds, positions=positions), tokens_out, DraftLogits(table, cached),
        )  # fmt: skip
        live = rows >= 0
        untouched = torch.ones(states, dtype=torch.bool, device=DEVICE)
        untouched[rows[live]] = False
        assert torch.equal(table[untouched], before[0][untouched])
        assert torch.equal(tokens_out[:n][~live], before[1][:n][~live]) and torch.equal(tokens_out[n], before[1][n])
        for buffer, poison in zip(got[:5], fresh(n, slots, topk)[:5], strict=True):
            assert torch.equal(buffer[~live].nan_to_num(-7.0), poison[~live].nan_to_num(-7.0))
        assert torch.equal(tokens_out[:n][live], got.tokens[live])

        proposal = table[rows[live]].clone()
        entries = proposal.gather(2, ids[live])
        proposal.scatter_(2, ids[live], -torch.inf)
        assert (proposal == -torch.inf).all()
        if rule == "sampled":
            assert torch.equal(entries, got.scores[live])
            as_vllm_reads = (table[rows[live]] / temperature[rows[live], None, None]).softmax(-1).gather(2, ids[live])
            torch.testing.assert_close(as_vllm_reads, got.probs[live], rtol=1e-5, atol=1e-6)
            draws = uniforms_torch(seeds[rows.clamp_min(0), None], positions)
            again = score_and_walk(
                out, incoming, anchor, ids, rule, SIGMA, EPS, fresh(n, slots, topk), rows, temperature, Randomness(uniforms=draws)
            )
            assert torch.equal(again.tokens[live], got.tokens[live])
        else:
            assert torch.equal(entries, got.probs[live].log())


def test_candidates_of_equal_id_share_one_entry():
    """A caller withholds a block by giving it one token K times."""
    reseed(1)
    out, incoming, anchor, ids = vectors(2, 3, 4, 16)
    ids[1] = 5
    for rule in RULES:
        draft = DraftLogits(torch.full((2, 3, VOCAB), -torch.inf, device=DEVICE), torch.zeros_like(ids))
        score_and_walk(
            out, incoming, anchor, ids, rule, SIGMA, EPS, temperature=torch.ones(2, device=DEVICE),
            random=Randomness(uniforms=torch.rand(2, 3, device=DEVICE)), draft_logits=draft,
        )  # fmt: skip
        assert (draft.table[1].softmax(-1)[:, 5] == 1).all()


@pytest.mark.parametrize("rule", RULES)
def test_nan_scores_stay_in_their_block_and_give_a_distribution(rule):
    reseed(2)
    n, slots, topk = 4, 5, 4
    out, incoming, anchor, ids = vectors(n, slots, topk, 16)
    options = dict(temperature=torch.full((n,), 0.7, device=DEVICE), random=Randomness(uniforms=torch.rand(n, slots, device=DEVICE)))
    clean = score_and_walk(out, incoming, anchor, ids, rule, SIGMA, EPS, fresh(n, slots, topk), **options)
    out, incoming, anchor = out.clone(), incoming.clone(), anchor.clone()
    anchor[1] = torch.nan  # no score at all in slot 0
    incoming.view(n, slots, topk, -1)[2, 3, 1] = torch.nan  # one candidate of one slot
    out.view(n, slots, topk, -1)[3], incoming.view(n, slots, topk, -1)[3] = torch.nan, torch.inf
    draft = DraftLogits(torch.full((n, slots, VOCAB), -torch.inf, device=DEVICE), torch.zeros_like(ids))
    got = score_and_walk(out, incoming, anchor, ids, rule, SIGMA, EPS, fresh(n, slots, topk), draft_logits=draft, **options)
    for ours, theirs in zip(got[:5], clean[:5], strict=True):
        assert torch.equal(ours[0], theirs[0])
    assert ((got.index >= 0) & (got.index < topk)).all()
    torch.testing.assert_close(got.probs.sum(-1), torch.ones(n, slots, device=DEVICE))
    assert got.index[1, 0] == 0 and (got.index[3] == 0).all() and (got.probs[3, :, 0] == 1).all()
    assert got.index[2, 3] != 1 and got.probs[2, 3, 1] == 0
    assert not got.scores.isnan().any() and not draft.table.isnan().any()
    assert ((draft.table / 0.7).softmax(-1).sum(-1) - 1).abs().max() < 1e-5


@pytest.mark.parametrize("temperature", [1e-38, 1e-6, 50.0])
def test_extreme_temperatures(temperature):
    reseed(3)
    inputs = vectors(3, 6, 8, 16)
    temperatures, draws = torch.full((3,), temperature, device=DEVICE), torch.rand(3, 6, device=DEVICE)
    got = score_and_walk(*inputs, "sampled", SIGMA, EPS, fresh(3, 6, 8), temperature=temperatures, random=Randomness(uniforms=draws))
    torch.testing.assert_close(got.probs.sum(-1), torch.ones(3, 6, device=DEVICE))
    if temperature < 1:
        assert torch.equal(got.index, walk(*as_pairs(got.pair_scores), "greedy").index)


@pytest.mark.parametrize("draw", [0.0, 1 - 2**-24])
def test_the_least_and_the_greatest_draw(draw):
    reseed(4)
    inputs = vectors(2, 4, 8, 16)
    draws, ones = torch.full((2, 4), draw, device=DEVICE), torch.ones(2, device=DEVICE)
    got = score_and_walk(*inputs, "sampled", SIGMA, EPS, fresh(2, 4, 8), temperature=ones, random=Randomness(uniforms=draws))
    assert (got.index == (0 if draw == 0 else 7)).all()
    assert (got.probs.gather(-1, got.index[..., None]) > 0).all()


def test_philox_gives_the_published_words():
    """Known answers of Random123 (kat_vectors, philox4x32-10)."""
    for words, expected in (
        ((0,) * 6, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 6, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ):
        k0, k1, *counter = (torch.tensor(word) for word in words)
        assert tuple(word.item() for word in philox_torch((k0, k1), tuple(counter))) == expected


def test_draws_are_uniform_and_depend_on_seed_and_position():
    seeds, positions = torch.arange(100)[:, None] - 50, torch.arange(1000) + 2**33
    draws = uniforms_torch(seeds, positions)
    assert (draws >= 0).all() and (draws < 1).all()
    assert draws.unique().numel() > 99_500  # float32 has 2**23 values in [0.5, 1), so some meet
    counts = torch.histc(draws, 50, 0, 1)
    assert ((counts - 2000) ** 2 / 2000).sum() < 100  # 49 degrees of freedom: exceeded with probability 2e-5, but nothing here is random
    assert not torch.equal(uniforms_torch(torch.tensor(7), positions), uniforms_torch(torch.tensor(7 + 2**32), positions))
    assert not torch.equal(uniforms_torch(torch.tensor(7), positions), uniforms_torch(torch.tensor(7), positions + 2**32))


def test_what_does_not_fit_is_refused():
    out, incoming, anchor, ids = vectors(2, 3, 4, 8)
    with pytest.raises(ValueError, match="unknown rule 'gredy'"):
        score_and_walk(out, incoming, anchor, ids, "gredy", SIGMA, EPS)
    with pytest.raises(ValueError, match="needs temperature"):
        score_and_walk(out, incoming, anchor, ids, "sampled", SIGMA, EPS)
    with pytest.raises(ValueError, match="needs uniforms"):
        score_and_walk(out, incoming, anchor, ids, "sampled", SIGMA, EPS, temperature=torch.ones(2, device=DEVICE))
    ones, draws = torch.ones(2, device=DEVICE), torch.rand(3, 2, device=DEVICE)
    with pytest.raises(ValueError, match=r"uniforms must be contiguous in its last dimension, got strides \(1, 2\)"):
        score_and_walk(out, incoming, anchor, ids, "sampled", SIGMA, EPS, temperature=ones, random=Randomness(uniforms=draws.t()))
    with pytest.raises(ValueError, match=r"temperature must have shape \[any\]"):
        score_and_walk(out, incoming, anchor, ids, "sampled", SIGMA, EPS, temperature=ones[0], random=Randomness(uniforms=draws.view(2, 3)))
    with pytest.raises(ValueError, match=r"anchor must have shape \[2, 8\], got \[1, 8\]"):
        score_and_walk(out, incoming, anchor[:1], ids, "greedy", SIGMA, EPS)
    with pytest.raises(ValueError, match="1, 2, 4, 8 or 16 candidates, got 3"):
        score_and_walk(out[:18], incoming[:18], anchor, ids[..., :3].contiguous(), "greedy", SIGMA, EPS)
