"""The most probable token of a slot over the whole vocabulary, its logits corrected by a product of low rank, in one launch.

    scores = logits + x W^T        x [N, r] as given, or the rows that the tokens of the slot before have in a table        (SPEC 7)

What DSpark and Domino do once a slot. A program takes a tile of the vocabulary, multiplies, adds and keeps the best of each row as one
64-bit key of value and id (`topk_logprobs`); the maximum of integers is the same in whatever order the programs arrive, and the last of
them hands the tokens out. The scores reach memory only where somebody draws from them. The product stays here however many rows there
are: at r = 256 a library's would write and read back [N, V], which takes as long as multiplying.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ._triton import INTERPRETED, cdiv, check_shape, dot, next_power_of_2, tl, triton, use_triton
from .topk_logprobs import _pack, _unpack

_LOWEST = -(2**63) + 1  # below every key
_LEAST_ROWS, _MOST_ROWS = 16, 64  # of a tile


class Correction(NamedTuple):
    """What is added to logits [N, V]: x weight^T with weight [V, r] and x [N, r], or, with ids [N] int64, x[ids]."""

    x: torch.Tensor
    weight: torch.Tensor
    ids: torch.Tensor | None = None


class Best(NamedTuple):
    """Workspace of up to as many rows as keys [n] int64 has; as `empty` makes it before the first call, and after each."""

    keys: torch.Tensor
    arrivals: torch.Tensor

    @classmethod
    def empty(cls, n: int, device: torch.device | str | None = None) -> Best:
        """Returns the workspace of calls with up to n rows."""
        keys = torch.full((n,), _LOWEST, dtype=torch.int64, device=device)
        return cls(keys, torch.zeros(cdiv(n, _LEAST_ROWS), dtype=torch.int32, device=device))


@triton.jit
def _corrected_argmax_kernel(
    logits_ptr, logits_stride, x_ptr, x_stride, ids_ptr, ids_stride, weight_ptr, weight_stride, withheld_ptr, null_token,
    tokens_ptr, tokens_stride, scores_ptr, scores_stride, keys_ptr, arrivals_ptr, rows, rank, vocab_size,
    CORRECTED: tl.constexpr, GATHERED: tl.constexpr, HAS_WITHHELD: tl.constexpr, HAS_SCORES: tl.constexpr, LOWEST: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    # The rows' tiles run first: they share a tile of the weight.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column, inner = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, INNER)
    real_row, real_column = row < rows, column < vocab_size
    mask = real_row[:, None] & real_column[None, :]
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    if CORRECTED:
        source = row
        if GATHERED:
            source = tl.load(ids_ptr + row * ids_stride, mask=real_row, other=0)
        x_at = x_ptr + source[:, None] * x_stride + inner[None, :]
        weight_at = weight_ptr + column.to(tl.int64)[:, None] * weight_stride + inner[None, :]
        for start in range(0, rank, INNER):
            real = start + inner < rank
            x = tl.load(x_at + start, mask=real_row[:, None] & real[None, :], other=0.0)
            weight = tl.load(weight_at + start, mask=real_column[:, None] & real[None, :], other=0.0)
            acc += dot(x, tl.trans(weight), PRECISION)
    acc += tl.load(logits_ptr + row[:, None] * logits_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    acc = tl.where(acc == acc, acc, float("-inf"))
    if HAS_WITHHELD:
        withheld = tl.load(withheld_ptr + row, mask=real_row, other=0) != 0
        acc = tl.where(withheld[:, None], tl.where(column == null_token, 0.0, float("-inf"))[None, :], acc)
    if HAS_SCORES:
        tl.store(scores_ptr + row[:, None] * scores_stride + column[None, :], acc, mask=mask)

    # A tile has at least one real column, and the padding behind it has higher ids.
    acc = tl.where(real_column[None, :], acc, float("-inf"))
    top = tl.max(acc, axis=1)
    token = tl.min(tl.where(acc == top[:, None], column[None, :], 0x7FFFFFFF), axis=1)
    tl.atomic_max(keys_ptr + row, _pack(top, token), mask=real_row, sem="relaxed", scope="gpu")
    # All of this program's keys come before its arrival, and the last arrival comes after all keys of these rows.
    tl.debug_barrier()
    if tl.atomic_add(arrivals_ptr + tl.program_id(0), 1, sem="acq_rel", scope="gpu") != tl.num_programs(1) - 1:
        return
    tl.store(arrivals_ptr + tl.program_id(0), 0)
    best = tl.atomic_xchg(keys_ptr + row, tl.full([ROWS], LOWEST, tl.int64), mask=real_row, sem="relaxed", scope="gpu")
    _, token = _unpack(best)
    tl.store(tokens_ptr + row * tokens_stride, token.to(tl.int64), mask=real_row)


def _corrected_argmax_triton(logits, correction, withheld, null_token, tokens, scores, best):
    n, vocab_size = logits.shape
    x, weight, ids = correction or (logits, logits, None)
    half = x.dtype != torch.float32
    tile = min(_MOST_ROWS, max(_LEAST_ROWS, next_power_of_2(n)))
    columns = 4096 if INTERPRETED else 64 if tile == _LEAST_ROWS or not half else 128  # the interpreter pays for every program
    _corrected_argmax_kernel[(cdiv(n, tile), cdiv(vocab_size, columns))](
        logits, logits.stride(0), x, x.stride(0), tokens if ids is None else ids, 0 if ids is None else ids.stride(0),
        weight, weight.stride(0), tokens if withheld is None else withheld, null_token, tokens, tokens.stride(0),
        logits if scores is None else scores, 0 if scores is None else scores.stride(0), *best, n, x.shape[1], vocab_size,
        CORRECTED=correction is not None, GATHERED=ids is not None, HAS_WITHHELD=withheld is not None, HAS_SCORES=scores is not None,
        LOWEST=_LOWEST, PRECISION="tf32" if half else "ieee", ROWS=tile, COLUMNS=columns, INNER=64 if half else 32,
        num_warps=4 if tile == _LEAST_ROWS else 8, num_stages=3,
    )  # fmt: skip
    return tokens


def corrected_argmax_torch(logits, correction, withheld, null_token, tokens, scores, best):
    """`corrected_argmax` in torch operations."""
    total = logits.float()
    if correction is not None:
        x, weight, ids = correction
        x = x if ids is None else torch.nn.functional.embedding(ids, x)
        total = total + torch.nn.functional.linear(x, weight)
    total = total.where(~total.isnan(), -torch.inf)
    if withheld is not None:
        certain = torch.full_like(total[:1], -torch.inf)
        certain[:, null_token] = 0.0
        total = torch.where(withheld[:, None], certain, total)
    if scores is not None:
        scores.copy_(total)
    return tokens.copy_(total.argmax(-1))  # the first of equals


def corrected_argmax(
    logits: torch.Tensor,
    correction: Correction | None,
    tokens: torch.Tensor,
    best: Best,
    *,
    withheld: torch.Tensor | None = None,
    null_token: int = 0,
    scores: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns `tokens` [N] int64 (any stride), filled with the argmax of logits + correction; logits [N, V], rows at any stride.

    withheld [N] bool         a row where it is True scores 0 at `null_token` and -inf elsewhere, whatever it holds
    scores [N, V] float32     where to write the sums too
    best                      workspace for at least N rows
    Sums are float32; equal scores go to the lower id; NaN counts as -inf. Raises ValueError on shapes that do not fit.
    """
    n, vocab_size = logits.shape
    check_shape("tokens", tokens, n)
    if correction is not None:
        check_shape("correction.weight", correction.weight, vocab_size, -1)
        rows = n if correction.ids is None else -1
        check_shape("correction.x", correction.x, rows, correction.weight.shape[1])
        if correction.ids is not None:
            check_shape("correction.ids", correction.ids, n)
    if withheld is not None:
        check_shape("withheld", withheld, n)
    if scores is not None:
        check_shape("scores", scores, n, vocab_size)
    if len(best.keys) < n:
        raise ValueError(f"the workspace was made for {len(best.keys)} rows, and there are {n}")
    if not 0 <= null_token < vocab_size:
        raise ValueError(f"null_token must lie in 0..{vocab_size - 1}, got {null_token}")
    matrices = {"logits": logits, "scores": scores} | ({} if correction is None else {"x": correction.x, "weight": correction.weight})
    for name, tensor in matrices.items():
        if tensor is not None and tensor.stride(1) != 1:
            raise ValueError(f"{name} must be contiguous in its last dimension, got strides {tensor.stride()}")
    run = _corrected_argmax_triton if use_triton(logits) else corrected_argmax_torch
    return run(logits, correction, withheld, null_token, tokens, scores, best)
