"""Exact top-K and full-vocabulary log-probabilities from one read of the logits, and the same over vocabulary shards.

Ties go to the lower id, on every device: a value and its id are packed into one 64-bit key whose order is the wanted one, so keys are
distinct and their order is total. A NaN logit counts as -inf.

    logits [n, V] --(split over V)--> per split: K ids, K values, log-sum-exp --(merge)--> ids [n, K], log-probabilities [n, K]

A vocabulary shard of a tensor-parallel rank is a split that another process made, so the merge serves both. A log-sum-exp is kept as its
two terms, the maximum and the logarithm of the sum relative to it: added up, logits in the thousands would swallow the second.
"""

from __future__ import annotations

import torch

from ._triton import INTERPRETED, cdiv, check_shape, next_power_of_2, tl, triton, use_triton

NO_ID = 0x7FFFFFFF
"""The id of an entry that stands for no column; with its value -inf it loses to every real column."""

# One split is GROUPS runs of GROUP neighbouring columns. A program finds every run's maximum, keeps the K best runs, and looks again
# (in L1) only into those: per column it pays one comparison instead of one for each of the K.
_GROUPS, _GROUP = (2048 if INTERPRETED else 128), 32  # the interpreter pays for every program
_MAX_ROWS = 2048  # rows a launch's scratch holds


@triton.jit
def _pack(values, ids):
    """Key of (value, id): greater value first, then lower id. -0.0 is made 0.0, NaN is made -inf."""
    values = tl.where(values == values, tl.where(values == 0.0, 0.0, values), float("-inf"))
    bits = values.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - ids.to(tl.int32)).to(tl.int64)


@triton.jit
def _unpack(keys):
    ordered = (keys >> 32).to(tl.int32)
    bits = tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
    return bits.to(tl.float32, bitcast=True), 0x7FFFFFFF - (keys & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def _largest(keys, K: tl.constexpr):
    """The K largest of distinct int64 keys [n], in descending order."""
    lowest = tl.min(keys, axis=0)
    rank = tl.arange(0, K)
    best = tl.zeros([K], tl.int64)
    for j in tl.static_range(K):
        top = tl.max(keys, axis=0)
        best = tl.where(rank == j, top, best)
        # The lowest key stands in for a taken one; it is never taken twice before every other key is, and n > K.
        keys = tl.where(keys == top, lowest, keys)
    return best


@triton.jit
def _finite(top):
    """`top`, or 0 where subtracting it would give inf - inf."""
    return tl.where((top == float("inf")) | (top == float("-inf")), 0.0, top)


@triton.jit
def _split_kernel(
    logits_ptr, row_stride, num_columns, first_id, ids_ptr, values_ptr, lse_ptr,
    K: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row, split, splits = tl.program_id(1).to(tl.int64), tl.program_id(0), tl.num_programs(0)
    logits_ptr += row * row_stride
    start = split * GROUPS * GROUP
    group, within, rank = tl.arange(0, GROUPS), tl.arange(0, GROUP), tl.arange(0, K)

    column = start + group[:, None] * GROUP + within[None, :]
    x = tl.load(logits_ptr + column, mask=column < num_columns, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("-inf"))
    peaks = tl.max(x, axis=1)
    top = _finite(tl.max(peaks, axis=0))
    rest = tl.log(tl.sum(tl.sum(tl.exp(x - top), axis=1), axis=0))

    # The K best runs by (maximum, position) hold the K best columns by (value, id): a column outside them is beaten by K maxima.
    _, chosen = _unpack(_largest(_pack(peaks, group), K))
    column = start + chosen[:, None] * GROUP + within[None, :]
    real = column < num_columns
    x = tl.load(logits_ptr + column, mask=real, other=float("-inf")).to(tl.float32)
    keys = _pack(x, tl.where(real, column, 0x7FFFFFFF - 1 - within[None, :] - GROUP * rank[:, None]))
    values, ids = _unpack(_largest(tl.reshape(keys, [K * GROUP]), K))

    out = (row * splits + split) * K + rank
    tl.store(ids_ptr + out, tl.where(ids < num_columns, ids + first_id, 0x7FFFFFFF))
    tl.store(values_ptr + out, values)
    tl.store(lse_ptr + 2 * (row * splits + split), top)
    tl.store(lse_ptr + 2 * (row * splits + split) + 1, rest)


@triton.jit
def _merge_kernel(
    ids_ptr, values_ptr, lse_ptr, part_stride, row_stride, lse_part_stride, lse_row_stride, parts,
    out_ids_ptr, out_values_ptr, out_lse_ptr,
    K: tl.constexpr, PARTS: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    row, rank, part = tl.program_id(0).to(tl.int64), tl.arange(0, K), tl.arange(0, PARTS)
    real = part < parts
    lse_at = lse_ptr + row * lse_row_stride + part * lse_part_stride
    tops = tl.load(lse_at, mask=real, other=float("-inf"))
    rests = tl.load(lse_at + 1, mask=real, other=float("-inf"))
    # A part without anything finite has top 0 and rest -inf; it must not set the common maximum.
    top = _finite(tl.max(tl.where(rests == float("-inf"), float("-inf"), tops), axis=0))
    rest = tl.log(tl.sum(tl.exp(tl.where(rests == float("-inf"), float("-inf"), tops - top + rests)), axis=0))

    entry = row * row_stride + part[:, None] * part_stride + rank[None, :]
    fill = 0x7FFFFFFF - part[:, None] * K - rank[None, :]
    ids = tl.load(ids_ptr + entry, mask=real[:, None], other=0x7FFFFFFF).to(tl.int32)
    values = tl.load(values_ptr + entry, mask=real[:, None], other=float("-inf"))
    keys = _pack(values, tl.where(ids == 0x7FFFFFFF, fill, ids))
    values, ids = _unpack(_largest(tl.reshape(keys, [PARTS * K]), K))

    ids = tl.where(ids > 0x7FFF0000, 0x7FFFFFFF, ids)
    tl.store(out_ids_ptr + row * K + rank, ids.to(out_ids_ptr.dtype.element_ty))
    if NORMALIZE:
        tl.store(out_values_ptr + row * K + rank, values - top - rest)
    else:
        tl.store(out_values_ptr + row * K + rank, values)
        tl.store(out_lse_ptr + 2 * row, top)
        tl.store(out_lse_ptr + 2 * row + 1, rest)


def _splits_triton(logits: torch.Tensor, k: int, vocab_size: int, first_id: int):
    """Launches one program per (split, row); returns per-split ids and values [n, P, k] and log-sum-exps [n, P, 2]."""
    n, parts = logits.shape[0], cdiv(vocab_size, _GROUPS * _GROUP)
    ids = torch.empty(n, parts, k, dtype=torch.int32, device=logits.device)
    values = torch.empty(n, parts, k, dtype=torch.float32, device=logits.device)
    lse = torch.empty(n, parts, 2, dtype=torch.float32, device=logits.device)
    _split_kernel[(parts, n)](
        logits, logits.stride(0), vocab_size, first_id, ids, values, lse,
        K=k, GROUPS=_GROUPS, GROUP=_GROUP, num_warps=4,
    )  # fmt: skip
    return ids, values, lse


def _merge_triton(ids, values, lse, parts_first: bool, out_ids, out_values, out_lse=None) -> None:
    """Launches one program per row; parts lie along dimension 0 or 1. Without `out_lse`, values become log-probabilities."""
    n, k = out_ids.shape
    part, row = (0, 1) if parts_first else (1, 0)
    parts = ids.shape[part]
    if ids.stride()[:2] != values.stride()[:2]:
        raise ValueError(f"ids and values must lie alike in memory, got strides {ids.stride()} and {values.stride()}")
    _merge_kernel[(n,)](
        ids, values, lse, ids.stride(part), ids.stride(row), lse.stride(part), lse.stride(row), parts,
        out_ids, out_values, out_values if out_lse is None else out_lse,
        K=k, PARTS=next_power_of_2(parts), NORMALIZE=out_lse is None, num_warps=4,
    )  # fmt: skip


def _pack_torch(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    bits = torch.where(values == 0, 0.0, values.float()).view(torch.int32)  # -0.0 == 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.long() << 32) | (0x7FFFFFFF - ids)


def _unpack_torch(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    ordered = (keys >> 32).int()
    bits = torch.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
    return bits.view(torch.float32), 0x7FFFFFFF - (keys & 0xFFFFFFFF)


_CHUNK = 1 << 19  # columns that stay in a cache while a few passes go over them


def _shard_torch(logits: torch.Tensor, k: int, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns ids, values [n, k] and log-sum-exp [n, 2] of the shard."""
    parts = [_rows_torch(rows, min(k, vocab_size)) for rows in logits[:, :vocab_size].split(max(_CHUNK // vocab_size, 1))]
    ids, values, lse = parts[0] if len(parts) == 1 else (torch.cat(part) for part in zip(*parts))
    short = k - ids.shape[1]  # a shard may hold fewer columns than k
    if short:
        ids = torch.nn.functional.pad(ids, (0, short), value=NO_ID)
        values = torch.nn.functional.pad(values, (0, short), value=-torch.inf)
    return ids, values, lse


def _rows_torch(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns what `_shard_torch` does, of a few rows."""
    wide = x.float()
    values, ids = wide.topk(min(2 * k, x.shape[1]))
    if values[:, 0].isnan().any():  # a NaN is the greatest to torch
        wide = wide.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        values, ids = wide.topk(len(values[0]))
    if values.shape[1] < x.shape[1] and (values[:, k - 1] == values[:, -1]).any():
        values, ids = _largest_torch(wide, k)
    else:
        # Whatever equals the k-th value is at hand. torch leaves the order of equal values open.
        ids, order = ids.sort()
        values, order = values.gather(1, order).sort(descending=True, stable=True)
        values, ids = values[:, :k], ids.gather(1, order)[:, :k]
    top = values[:, :1]
    top = torch.where(top.isinf(), 0.0, top)
    relative = torch.sub(wide, top) if wide is x else wide.sub_(top)
    return ids, values, torch.cat((top, relative.exp_().sum(-1, keepdim=True).log_()), 1)


def _largest_torch(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the k largest of each row and their columns, with any number of equal values."""
    keys = _pack_torch(x, torch.arange(x.shape[1], device=x.device)).topk(k).values
    return _unpack_torch(keys)


KS = (1, 2, 4, 8, 16)
"""What k may be."""


def _check(logits: torch.Tensor, k: int, vocab_size: int | None) -> int:
    check_shape("logits", logits, -1, -1)
    vocab_size = logits.shape[1] if vocab_size is None else vocab_size
    if not 1 <= vocab_size <= min(logits.shape[1], NO_ID - (1 << 16)):
        raise ValueError(f"vocab_size must lie in 1..{logits.shape[1]} (the logits' columns), got {vocab_size}")
    if k not in KS:
        raise ValueError(f"k must be 1, 2, 4, 8 or 16, got {k}")
    if logits.stride(1) != 1:
        raise ValueError(f"logits must be contiguous in the vocabulary dimension, got strides {logits.stride()}")
    return vocab_size


def topk_logprobs(
    logits: torch.Tensor,
    k: int,
    vocab_size: int | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the k most probable tokens of each row, ids [n, k] int64 and log-probabilities [n, k] float32, in rank order.

    logits [n, C] in bf16, fp16 or fp32, rows at any stride; the columns from `vocab_size` on (default: none) are padding and ignored. Log-probabilities
    are natural logarithms, normalised over the vocab_size columns. Equal logits go to the lower id; NaN counts as -inf.
    Raises ValueError on a k other than 1, 2, 4, 8, 16 or above vocab_size. The candidates of the paper, Section 3.2.
    """
    vocab_size = _check(logits, k, vocab_size)
    if k > vocab_size:
        raise ValueError(f"k must not exceed the vocabulary of {vocab_size}, got {k}")
    n = logits.shape[0]
    if out is None:
        out = (logits.new_empty(n, k, dtype=torch.int64), logits.new_empty(n, k, dtype=torch.float32))
    for rows in range(0, n, _MAX_ROWS):
        part = slice(rows, rows + _MAX_ROWS)
        if use_triton(logits):
            ids, values, lse = _splits_triton(logits[part], k, vocab_size, 0)
            _merge_triton(ids, values, lse, False, out[0][part], out[1][part])
        else:
            ids, values, lse = _shard_torch(logits[part], k, vocab_size)
            out[0][part] = ids
            torch.sub(values - lse[:, :1], lse[:, 1:], out=out[1][part])
    return out


def topk_shard(
    logits: torch.Tensor, k: int, vocab_start: int, vocab_size: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns one vocabulary shard's ids [n, k] int64, logits [n, k] float32 and log-sum-exp [n, 2] float32, for `merge_topk`.

    logits [n, C], the shard's columns; column c is token vocab_start + c, those from `vocab_size` on are padding. A shard of fewer
    than k columns fills up with the id NO_ID and -inf. Raises as `topk_logprobs`.
    """
    vocab_size = _check(logits, k, vocab_size)
    if not use_triton(logits):
        ids, values, lse = _shard_torch(logits, k, vocab_size)
        return torch.where(ids == NO_ID, NO_ID, ids + vocab_start), values, lse
    n = logits.shape[0]
    out_ids = logits.new_empty(n, k, dtype=torch.int64)
    out_values = logits.new_empty(n, k, dtype=torch.float32)
    out_lse = logits.new_empty(n, 2, dtype=torch.float32)
    for rows in range(0, n, _MAX_ROWS):
        part = slice(rows, rows + _MAX_ROWS)
        ids, values, lse = _splits_triton(logits[part], k, vocab_size, vocab_start)
        _merge_triton(ids, values, lse, False, out_ids[part], out_values[part], out_lse[part])
    return out_ids, out_values, out_lse


def merge_topk(
    ids: torch.Tensor,
    values: torch.Tensor,
    lse: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what `topk_logprobs` returns on the whole vocabulary, from R shards: ids [R, n, k], values [R, n, k], lse [R, n, 2].

    The shards may come in any order. Together they must hold at least k columns.
    """
    check_shape("values", values, *ids.shape)
    check_shape("lse", lse, *ids.shape[:2], 2)
    _, n, k = ids.shape
    if out is None:
        out = (ids.new_empty(n, k, dtype=torch.int64), values.new_empty(n, k, dtype=torch.float32))
    if use_triton(values):
        _merge_triton(ids, values, lse, True, *out)
        return out
    keys = _pack_torch(values, ids).transpose(0, 1).flatten(1).topk(k, dim=-1).values
    best, best_ids = _unpack_torch(keys)
    out[0].copy_(best_ids)
    tops, rests = lse.unbind(-1)
    tops = tops.where(rests > -torch.inf, -torch.inf)
    top = tops.amax(0)
    top = torch.where(top.isinf(), 0.0, top)
    torch.sub(best - top[:, None], (tops - top + rests).logsumexp(0)[:, None], out=out[1])
    return out
