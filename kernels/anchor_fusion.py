"""The operand of the anchor fusion: the tower's normed output beside its product with the anchor.

    g = SiLU( W_x x + W_a a + W_xa (x * a) + b )  =  SiLU( [x, x * a] [W_x | W_xa]^T + (W_a a + b) )        (paper, Appendix A)

The term of the anchor alone is one row a block and enters with the SiLU (`bias_silu`); nothing [.., 3W] is ever built, and the norm's
result is written once, where the product reads it.
"""

from __future__ import annotations

import torch

from ._triton import ROWS, cdiv, check_shape, next_power_of_2, tl, triton, use_triton
from .rms_norm import normalized_torch


@triton.jit
def _anchor_operand_kernel(
    x_ptr, offset_ptr, weight_ptr, eps, anchor_ptr, anchor_stride, out_ptr, nodes, rows, width,
    HAS_OFFSET: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    in_width = column < width
    mask = (row < rows)[:, None] & in_width[None, :]
    anchor_at = (row // nodes)[:, None] * anchor_stride + column[None, :]
    anchor = tl.load(anchor_ptr + anchor_at, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row[:, None] * width + column[None, :], mask=mask, other=0.0).to(tl.float32)
    if HAS_OFFSET:
        x += tl.load(offset_ptr + column, mask=in_width, other=0.0)[None, :]
    scale = tl.rsqrt(tl.sum(tl.where(mask, x * x, 0.0), axis=1) / width + eps)
    y = x * scale[:, None] * tl.load(weight_ptr + column, mask=in_width, other=0.0).to(tl.float32)[None, :]
    out_at = out_ptr + row[:, None] * 2 * width + column[None, :]
    tl.store(out_at, y.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(out_at + width, (y * anchor).to(out_ptr.dtype.element_ty), mask=mask)


def _anchor_operand_triton(x, offset, weight, eps, anchor, out):
    rows, width = x.shape
    block = next_power_of_2(width)
    _anchor_operand_kernel[(cdiv(rows, ROWS),)](
        x, x if offset is None else offset, weight, eps, anchor, anchor.stride(0), out, rows // anchor.shape[0], rows, width,
        HAS_OFFSET=offset is not None, ROWS=ROWS, BLOCK=block, num_warps=min(max(block // 256, 1), 8),
    )  # fmt: skip
    return out


def anchor_operand_torch(x, offset, weight, eps, anchor, out):
    """`anchor_operand` in torch operations."""
    n, width = anchor.shape
    left, right = out.view(n, -1, 2 * width).split(width, dim=-1)
    y = normalized_torch(x if offset is None else x + offset.to(x.dtype), weight, eps).view_as(left)
    left.copy_(y)
    right.copy_(y.mul_(anchor[:, None]))
    return out


def anchor_operand(
    x: torch.Tensor, offset: torch.Tensor | None, weight: torch.Tensor, eps: float, anchor: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """Returns `out` [n*L, 2W] filled with [y, y * a], y = RMSNorm(x + offset) * weight and a the row's block's anchor.

    x [n*L, W] contiguous; offset [W] float32 or None (`rms_norm`); weight [W]; anchor [n, W], rows at any stride; out contiguous.
    Raises ValueError on shapes that do not fit.
    """
    n, width = anchor.shape
    check_shape("x", x, -1, width)
    if offset is not None:
        check_shape("offset", offset, width)
    check_shape("weight", weight, width)
    check_shape("out", out, x.shape[0], 2 * width)
    if x.shape[0] % n or not (x.is_contiguous() and out.is_contiguous()):
        raise ValueError(f"x must be contiguous rows of {n} blocks and out contiguous, got x {list(x.shape)}, strides {x.stride()}")
    return (_anchor_operand_triton if use_triton(x) else anchor_operand_torch)(x, offset, weight, eps, anchor, out)
