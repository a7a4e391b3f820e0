"""Node inputs, norms, anchor operand and SiLU epilogue against the reference's modules."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from vllm_lilicorr.kernels.anchor_fusion import anchor_operand
from vllm_lilicorr.kernels.bias_silu import bias_silu
from vllm_lilicorr.kernels.fused_linear import Norm, fused_linear
from vllm_lilicorr.kernels.lattice_nodes import FeatureWeights, lattice_nodes
from vllm_lilicorr.kernels.rms_norm import rms_norm

from .conftest import DEVICE, DTYPES, PER_DTYPE, TOLERANCE, error, examples, in_double, make_head, poisoned, randn, reseed

WIDTHS = st.sampled_from([8, 48, 128, 576, 1030])


@pytest.mark.parametrize("dtype", DTYPES)
@examples(PER_DTYPE)
@given(n=st.integers(1, 5), width=WIDTHS, with_offset=st.booleans(), seed=st.integers(0, 2**20))
def test_rms_norm_is_the_references(n, width, dtype, with_offset, seed):
    reseed(seed)
    norm = in_double(make_head(dtype, hidden_size=width, num_heads=1)).output_norm
    x, offset = randn(n, 2 * width, dtype=dtype)[:, width:], randn(width) if with_offset else None
    out = poisoned(n, width, dtype=dtype)
    rms_norm(x, norm.weight.detach().to(dtype), norm.eps, offset, out=out)
    assert error(out, norm(x.double() + (0 if offset is None else offset.double()))) <= TOLERANCE[dtype]


def test_rows_without_an_anchor_come_out_zero_whatever_they_hold():
    reseed(1)
    x = randn(4, 48)
    x[1], x[2] = torch.nan, torch.inf
    valid = torch.tensor([True, False, False, True], device=DEVICE)
    out = rms_norm(x, randn(48), 1e-6, valid=valid, out=poisoned(4, 48))
    assert (out[1:3] == 0).all() and out[[0, 3]].isfinite().all() and (out[[0, 3]] != 0).any()


@pytest.mark.parametrize("scale", [1e-20, 1e15])
def test_rms_norm_of_tiny_and_large_rows(scale):
    reseed(2)
    x = randn(3, 64, scale=scale)
    x[1] = 0
    got = rms_norm(x, torch.ones(64, device=DEVICE), 1e-6, out=poisoned(3, 64))
    expected = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    assert (got[1] == 0).all() and error(got[[0, 2]], expected[[0, 2]]) <= 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
@examples(PER_DTYPE)
@given(n=st.integers(1, 3), nodes=st.integers(1, 5), width=WIDTHS, with_offset=st.booleans(), seed=st.integers(0, 2**20))
def test_anchor_operand_is_the_norm_beside_its_product_with_the_anchor(n, nodes, width, dtype, with_offset, seed):
    reseed(seed)
    norm = in_double(make_head(dtype, hidden_size=width, num_heads=1)).output_norm
    x, anchor = randn(n * nodes, width, dtype=dtype), randn(n, width + 3, dtype=dtype)[:, :width]
    offset = randn(width) if with_offset else None
    out = poisoned(n * nodes, 2 * width, dtype=dtype)
    anchor_operand(x, offset, norm.weight.detach().to(dtype), norm.eps, anchor, out)
    y = norm(x.double() + (0 if offset is None else offset.double()))
    product = (y.view(n, nodes, width) * anchor.double()[:, None]).view(-1, width)
    assert error(out, torch.cat((y, product), 1)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@examples(PER_DTYPE)
@given(n=st.integers(1, 3), nodes=st.integers(1, 5), width=WIDTHS, seed=st.integers(0, 2**20))
def test_bias_silu_adds_each_blocks_row(n, nodes, width, dtype, seed):
    reseed(seed)
    x, bias = randn(n * nodes, width, dtype=dtype, scale=3.0), randn(n, width + 5, dtype=dtype)[:, :width]
    expected = F.silu(x.double().view(n, nodes, width) + bias.double()[:, None]).view(-1, width)
    assert bias_silu(x, bias) is x
    assert error(x, expected) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@examples(PER_DTYPE)
@given(
    n=st.integers(1, 3), slots=st.integers(1, 5), topk=st.sampled_from([1, 2, 4, 8, 16]),
    widths=st.sampled_from([(48, 32), (32, 48), (1500, 40), (40, 1100), (48, 48)]), seed=st.integers(0, 2**20),
)  # fmt: skip
def test_nodes_are_the_references(n, slots, topk, widths, dtype, seed):
    """base + tokens token_proj^T + active down_proj^T, multiplied out in fp64, is the reference's node tensor."""
    reseed(seed)
    hidden, width = widths
    module = make_head(dtype, hidden=hidden, hidden_size=width, candidate_topk=topk, num_heads=1)
    head = in_double(module)
    table, hidden_rows = randn(50, hidden, dtype=dtype), randn(n, slots, hidden, dtype=dtype)
    ids = torch.randint(50, (n, slots, topk), device=DEVICE)
    log_probs = randn(n, slots, 20).log_softmax(-1).sort(-1, descending=True).values[..., :topk].contiguous()
    projected = hidden != width
    rows, dtype_out = n * slots * topk, {"dtype": dtype}
    operand = poisoned(rows, hidden + width, **dtype_out)
    tokens, active, base = operand[:, :hidden] if projected else None, operand[:, hidden:], poisoned(rows, width, **dtype_out)
    up = module.feature_mlp.up_proj
    features = FeatureWeights(module.feature_norm.weight.data, module.feature_norm.bias.data, up.weight.data.t().contiguous(), up.bias.data)
    with torch.no_grad():
        bias = head.feature_mlp.down_proj.bias + (head.token_proj.bias if projected else 0)
        positions = (head.slot_embedding[0, 0] + head.rank_embedding[0, 0] + bias).flatten(0, 1)
        states = head.pass_hidden_proj(hidden_rows.double()).flatten(0, 1)
        lattice_nodes(ids, log_probs, table, states.to(dtype), positions.to(dtype), features, tokens, active, base)
        got = base.double() + active.double() @ head.feature_mlp.down_proj.weight.t()
        if projected:
            assert torch.equal(tokens, table[ids.flatten()])
            got = got + tokens.double() @ head.token_proj.weight.t()
        expected = head.nodes(table.double()[ids], log_probs, hidden_rows.double()).flatten(0, 2)
    assert error(got, expected) <= TOLERANCE[dtype]


def test_nan_log_probabilities_stay_in_their_slot():
    reseed(3)
    n, slots, topk, width = 1, 3, 4, 32
    ids, log_probs = torch.zeros(n, slots, topk, dtype=torch.int64, device=DEVICE), -randn(n, slots, topk).abs()
    log_probs[0, 1, 2] = torch.nan
    features = FeatureWeights(randn(5), randn(5), randn(5, width), randn(width))
    active, base = poisoned(12, width), poisoned(12, width)
    lattice_nodes(ids, log_probs, randn(4, width), randn(3, width), randn(12, width), features, None, active, base)
    assert active[[0, 1, 2, 3, 8, 9, 10, 11]].isfinite().all() and base.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@examples(PER_DTYPE)
@given(
    n=st.integers(1, 3), nodes=st.integers(1, 50), widths=st.sampled_from([(8, 24), (130, 40), (48, 2100)]),
    kind=st.sampled_from(["plain", "norm", "norm silu", "add", "anchor"]), with_bias=st.booleans(), seed=st.integers(0, 2**20),
)  # fmt: skip
def test_fused_products_are_the_products_with_their_surroundings(n, nodes, widths, kind, with_bias, dtype, seed):
    reseed(seed)
    in_features, out_features = widths
    rows, fusion = n * nodes, kind == "anchor"
    x = randn(rows, in_features + 8, dtype=dtype)[:, :in_features]
    x[1:2] = 0
    weight = randn(out_features, in_features * (2 if fusion else 1), dtype=dtype, scale=in_features**-0.5)
    bias = randn(*([n, out_features] if fusion else [out_features]), dtype=dtype) if with_bias or fusion else None
    anchor = randn(n, in_features, dtype=dtype) if fusion else None
    norm = in_double(make_head(dtype, hidden_size=in_features, num_heads=1)).output_norm if kind[:4] == "norm" or fusion else None
    out = randn(rows, out_features, dtype=dtype) if kind == "add" else poisoned(rows, out_features, dtype=dtype)

    y = x.double() if norm is None else norm(x.double())
    if fusion:
        y = torch.cat((y, (y.view(n, nodes, -1) * anchor.double()[:, None]).view(rows, -1)), 1)
    y = y @ weight.double().t()
    if bias is not None:
        y = (y.view(n, nodes, -1) + bias.double()[:, None]).view(rows, -1) if fusion else y + bias.double()
    expected = F.silu(y) if "silu" in kind or fusion else y + out.double() if kind == "add" else y
    got = fused_linear(
        x, weight, bias, out, norm=None if norm is None else Norm(norm.weight.detach().to(dtype), norm.eps), anchor=anchor,
        silu="silu" in kind or fusion, add=kind == "add",
    )  # fmt: skip
    assert got is out and error(out, expected.detach()) <= TOLERANCE[dtype]


def test_arguments_that_do_not_fit_are_refused():
    x = torch.zeros(6, 8, device=DEVICE)
    with pytest.raises(ValueError, match=r"weight must have shape \[8\], got \[7\]"):
        rms_norm(x, torch.zeros(7, device=DEVICE), 1e-6)
    with pytest.raises(ValueError, match="contiguous rows of 4 blocks"):
        bias_silu(x, torch.zeros(4, 8, device=DEVICE))
    with pytest.raises(ValueError, match="no equal blocks of the 4 of bias"):
        fused_linear(x, torch.zeros(8, 8, device=DEVICE), torch.zeros(4, 8, device=DEVICE), x)
    with pytest.raises(ValueError, match="give norm too"):
        fused_linear(x, torch.zeros(8, 16, device=DEVICE), None, x, anchor=torch.zeros(2, 8, device=DEVICE))
    with pytest.raises(ValueError, match=r"out must have shape \[6, 16\], got \[6, 8\]"):
        anchor_operand(x, None, torch.zeros(8, device=DEVICE), 1e-6, torch.zeros(2, 8, device=DEVICE), x)
