"""Matrix products of few rows with what surrounds them in the same launch: RMSNorm before, bias, SiLU or residual after; the anchor fusion.

    y = act( RMSNorm(x) W^T + b )                                           RMSNorm's scale is one number a row and leaves the sum:
    y = y + x W^T + b                                                       the products are of x * weight, the epilogue scales
    y = SiLU( RMSNorm(x) W_x^T + (RMSNorm(x) * a) W_xa^T + row )            the anchor fusion, row = W_a a + b

At one block a product is 120 rows: its time is latency and the streaming of its weights, and each launch saved around it counts as much as
itself. Tiles are small so that every multiprocessor has one. With many rows the libraries' large tiles read less, and win.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ._triton import cdiv, check_shape, dot, next_power_of_2, tl, triton, use_triton
from .rms_norm import normalized_torch


class Norm(NamedTuple):
    """RMSNorm's weight [in] and eps."""

    weight: torch.Tensor
    eps: float


@triton.jit
def _fused_linear_kernel(
    x_ptr, x_stride, norm_ptr, eps, weight_ptr, weight_stride, bias_ptr, bias_stride, anchor_ptr, anchor_stride, out_ptr, out_stride,
    rows, in_features, out_features, nodes,
    NORM: tl.constexpr, ANCHOR: tl.constexpr, SILU: tl.constexpr, ADD: tl.constexpr, HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, INNER)
    real_row, real_column = row < rows, column < out_features
    block = row // nodes
    x_at = x_ptr + row.to(tl.int64)[:, None] * x_stride + inner[None, :]
    weight_at = weight_ptr + column.to(tl.int64)[:, None] * weight_stride + inner[None, :]
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    for start in range(0, in_features, INNER):
        real = start + inner < in_features
        x = tl.load(x_at + start, mask=real_row[:, None] & real[None, :], other=0.0)
        weight = tl.load(weight_at + start, mask=real_column[:, None] & real[None, :], other=0.0)
        dtype = weight.dtype
        if NORM:
            wide = x.to(tl.float32)
            squares += tl.sum(wide * wide, axis=1)
            wide *= tl.load(norm_ptr + start + inner, mask=real, other=0.0).to(tl.float32)[None, :]
            x = wide.to(dtype)
        acc += dot(x, tl.trans(weight), PRECISION)
        if ANCHOR:
            anchor_at = anchor_ptr + block.to(tl.int64)[:, None] * anchor_stride + start + inner[None, :]
            anchor = tl.load(anchor_at, mask=real_row[:, None] & real[None, :], other=0.0).to(tl.float32)
            weight = tl.load(weight_at + in_features + start, mask=real_column[:, None] & real[None, :], other=0.0)
            acc += dot((wide * anchor).to(dtype), tl.trans(weight), PRECISION)
    if NORM:
        acc *= tl.rsqrt(squares / in_features + eps)[:, None]
    mask = real_row[:, None] & real_column[None, :]
    if HAS_BIAS:
        bias_at = bias_ptr + block.to(tl.int64)[:, None] * bias_stride + column[None, :]
        acc += tl.load(bias_at, mask=mask, other=0.0).to(tl.float32)
    if SILU:
        acc = acc * tl.sigmoid(acc)
    out_at = out_ptr + row.to(tl.int64)[:, None] * out_stride + column[None, :]
    if ADD:
        acc += tl.load(out_at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=mask)


def _fused_linear_triton(x, weight, bias, norm, anchor, silu, add, out):
    rows, in_features = x.shape
    half = x.dtype != torch.float32
    tile = min(32, max(16, next_power_of_2(rows)))
    columns = 64 if half and out.shape[1] > 2048 else 32
    inner = (128 if anchor is None else 64) if half else 32  # the fusion holds two weight tiles and the anchor's
    per_block = bias is not None and bias.ndim == 2
    blocks = anchor.shape[0] if anchor is not None else bias.shape[0] if per_block else 1
    _fused_linear_kernel[(cdiv(out.shape[1], columns), cdiv(rows, tile))](
        x, x.stride(0), x if norm is None else norm.weight, 0.0 if norm is None else norm.eps, weight, weight.stride(0),
        x if bias is None else bias, bias.stride(0) if per_block else 0, x if anchor is None else anchor,
        0 if anchor is None else anchor.stride(0), out, out.stride(0), rows, in_features, out.shape[1], rows // blocks,
        NORM=norm is not None, ANCHOR=anchor is not None, SILU=silu, ADD=add, HAS_BIAS=bias is not None,
        PRECISION="tf32" if half else "ieee", ROWS=tile, COLUMNS=columns, INNER=inner, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


def fused_linear_torch(x, weight, bias, norm, anchor, silu, add, out):
    """`fused_linear` in torch operations."""
    if norm is not None:
        x = normalized_torch(x, *norm).to(weight.dtype)
    if anchor is not None:
        blocks = x.view(anchor.shape[0], -1, x.shape[1])
        x = torch.cat((blocks, blocks * anchor[:, None]), dim=-1).flatten(0, 1)
    y = torch.nn.functional.linear(x, weight)
    if bias is not None:
        y = y + bias.repeat_interleave(len(y) // len(bias), dim=0) if bias.ndim == 2 else y + bias
    if silu:
        y = torch.nn.functional.silu(y)
    return out.add_(y) if add else out.copy_(y)


def fused_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *,
    norm: Norm | None = None,
    anchor: torch.Tensor | None = None,
    silu: bool = False,
    add: bool = False,
) -> torch.Tensor:
    """Returns `out` [rows, out], set to (`add`: increased by) x W^T + bias, [rows, in] times [out, in], with these around it:

    norm      x is RMSNormed first
    anchor    [N, in]: weight is [out, 2 in] = [W_x | W_xa], and (x * the row's block's anchor) W_xa^T is added; needs norm
    bias      [out], or [N, out], one row a block
    silu      SiLU after the bias
    Sums are float32. Raises ValueError on shapes that do not fit.
    """
    rows, in_features = x.shape
    check_shape("weight", weight, -1, in_features * (1 if anchor is None else 2))
    check_shape("out", out, rows, weight.shape[0])
    if bias is not None:
        check_shape("bias", bias, *([weight.shape[0]] if bias.ndim == 1 else [-1, weight.shape[0]]))
    if norm is not None:
        check_shape("norm.weight", norm.weight, in_features)
    if anchor is not None:
        check_shape("anchor", anchor, -1, in_features)
        if norm is None:
            raise ValueError("the anchor fusion is of a normed x: give norm too")
    for name, tensor in {"bias": bias, "anchor": anchor}.items():
        if tensor is not None and tensor.ndim == 2 and rows % tensor.shape[0]:
            raise ValueError(f"x has {rows} rows, which are no equal blocks of the {tensor.shape[0]} of {name}")
    if anchor is not None and bias is not None and bias.ndim == 2 and len(bias) != len(anchor):
        raise ValueError(f"anchor and bias must have a row a block each, got {len(anchor)} and {len(bias)}")
    run = _fused_linear_triton if use_triton(x) else fused_linear_torch
    return run(x, weight, bias, norm, anchor, silu, add, out)
