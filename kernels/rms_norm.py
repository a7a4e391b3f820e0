"""RMSNorm of the residual stream, with the biases the stream still lacks added on the way in.

The tower's residual stream is kept without the biases of the projections that write to it: the projections then add to it inside the
matrix product itself, and each norm adds the sum of the biases so far (`offset`, a constant of the weights). That is the residual
addition, the bias and the norm in one launch and one read of the stream.
"""

from __future__ import annotations

import functools

import torch

from ._triton import ROWS, cdiv, check_shape, next_power_of_2, tl, triton, use_triton


@triton.jit
def _rms_norm_kernel(
    x_ptr, x_stride, offset_ptr, valid_ptr, weight_ptr, eps, out_ptr, out_stride, rows, width,
    HAS_OFFSET: tl.constexpr, HAS_VALID: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    in_width = column < width
    mask = (row < rows)[:, None] & in_width[None, :]
    x = tl.load(x_ptr + row[:, None] * x_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    if HAS_OFFSET:
        x += tl.load(offset_ptr + column, mask=in_width, other=0.0)[None, :]
    if HAS_VALID:
        # Selected, not multiplied: the row may hold NaN.
        x = tl.where((tl.load(valid_ptr + row, mask=row < rows, other=0) != 0)[:, None], x, 0.0)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / width + eps)
    y = x * scale[:, None] * tl.load(weight_ptr + column, mask=in_width, other=0.0).to(tl.float32)[None, :]
    tl.store(out_ptr + row[:, None] * out_stride + column[None, :], y.to(out_ptr.dtype.element_ty), mask=mask)


def _rms_norm_triton(x, weight, eps, offset, valid, out):
    n, width = x.shape
    block = next_power_of_2(width)
    _rms_norm_kernel[(cdiv(n, ROWS),)](
        x, x.stride(0), x if offset is None else offset, x if valid is None else valid, weight, eps, out, out.stride(0), n, width,
        HAS_OFFSET=offset is not None, HAS_VALID=valid is not None, ROWS=ROWS, BLOCK=block, num_warps=min(max(block // 256, 1), 8),
    )  # fmt: skip
    return out


@functools.lru_cache(maxsize=64)
def _scalar(value: float, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.tensor(value, device=device)


def normalized_torch(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Returns RMSNorm(x) * weight in float32: x / hypot(|x|, sqrt(W eps)) * sqrt(W) * weight.

    Of a single block's rows, what an operation costs is its start, and torch's own rms_norm makes one for each arithmetic step.
    """
    wide, width = x.float(), x.shape[-1]
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).hypot_(_scalar((width * eps) ** 0.5, x.device)).mul_(width**-0.5)
    return (torch.div(wide, norm) if wide is x else wide.div_(norm)).mul_(weight)


def rms_norm_torch(x, weight, eps, offset=None, valid=None, out=None):
    """`rms_norm` in torch operations."""
    if offset is not None:
        x = x + offset.to(x.dtype)
    if valid is not None:
        x = torch.where(valid[:, None], x, 0.0)
    y = normalized_torch(x, weight, eps)
    return y.to(x.dtype) if out is None else out.copy_(y)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    offset: torch.Tensor | None = None,
    valid: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns RMSNorm(x + offset) * weight, [n, W] in x's dtype, computed in float32.

    x [n, W], rows at any stride; weight [W]; offset [W] float32, the biases x lacks; valid [n] bool: a row where it is False counts as zeros,
    whatever it holds, and comes out zero. Raises ValueError on shapes that do not fit.
    """
    check_shape("x", x, -1, -1)
    check_shape("weight", weight, x.shape[1])
    if offset is not None:
        check_shape("offset", offset, x.shape[1])
    if valid is not None:
        check_shape("valid", valid, x.shape[0])
    if out is not None:
        check_shape("out", out, *x.shape)
    if not use_triton(x):
        return rms_norm_torch(x, weight, eps, offset, valid, out)
    return _rms_norm_triton(x, weight, eps, offset, valid, torch.empty_like(x) if out is None else out)
