"""The epilogue SiLU(x + bias), the bias one row or one row a block."""

from __future__ import annotations

import torch

from ._triton import ROWS, cdiv, check_shape, tl, triton, use_triton

_BLOCK = 1024


@triton.jit
def _bias_silu_kernel(x_ptr, bias_ptr, bias_stride, nodes, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    bias = tl.load(bias_ptr + (row // nodes)[:, None] * bias_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    at = x_ptr + row[:, None] * width + column[None, :]
    x = tl.load(at, mask=mask, other=0.0).to(tl.float32) + bias
    tl.store(at, (x * tl.sigmoid(x)).to(x_ptr.dtype.element_ty), mask=mask)


def _bias_silu_triton(x, bias):
    rows, width = x.shape
    nodes = rows // bias.shape[0]
    _bias_silu_kernel[(cdiv(rows, ROWS), cdiv(width, _BLOCK))](
        x, bias, bias.stride(0), nodes, rows, width, ROWS=ROWS, BLOCK=_BLOCK, num_warps=4
    )
    return x


def bias_silu_torch(x, bias):
    """`bias_silu` in torch operations."""
    blocks = x.view(bias.shape[0], -1, x.shape[1])
    torch.nn.functional.silu(blocks.add_(bias[:, None]), inplace=True)
    return x


def bias_silu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Returns x [n*L, W] overwritten with SiLU(x + bias), bias [n, W]: row r of x takes row r // L of bias (n = 1: one bias for all).

    Raises ValueError on shapes that do not fit or an x that is not contiguous.
    """
    check_shape("bias", bias, -1, x.shape[-1])
    check_shape("x", x, -1, bias.shape[1])
    if x.shape[0] % bias.shape[0] or not x.is_contiguous() or bias.stride(1) != 1:
        raise ValueError(f"x {list(x.shape)} must be contiguous rows of {bias.shape[0]} blocks")
    return (_bias_silu_triton if use_triton(x) else bias_silu_torch)(x, bias)
