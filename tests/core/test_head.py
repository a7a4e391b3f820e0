"""The LiLiCorr head: its size, its formulas, its invariances."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vllm_lilicorr.config import LiLiCorrConfig
from vllm_lilicorr.model import LiLiCorrHead

seeds = st.integers(0, 2**31)
PAPER = LiLiCorrConfig(
    candidate_topk=8,
    hidden_size=1024,
    num_layers=2,
    num_heads=8,
    mlp_ratio=2.0,
    factor_dim=1024,
    vector_eps=1e-4,
    logit_scale=8.0,
)


def inputs(head, config, n=3, slots=None, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    slots = slots or config.num_slots
    topk = config.head.candidate_topk

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    log_probs = (3 * randn(n, slots, topk + 3)).log_softmax(-1).sort(-1, descending=True).values[..., :topk]
    valid = torch.rand(n, generator=generator) < 0.7
    return [
        randn(n, slots, topk, config.hidden_size),
        log_probs,
        randn(n, slots, config.hidden_size),
        randn(n, config.hidden_size),
        valid,
    ]


def head_of(draft, config, dtype=torch.float64):
    return draft(config).head.to(dtype).requires_grad_(False)


@pytest.mark.parametrize(("hidden_size", "parameters"), [(4096, 36_758_794), (2560, 32_040_202)])
def test_parameter_count_is_the_papers(config, hidden_size, parameters):
    with torch.device("meta"):
        head = LiLiCorrHead(config(hidden_size=hidden_size, block_size=16, head=PAPER))
    assert sum(p.numel() for p in head.parameters()) == parameters


@pytest.mark.parametrize("width", [32, 48])
@pytest.mark.parametrize("slots", [1, 3, 5])
def test_scores_equal_the_papers_formulas_node_by_node(draft, config, width, slots):
    """Every node, every pair of nodes and every score on its own, in scalars where the paper has scalars."""
    config = config()
    config = replace(config, head=replace(config.head, hidden_size=width))
    head = head_of(draft, config)
    embeddings, log_probs, hidden, anchor_hidden, valid = args = inputs(head, config, n=2, slots=slots)
    valid[0], valid[1] = True, False
    start, pair = head(*args)
    topk, heads = config.head.candidate_topk, config.head.num_heads
    size = width // heads

    def linear(layer, x):
        return layer.weight @ x + layer.bias

    def rms(norm, x):
        return x / (x.pow(2).mean() + config.rms_norm_eps).sqrt() * norm.weight

    def silu(x):
        return x / (1 + (-x).exp())

    def unit(x):
        return x / max(float(x.norm()), config.head.vector_eps)

    for n in range(2):
        nodes = {}
        for s in range(slots):
            for k in range(topk):
                lp = log_probs[n, s, k]
                rank = k / (topk - 1)
                f = torch.stack([lp, lp.exp(), lp - log_probs[n, s].max(), lp * 0 + rank, lp * 0 + (k == 0)])
                f = (f - f.mean()) / (f.var(correction=0) + 1e-5).sqrt()
                f = f * head.feature_norm.weight + head.feature_norm.bias
                token = embeddings[n, s, k] if width == 48 else linear(head.token_proj, embeddings[n, s, k])
                confidence = linear(head.feature_mlp.down_proj, silu(linear(head.feature_mlp.up_proj, f)))
                tables = head.slot_embedding[0, 0, s, 0] + head.rank_embedding[0, 0, 0, k]
                nodes[s, k] = token + linear(head.pass_hidden_proj, hidden[n, s]) + confidence + tables
        for layer in head.layers:
            qkv = {}
            for node, x in nodes.items():
                fused = layer.attn.in_proj_weight @ rms(layer.attn_norm, x) + layer.attn.in_proj_bias
                qkv[node] = fused.view(3, heads, size)
            attended = {}
            for (s, k), (q, _, _) in qkv.items():
                out = []
                for h in range(heads):
                    scores = torch.stack(
                        [
                            q[h] @ other[1, h] / math.sqrt(size)
                            + head.relative_slot_bias[h, s - t + config.block_size - 1]
                            + head.same_slot_bias[h] * (s == t)
                            for (t, _), other in qkv.items()
                        ]
                    )
                    out.append(scores.softmax(0) @ torch.stack([other[2, h] for other in qkv.values()]))
                attended[s, k] = nodes[s, k] + linear(layer.attn.out_proj, torch.cat(out))
            nodes = {
                node: x + linear(layer.mlp.down_proj, silu(linear(layer.mlp.up_proj, rms(layer.mlp_norm, x))))
                for node, x in attended.items()
            }
        a = linear(head.context_proj, anchor_hidden[n]) if valid[n] else torch.zeros(width, dtype=torch.float64)
        a = rms(head.anchor_norm, a)
        out, incoming = {}, {}
        for node, x in nodes.items():
            x = rms(head.output_norm, x)
            g = silu(linear(head.factor_input_proj, torch.cat([x, a, x * a])))
            out[node], incoming[node] = unit(linear(head.out_head, g)), unit(linear(head.in_head, g))
        o_anchor = unit(linear(head.anchor_out_head, a))
        for k in range(topk):
            torch.testing.assert_close(start[n, k], 8 * o_anchor @ incoming[0, k])
            for s in range(slots - 1):
                for j in range(topk):
                    torch.testing.assert_close(pair[n, s, k, j], 8 * out[s, k] @ incoming[s + 1, j])


@settings(max_examples=25)
@given(seeds, st.sampled_from([1, 2, 5]), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_scores_are_bounded_by_sigma(seed, slots, dtype):
    from .conftest import make_config, make_draft

    config = make_config()
    head = make_draft(config, seed % 7, spread=1.0).head.to(dtype)
    start, pair = head(*inputs(head, config, slots=slots, seed=seed, dtype=dtype))
    assert start.dtype == pair.dtype == torch.promote_types(dtype, torch.float32)
    assert start.shape == (3, 4) and pair.shape == (3, slots - 1, 4, 4)
    for scores in (start, pair):
        assert bool((scores.abs() <= config.head.logit_scale * (1 + 1e-6)).all())


@settings(max_examples=20)
@given(seeds, st.permutations(range(5)))
def test_blocks_do_not_see_each_other(seed, order):
    from .conftest import make_config, make_draft

    config = make_config()
    head = make_draft(config).head.double()
    args = inputs(head, config, n=5, seed=seed)
    start, pair = head(*args)
    permuted = head(*(x[order] for x in args))
    alone = head(*(x[2:3] for x in args))
    torch.testing.assert_close(permuted, (start[order], pair[order]))
    torch.testing.assert_close(alone, (start[2:3], pair[2:3]))


@settings(max_examples=20)
@given(seeds, st.integers(0, 3))
def test_a_later_candidate_changes_an_earlier_score(seed, candidate):
    from .conftest import make_config, make_draft

    config = make_config()
    head = head_of(make_draft, config)
    args = inputs(head, config, seed=seed)
    start, pair = head(*args)
    args[0][:, -1, candidate] += 1.0
    changed_start, changed_pair = head(*args)
    assert bool((changed_start != start).all())
    assert bool((changed_pair[:, 0] != pair[:, 0]).all())


@settings(max_examples=20)
@given(seeds, st.floats())
@example(0, math.nan)
@example(0, math.inf)
def test_a_block_without_context_has_an_exactly_zero_anchor_whatever_the_row_holds(seed, junk):
    from .conftest import make_config, make_draft

    config = make_config()
    head = head_of(make_draft, config)
    args = inputs(head, config, seed=seed)
    args[4][:] = torch.tensor([True, False, True])
    args[3][1] = junk
    assert torch.equal(head.anchor(args[3], args[4])[1], torch.zeros(32, dtype=torch.float64))
    scores = head(*args)
    args[3][1] = 0.0
    torch.testing.assert_close(scores, head(*args), rtol=0, atol=0)
    head.requires_grad_(True)
    args[3][1] = junk
    sum(x.sum() for x in head(*args)).backward()
    assert bool(head.context_proj.weight.grad.isfinite().all())


def test_fewer_slots_use_the_leading_tables(draft, config):
    config = config()
    head = head_of(draft, config)
    args = inputs(head, config, slots=3)
    before = head(*args)
    with torch.no_grad():
        head.slot_embedding[:, :, 3:] = 9.0
        head.relative_slot_bias[:, :3] = head.relative_slot_bias[:, -3:] = 9.0
    torch.testing.assert_close(head(*args), before, rtol=0, atol=0)
    with torch.no_grad():
        head.slot_embedding[:, :, 2] += 1.0
    assert bool((head(*args)[0] != before[0]).any())


def test_one_candidate_a_slot_works(draft, config):
    config = config()
    config = replace(config, head=replace(config.head, candidate_topk=1))
    start, pair = head_of(draft, config)(*inputs(None, config))
    assert start.shape == (3, 1) and bool(start.isfinite().all()) and bool(pair.isfinite().all())


@pytest.mark.parametrize(
    ("position", "shape"), [(0, (3, 5, 4, 47)), (1, (3, 6, 4)), (1, (3, 5, 2)), (2, (3, 4, 48)), (3, (2, 48)), (4, (2,))]
)
def test_wrong_shapes_are_refused_with_what_was_expected(draft, config, position, shape):
    config = config()
    head = head_of(draft, config)
    args = inputs(head, config)
    args[position] = torch.zeros(shape, dtype=args[position].dtype)
    with pytest.raises(ValueError, match="must be .* got"):
        head(*args)


def test_initial_vector_heads_are_not_zero_and_tables_are(config):
    head = LiLiCorrHead(config())
    for layer in (head.out_head, head.in_head, head.anchor_out_head):
        assert 0.015 < layer.weight.std().item() < 0.025 and not layer.bias.any()
    for table in (head.slot_embedding, head.rank_embedding, head.relative_slot_bias, head.same_slot_bias):
        assert not table.any()
