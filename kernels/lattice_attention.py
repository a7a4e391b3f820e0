"""Attention over the whole lattice of one block, all S*K nodes at once, biased by slot distance; with its backward.

    out_i = sum_j softmax_j( q_i k_j / sqrt(hd) + relative[slot(i) - slot(j) + B - 1] + same * (slot(i) == slot(j)) ) v_j

120 nodes at the paper's settings: keys are one tile, so the softmax is not blocked. In float32 exact (ieee) dots need more registers and
shared memory than the smallest supported GPU has for that tile, so keys are taken in pieces with a running maximum; the one kernel
does both, a tile of all keys being one piece. The bias comes from the two small tables, never from a [heads, S*K, S*K] tensor. The head dimension and stride are compile-time constants of a model: the
compiler then knows how far loads are aligned when they are no multiple of 16.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from ._triton import cdiv, check_shape, dot, next_power_of_2, tl, triton, use_triton


class Tile(NamedTuple):
    """Queries and keys a program holds at once, and its warps. No software pipelining: there is one key tile, or few."""

    queries: int
    keys: int
    num_warps: int


def _tile(nodes: int, head_dim: int, dtype: torch.dtype, programs: int) -> Tile:
    """Returns the tile for `programs` (block, head) pairs: more programs with fewer queries each while the GPU would idle."""
    padded = max(next_power_of_2(nodes), 16)
    if dtype == torch.float32:
        return Tile(min(padded, 32), min(padded, 32), 8)
    return Tile(min(padded, 32 if programs < 64 else 64), min(padded, 128 if head_dim <= 128 else 64), 8)


def _backward_tile(nodes: int, head_dim: int, dtype: torch.dtype) -> Tile:
    padded = max(next_power_of_2(nodes), 16)
    return Tile(min(padded, 16), min(padded, 32), 8) if dtype == torch.float32 else Tile(min(padded, 32), min(padded, 64), 8)


@triton.jit
def _bias(relative_ptr, same, query_slot, key_slot, block_size, K: tl.constexpr):
    """relative[distance + B - 1] + same * (distance == 0), [QUERIES, KEYS], from the slots [QUERIES / K] and [KEYS / K] of a tile.

    Looked up once a pair of slots and repeated K x K times. Slots of padding may lie outside the table; they are clamped.
    """
    distance = query_slot[:, None] - key_slot[None, :]
    index = tl.minimum(tl.maximum(distance + block_size - 1, 0), 2 * block_size - 2)
    bias = tl.load(relative_ptr + index).to(tl.float32) + tl.where(distance == 0, same, 0.0)
    rows: tl.constexpr = bias.shape[0]
    columns: tl.constexpr = bias.shape[1]
    bias = tl.broadcast_to(bias[:, None, :, None], [rows, K, columns, K])
    return tl.reshape(bias, [rows * K, columns * K])


@triton.jit
def _attention_kernel(
    q_ptr, k_ptr, v_ptr, block_stride, node_stride, head_stride: tl.constexpr, relative_ptr, same_ptr, out_ptr, lse_ptr,
    nodes, heads, head_dim: tl.constexpr, block_size, scale,
    K: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, HEAD: tl.constexpr, PRECISION: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    block, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    offset = block * block_stride + head * head_stride
    row, column = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES), tl.arange(0, HEAD)
    q_mask = (row[:, None] < nodes) & (column[None, :] < head_dim)
    q = tl.load(q_ptr + offset + row[:, None] * node_stride + column[None, :], mask=q_mask, other=0.0)
    relative_ptr += head * (2 * block_size - 1)
    same = tl.load(same_ptr + head).to(tl.float32)
    query_slot = tl.program_id(1) * (QUERIES // K) + tl.arange(0, QUERIES // K)

    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, HEAD], tl.float32)
    for start in range(0, nodes, KEYS):
        key = start + tl.arange(0, KEYS)
        mask = (key[:, None] < nodes) & (column[None, :] < head_dim)
        at = offset + key[:, None] * node_stride + column[None, :]
        k = tl.load(k_ptr + at, mask=mask, other=0.0)
        v = tl.load(v_ptr + at, mask=mask, other=0.0)
        s = dot(q, tl.trans(k), PRECISION) * scale
        s += _bias(relative_ptr, same, query_slot, start // K + tl.arange(0, KEYS // K), block_size, K)
        s = tl.where(key[None, :] < nodes, s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, axis=1))
        p = tl.exp(s - new_top[:, None])
        decay = tl.exp(top - new_top)
        total = total * decay + tl.sum(p, axis=1)
        acc = acc * decay[:, None] + dot(p.to(v.dtype), v, PRECISION)
        top = new_top
    acc = acc / total[:, None]
    at = (block * nodes + row[:, None]) * (heads * head_dim) + head * head_dim + column[None, :]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=q_mask)
    if HAS_LSE:
        tl.store(lse_ptr + (block * heads + head) * nodes + row, top + tl.log(total), mask=row < nodes)


@triton.jit
def _backward_query_kernel(
    q_ptr, k_ptr, v_ptr, block_stride, node_stride, head_stride: tl.constexpr, relative_ptr, same_ptr, out_ptr, lse_ptr, grad_ptr,
    grad_q_ptr, delta_ptr, slot_grad_ptr, nodes, heads, head_dim: tl.constexpr, block_size, scale, slots,
    K: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, HEAD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient of the queries, delta_i = <out_i, grad_i>, and each (slot, slot) cell's sum of score gradients."""
    block, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    offset = block * block_stride + head * head_stride
    row, column = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES), tl.arange(0, HEAD)
    q_mask = (row[:, None] < nodes) & (column[None, :] < head_dim)
    q = tl.load(q_ptr + offset + row[:, None] * node_stride + column[None, :], mask=q_mask, other=0.0)
    out_at = (block * nodes + row[:, None]) * (heads * head_dim) + head * head_dim + column[None, :]
    grad = tl.load(grad_ptr + out_at, mask=q_mask, other=0.0)
    out = tl.load(out_ptr + out_at, mask=q_mask, other=0.0)
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), axis=1)
    per_row = (block * heads + head) * nodes + row
    tl.store(delta_ptr + per_row, delta, mask=row < nodes)
    lse = tl.load(lse_ptr + per_row, mask=row < nodes, other=0.0)
    relative_ptr += head * (2 * block_size - 1)
    same = tl.load(same_ptr + head).to(tl.float32)
    from_slot = tl.program_id(1) * (QUERIES // K) + tl.arange(0, QUERIES // K)

    acc = tl.zeros([QUERIES, HEAD], tl.float32)
    for start in range(0, nodes, KEYS):
        key = start + tl.arange(0, KEYS)
        mask = (key[:, None] < nodes) & (column[None, :] < head_dim)
        at = offset + key[:, None] * node_stride + column[None, :]
        k = tl.load(k_ptr + at, mask=mask, other=0.0)
        v = tl.load(v_ptr + at, mask=mask, other=0.0)
        s = dot(q, tl.trans(k), PRECISION) * scale
        to_slot = start // K + tl.arange(0, KEYS // K)
        s += _bias(relative_ptr, same, from_slot, to_slot, block_size, K)
        p = tl.where((row[:, None] < nodes) & (key[None, :] < nodes), tl.exp(s - lse[:, None]), 0.0)
        ds = p * (dot(grad, tl.trans(v), PRECISION) - delta[:, None])
        acc += dot(ds.to(k.dtype), k, PRECISION)
        # Nodes of a slot are neighbours and tiles hold whole slots, so a cell is a K x K patch of exactly one tile.
        cells = tl.sum(tl.reshape(ds, [QUERIES, KEYS // K, K]), axis=2)
        cells = tl.sum(tl.reshape(cells, [QUERIES // K, K, KEYS // K]), axis=1)
        cell_at = ((block * heads + head) * slots + from_slot[:, None]) * slots + to_slot[None, :]
        tl.store(slot_grad_ptr + cell_at, cells, mask=(from_slot[:, None] < slots) & (to_slot[None, :] < slots))
    tl.store(grad_q_ptr + out_at, (acc * scale).to(grad_q_ptr.dtype.element_ty), mask=q_mask)


@triton.jit
def _backward_key_kernel(
    q_ptr, k_ptr, v_ptr, block_stride, node_stride, head_stride: tl.constexpr, relative_ptr, same_ptr, lse_ptr, grad_ptr, delta_ptr,
    grad_k_ptr, grad_v_ptr, nodes, heads, head_dim: tl.constexpr, block_size, scale,
    K: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, HEAD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of the keys and values."""
    block, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    offset = block * block_stride + head * head_stride
    key, column = tl.program_id(1) * KEYS + tl.arange(0, KEYS), tl.arange(0, HEAD)
    k_mask = (key[:, None] < nodes) & (column[None, :] < head_dim)
    at = offset + key[:, None] * node_stride + column[None, :]
    k = tl.load(k_ptr + at, mask=k_mask, other=0.0)
    v = tl.load(v_ptr + at, mask=k_mask, other=0.0)
    relative_ptr += head * (2 * block_size - 1)
    same = tl.load(same_ptr + head).to(tl.float32)
    key_slot = tl.program_id(1) * (KEYS // K) + tl.arange(0, KEYS // K)

    acc_k = tl.zeros([KEYS, HEAD], tl.float32)
    acc_v = tl.zeros([KEYS, HEAD], tl.float32)
    for start in range(0, nodes, QUERIES):
        row = start + tl.arange(0, QUERIES)
        mask = (row[:, None] < nodes) & (column[None, :] < head_dim)
        q = tl.load(q_ptr + offset + row[:, None] * node_stride + column[None, :], mask=mask, other=0.0)
        out_at = (block * nodes + row[:, None]) * (heads * head_dim) + head * head_dim + column[None, :]
        grad = tl.load(grad_ptr + out_at, mask=mask, other=0.0)
        per_row = (block * heads + head) * nodes + row
        lse = tl.load(lse_ptr + per_row, mask=row < nodes, other=0.0)
        delta = tl.load(delta_ptr + per_row, mask=row < nodes, other=0.0)
        s = dot(q, tl.trans(k), PRECISION) * scale
        s += _bias(relative_ptr, same, start // K + tl.arange(0, QUERIES // K), key_slot, block_size, K)
        p = tl.where((row[:, None] < nodes) & (key[None, :] < nodes), tl.exp(s - lse[:, None]), 0.0)
        ds = p * (dot(grad, tl.trans(v), PRECISION) - delta[:, None])
        acc_v += dot(tl.trans(p.to(grad.dtype)), grad, PRECISION)
        acc_k += dot(tl.trans(ds.to(q.dtype)), q, PRECISION)
    out_at = (block * nodes + key[:, None]) * (heads * head_dim) + head * head_dim + column[None, :]
    tl.store(grad_k_ptr + out_at, (acc_k * scale).to(grad_k_ptr.dtype.element_ty), mask=k_mask)
    tl.store(grad_v_ptr + out_at, acc_v.to(grad_v_ptr.dtype.element_ty), mask=k_mask)


def _precision(dtype: torch.dtype) -> str:
    return "ieee" if dtype == torch.float32 else "tf32"  # has a meaning for float32 operands only


def _strides(q, k, v) -> tuple[int, int, int]:
    if not (q.stride() == k.stride() == v.stride()) or q.stride(3) != 1:
        raise ValueError(f"q, k and v must lie alike in memory, head_dim contiguous, got strides {q.stride()}, {k.stride()}, {v.stride()}")
    return q.stride(0), q.stride(1), q.stride(2)


def _attention_triton(q, k, v, relative, same, topk, out=None, lse=None):
    n, nodes, heads, head_dim = q.shape
    if out is None:
        out = torch.empty(n, nodes, heads, head_dim, dtype=q.dtype, device=q.device)
    tile = _tile(nodes, head_dim, q.dtype, n * heads)
    _attention_kernel[(n * heads, cdiv(nodes, tile.queries))](
        q, k, v, *_strides(q, k, v), relative, same, out, out if lse is None else lse,
        nodes, heads, head_dim, (relative.shape[1] + 1) // 2, head_dim**-0.5,
        K=topk, QUERIES=tile.queries, KEYS=tile.keys, HEAD=max(next_power_of_2(head_dim), 16), PRECISION=_precision(q.dtype),
        HAS_LSE=lse is not None, num_warps=tile.num_warps, num_stages=1,
    )  # fmt: skip
    return out


class _LatticeAttention(torch.autograd.Function):
    """The kernels' forward and backward; deterministic, for nothing is accumulated by two programs."""

    @staticmethod
    def forward(ctx, q, k, v, relative, same, topk):
        n, nodes, heads, _ = q.shape
        lse = torch.empty(n, heads, nodes, dtype=torch.float32, device=q.device)
        out = _attention_triton(q, k, v, relative, same, topk, lse=lse)
        ctx.save_for_backward(q, k, v, relative, same, out, lse)
        ctx.topk = topk
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        q, k, v, relative, same, out, lse = ctx.saved_tensors
        topk, grad = ctx.topk, grad.contiguous()
        n, nodes, heads, head_dim = q.shape
        slots, block_size = nodes // topk, (relative.shape[1] + 1) // 2
        grad_q, grad_k, grad_v = (torch.empty_like(out) for _ in range(3))
        delta = torch.empty_like(lse)
        cells = torch.empty(n, heads, slots, slots, dtype=torch.float32, device=q.device)
        tile = _backward_tile(nodes, head_dim, q.dtype)
        shape = (nodes, heads, head_dim, block_size, head_dim**-0.5)
        options = dict(
            K=topk, QUERIES=tile.queries, KEYS=tile.keys, HEAD=max(next_power_of_2(head_dim), 16),
            PRECISION=_precision(q.dtype), num_warps=tile.num_warps, num_stages=1,
        )  # fmt: skip
        _backward_query_kernel[(n * heads, cdiv(nodes, tile.queries))](
            q, k, v, *_strides(q, k, v), relative, same, out, lse, grad, grad_q, delta, cells, *shape, slots, **options
        )
        _backward_key_kernel[(n * heads, cdiv(nodes, tile.keys))](
            q, k, v, *_strides(q, k, v), relative, same, lse, grad, delta, grad_k, grad_v, *shape, **options
        )
        cells = cells.sum(0)
        # Sums along the diagonals, as a product with their indicator: index_add would be order-dependent on the device.
        distance = _distance(slots, 1, q.device) + block_size - 1
        on_diagonal = torch.nn.functional.one_hot(distance.flatten(), relative.shape[1]).to(cells.dtype)
        grad_relative = (cells.flatten(1) @ on_diagonal).to(relative.dtype)
        grad_same = cells.diagonal(dim1=1, dim2=2).sum(-1).to(same.dtype)
        return grad_q, grad_k, grad_v, grad_relative, grad_same, None


@functools.lru_cache(maxsize=64)
def _distance(slots: int, topk: int, device: torch.device) -> torch.Tensor:
    """Returns slot(i) - slot(j) of all nodes [S*K, S*K]; a constant, made once per shape."""
    with torch.inference_mode(False):  # an inference tensor could not be saved for a backward later
        slot = torch.arange(slots, device=device).repeat_interleave(topk)
        return slot[:, None] - slot[None, :]


def lattice_bias(relative_slot_bias: torch.Tensor, same_slot_bias: torch.Tensor, slots: int, topk: int) -> torch.Tensor:
    """Returns what is added to the attention's logits, [1, heads, S*K, S*K]: relative_slot_bias[slot(i) - slot(j)], and same_slot_bias
    within a slot."""
    block_size = (relative_slot_bias.shape[1] + 1) // 2
    distance = _distance(slots, topk, relative_slot_bias.device)
    # A mask of four dimensions takes the fused path on the CPU, one of three the unfused.
    return (relative_slot_bias[:, distance + block_size - 1] + same_slot_bias[:, None, None] * (distance == 0))[None]


def attend_torch(q, k, v, bias, out=None):
    """`lattice_attention` in torch operations, of a `lattice_bias` that is at hand already."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype)).transpose(1, 2)
    return attended.contiguous() if out is None else out.copy_(attended)


def lattice_attention_torch(q, k, v, relative_slot_bias, same_slot_bias, topk, out=None):
    """`lattice_attention` in torch operations (autograd differentiates them)."""
    return attend_torch(q, k, v, lattice_bias(relative_slot_bias, same_slot_bias, q.shape[1] // topk, topk), out)


def lattice_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    relative_slot_bias: torch.Tensor,
    same_slot_bias: torch.Tensor,
    topk: int,
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the attended values [N, S*K, heads, hd] of every node over all nodes of its block, softmax in float32.

    q, k, v [N, S*K, heads, hd], alike in memory (views of one qkv tensor), nodes slot-major with `topk` candidates a slot;
    relative_slot_bias [heads, 2B-1] and same_slot_bias [heads], contiguous. Differentiable in all five when `out` is not given.
    `bias` is the two tables' `lattice_bias`, for a caller who makes it once: the kernel adds the tables themselves.
    Raises ValueError on shapes that do not fit, among them S > B. The tower's attention of the paper, Appendix A.
    """
    n, nodes, heads, head_dim = q.shape
    check_shape("k", k, *q.shape)
    check_shape("v", v, *q.shape)
    check_shape("relative_slot_bias", relative_slot_bias, heads, -1)
    check_shape("same_slot_bias", same_slot_bias, heads)
    block_size = (relative_slot_bias.shape[1] + 1) // 2
    if topk not in (1, 2, 4, 8, 16) or nodes % topk or nodes // topk > block_size:
        raise ValueError(f"{nodes} nodes are no 1..{block_size} slots of {topk} candidates (a power of two, at most 16)")
    if not use_triton(q):
        return attend_torch(q, k, v, lattice_bias(relative_slot_bias, same_slot_bias, nodes // topk, topk) if bias is None else bias, out)
    inputs = (q, k, v, relative_slot_bias, same_slot_bias)
    if out is None and torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        return _LatticeAttention.apply(*inputs, topk)
    return _attention_triton(*inputs, topk, out)
