"""The lattice attention against the reference's bias and exact attention, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from vllm_lilicorr.kernels.lattice_attention import lattice_attention, lattice_attention_torch

from .conftest import DEVICE, DTYPES, MODE, PER_DTYPE, TOLERANCE, error, examples, in_double, make_head, poisoned, randn, reseed

GEOMETRIES = st.tuples(st.integers(1, 15), st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([1, 2, 4]), st.sampled_from([4, 12, 16, 72]))


def inputs(n, slots, topk, heads, head_dim, dtype, block_size=16):
    """Return q, k, v as views of one projection's output, and the two tables of a head."""
    head = make_head(dtype, candidate_topk=topk, hidden_size=heads * head_dim, num_heads=heads, block_size=block_size)
    q, k, v = randn(n, slots * topk, 3, heads, head_dim, dtype=dtype).unbind(2)
    return head, q, k, v


def reference(head, q, k, v, slots):
    bias = in_double(head).attention_bias(slots)
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None]).transpose(1, 2)


@pytest.mark.parametrize("dtype", DTYPES)
@examples(PER_DTYPE)
@given(n=st.integers(1, 3), geometry=GEOMETRIES, seed=st.integers(0, 2**20))
def test_forward_is_the_references(n, geometry, dtype, seed):
    slots, topk, heads, head_dim = geometry
    if MODE == "interpreter":
        n, slots = 1, min(slots, 64 // topk)
    reseed(seed)
    head, q, k, v = inputs(n, slots, topk, heads, head_dim, dtype)
    out = poisoned(*q.shape, dtype=dtype)
    with torch.no_grad():
        got = lattice_attention(q, k, v, head.relative_slot_bias, head.same_slot_bias, topk, out)
        assert got is out
        assert error(out, reference(head, q, k, v, slots)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_papers_geometry(dtype):
    """120 nodes, head dimension 128: one key tile in half precision, several in float32."""
    reseed(1)
    head, q, k, v = inputs(1, 15, 8, 2, 128, dtype)
    with torch.no_grad():
        got = lattice_attention(q, k, v, head.relative_slot_bias, head.same_slot_bias, 8)
        assert error(got, reference(head, q, k, v, 15)) <= TOLERANCE[dtype]


def test_a_large_batch_takes_the_large_tile():
    reseed(2)
    head, q, k, v = inputs(3, 15, 4, 24, 4, torch.bfloat16)  # 72 (block, head) pairs
    with torch.no_grad():
        got = lattice_attention(q, k, v, head.relative_slot_bias, head.same_slot_bias, 4)
        assert error(got, reference(head, q, k, v, 15)) <= TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("scale", [0.0, 1e4])
def test_uniform_and_one_hot_attention(scale):
    """All scores equal, and scores so far apart that every softmax is one-hot."""
    reseed(3)
    head, q, k, v = inputs(2, 4, 4, 2, 16, torch.float32)
    head.relative_slot_bias.data.zero_()
    head.same_slot_bias.data.zero_()
    q.mul_(scale)
    with torch.no_grad():
        got = lattice_attention(q, k, v, head.relative_slot_bias, head.same_slot_bias, 4)
        assert error(got, reference(head, q, k, v, 4)) <= 1e-5


def test_nan_stays_in_its_block():
    reseed(4)
    head, q, k, v = inputs(3, 3, 4, 2, 16, torch.float32)
    with torch.no_grad():
        clean = lattice_attention(q, k, v, head.relative_slot_bias, head.same_slot_bias, 4)
        q[1, 5] = torch.nan
        got = lattice_attention(q, k, v, head.relative_slot_bias, head.same_slot_bias, 4)
    assert torch.equal(got[::2], clean[::2]) and got[1, 5].isnan().all()


def test_the_same_input_gives_the_same_bits():
    reseed(5)
    head, q, k, v = inputs(2, 5, 8, 2, 16, torch.float32)
    first, second = [], []
    for grads in (first, second):
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v, head.relative_slot_bias, head.same_slot_bias)]
        lattice_attention(*leaves, 8).square().sum().backward()
        grads += [x.grad for x in leaves]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@examples((PER_DTYPE + 1) // 2)
@given(n=st.integers(1, 2), geometry=GEOMETRIES, seed=st.integers(0, 2**20))
def test_backward_is_the_references(n, geometry, dtype, seed):
    slots, topk, heads, head_dim = geometry
    if MODE == "interpreter":
        n, slots = 1, min(slots, 32 // topk)
    reseed(seed)
    head, q, k, v = inputs(n, slots, topk, heads, head_dim, dtype)
    tables = (head.relative_slot_bias, head.same_slot_bias)
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v, *tables)]
    wide = [x.detach().double().requires_grad_() for x in (q, k, v, *tables)]
    got = lattice_attention(*leaves, topk)
    expected = lattice_attention_torch(*wide, topk)
    assert error(got, expected) <= TOLERANCE[dtype]
    grad = torch.randn_like(expected)
    got.backward(grad.to(dtype))
    expected.backward(grad)
    largest = max(x.grad.norm().item() for x in wide)
    # A gradient that is zero but for rounding is measured against the others: of q and k, with one node; and of the tables, with one slot
    # (a softmax does not see what is added to all scores), whose terms cancel where half precision has rounded each.
    floor = 5e-2 if slots == 1 and dtype != torch.float32 else 1e-3
    for ours, theirs in zip(leaves, wide, strict=True):
        scale = max(theirs.grad.norm().item(), floor * largest)
        assert (ours.grad.double() - theirs.grad).norm().item() <= 2 * TOLERANCE[dtype] * scale


@pytest.mark.skipif(MODE != "torch", reason="fp64 has no kernel; the kernels' gradients are compared with these")
def test_the_twin_passes_gradcheck():
    reseed(6)
    q, k, v = (torch.randn(2, 6, 2, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    relative, same = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 9), (2,)))
    assert torch.autograd.gradcheck(lambda *leaves: lattice_attention(*leaves, 2), (q, k, v, relative, same))


@pytest.mark.parametrize(
    ("nodes", "topk", "message"),
    [(12, 5, "are no 1..16 slots of 5 candidates"), (13, 4, "are no 1..16 slots of 4"), (68, 4, "are no 1..16 slots of 4")],
)
def test_nodes_that_are_no_slots_are_refused(nodes, topk, message):
    q = torch.zeros(1, nodes, 2, 8, device=DEVICE)
    with pytest.raises(ValueError, match=message):
        lattice_attention(q, q, q, torch.zeros(2, 31, device=DEVICE), torch.zeros(2, device=DEVICE), topk)
