"""Our head and vLLM's own, on the same random weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from .conftest import make_config, make_draft
from .stock import stock_head, vllm_parallel_state
from .test_head import inputs

pytest.importorskip("vllm", reason="vLLM is not installed, so its head cannot be compared with")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def vllm():
    with vllm_parallel_state() as vllm_config:
        yield vllm_config


def both(config, slots, seed):
    ours = make_draft(config, seed=seed).head.float()
    stock = stock_head(config, ours)
    args = inputs(ours, config, n=4, slots=slots, seed=seed, dtype=torch.float32)
    args[4][:] = torch.tensor([True, False, True, False])
    with torch.no_grad():
        start, pair = ours(*args)
        embeddings, log_probs, hidden, anchor, valid = args
        stock_start, stock_pair = stock.score(
            token_embeddings=embeddings,
            candidate_log_probs=log_probs,
            pass_hidden=hidden,
            anchor_hidden=anchor,
            anchor_valid=valid,
        )
    sigma = config.head.logit_scale
    return (start, pair), (sigma * stock_start, sigma * stock_pair)


@pytest.mark.parametrize("width", [48, 32])  # W == H, where token_proj is the identity, and W != H
@pytest.mark.parametrize("slots", [5, 2, 1])
@pytest.mark.parametrize("seed", [0, 1])
def test_scores_equal_vllms(vllm, width, slots, seed):
    config = make_config()
    config = replace(config, head=replace(config.head, hidden_size=width))
    ours, stock = both(config, slots, seed)
    for a, b in zip(ours, stock):
        assert a.shape == b.shape
        assert float((a - b).abs().max() if a.numel() else 0) <= 1e-5


def test_scores_equal_vllms_at_a_real_width(vllm):
    config = make_config(hidden_size=576, num_attention_heads=9, num_key_value_heads=3, head_dim=64, block_size=16)
    head = replace(config.head, candidate_topk=8, hidden_size=256, num_heads=8, factor_dim=256)
    ours = make_draft(replace(config, head=head), spread=0.03)
    stock = stock_head(ours.config, ours.head)
    args = inputs(ours.head, ours.config, n=2, dtype=torch.float32)
    with torch.no_grad():
        start, pair = ours.head(*args)
        names = ("token_embeddings", "candidate_log_probs", "pass_hidden", "anchor_hidden", "anchor_valid")
        stock_start, stock_pair = stock.score(**dict(zip(names, args)))
    assert float((start - 8 * stock_start).abs().max()) <= 1e-5
    assert float((pair - 8 * stock_pair).abs().max()) <= 1e-5
