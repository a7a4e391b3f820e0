"""One fused operation over the frozen lm_head: log p of given tokens and the top-K candidates, without the logits.

The logits of R rows over V tokens are the memory hog of training a block drafter (512 anchors x 15 slots x 151,936 is
1.2e9 values). Here they exist one chunk of rows at a time, and nothing of them outlives the chunk:

    log p(v) = l_v - logsumexp(l),   l = W h        d log p(v) / d h = W_v - sum_u p_u W_u

So the gradient of everything returned is linear in a few gathered rows of W and one vector of width H per row, the
expected embedding E = sum_u p_u W_u. The forward pass computes E while the chunk's probabilities are at hand, which
costs one matrix product; the backward pass then needs neither the logits again nor another product over V. Against
materialised logits that is the same number of products, against recomputing them in the backward pass one fewer.
The probabilities of the returned tokens themselves stay out of E and are applied in the backward pass in full
precision: where the drafter is sure of a token, W_v - E is a difference of nearly equal vectors that bf16 would lose.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_lilicorr.kernels._triton import has_kernels
from vllm_lilicorr.kernels.topk_logprobs import KS, topk_shard

BLOCK = 64
"""Columns whose maximum is taken first; the K best blocks contain the K best tokens."""


@dataclass(frozen=True)
class TokenLogProbs:
    """target [R]: log p of the given tokens; ids, log_probs [R, K]: the K most probable, in rank order (K may be 0).

    fp32 (fp64 in fp64), normalised over the full vocabulary; equal logits go to the lower id.
    """

    target: Tensor
    ids: Tensor
    log_probs: Tensor


def token_log_probs(hidden: Tensor, weight: Tensor, targets: Tensor, k: int, log_counts: Tensor | None = None) -> TokenLogProbs:
    """Return log p of `targets` [R] and the top-k ids and log-probabilities [R, k] under the logits hidden @ weight.T.

    hidden [R, H]; weight [V, H] of the same dtype, which gets no gradient; k = 0 leaves the candidates out.
    `log_counts` [V]: a token stands for exp(log_counts) tokens in the normaliser (a sampled softmax's correction); ranks
    and numerators ignore it. Memory beside the result does not grow with R * V: one chunk of logits, whose size follows
    from the shape. Raises ValueError on shapes or dtypes that do not fit.
    """
    rows, width = hidden.shape
    vocab = weight.shape[0]
    if weight.shape[1] != width or targets.shape != (rows,):
        raise ValueError(
            f"expected hidden [R, H], weight [V, H] and targets [R], got {tuple(hidden.shape)}, {tuple(weight.shape)}, "
            f"{tuple(targets.shape)}"
        )
    if hidden.dtype != weight.dtype:
        raise ValueError(f"hidden and weight must have one dtype, got {hidden.dtype} and {weight.dtype}")
    if not 0 <= k <= vocab:
        raise ValueError(f"k must lie in 0..{vocab} (the vocabulary), got {k}")
    target, ids, log_probs = _TokenLogProbs.apply(
        hidden, weight, targets, k, log_counts, torch.is_grad_enabled() and hidden.requires_grad
    )
    return TokenLogProbs(target, ids, log_probs)


def chunk_rows(vocab: int, dtype: torch.dtype, device: torch.device) -> int:
    """Return how many rows of logits exist at a time.

    Enough that the product is bound by arithmetic and not by reading the head (a few hundred flops a byte on a GPU, about
    a hundred on a CPU core with matrix units), and beyond that no more than a fixed budget of bytes.
    """
    cuda = device.type == "cuda"
    least, budget = (256, 512 << 20) if cuda else (96, 24 << 20)
    return max(least, budget // (vocab * dtype.itemsize))


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        k: int,
        log_counts: Tensor | None,
        needs_gradient: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows, width = hidden.shape
        vocab = weight.shape[0]
        wide = torch.promote_types(hidden.dtype, torch.float32)
        target = torch.empty(rows, dtype=wide, device=hidden.device)
        ids = torch.empty(rows, k, dtype=torch.long, device=hidden.device)
        log_probs = torch.empty(rows, k, dtype=wide, device=hidden.device)
        expected = torch.empty(rows, width, dtype=wide, device=hidden.device) if needs_gradient else None
        step = min(chunk_rows(vocab, hidden.dtype, hidden.device), max(rows, 1))
        buffer = torch.empty(step, vocab, dtype=hidden.dtype, device=hidden.device)
        # On a CPU the passes over the chunk run over slices that stay in the core's cache.
        inner = step if hidden.is_cuda else max(1, (1 << 18) // vocab)
        scratch = torch.empty(min(inner, step), vocab, dtype=wide, device=hidden.device)
        in_kernels = k in KS and log_counts is None and has_kernels(hidden)
        for at in range(0, rows, step):
            chunk = slice(at, min(at + step, rows))
            logits = torch.mm(hidden[chunk], weight.t(), out=buffer[: chunk.stop - at])
            scale = torch.empty(len(logits), dtype=wide, device=hidden.device)
            for first in range(0, len(logits), inner):
                part = slice(first, min(first + inner, len(logits)))
                whole = slice(at + part.start, at + part.stop)
                values = logits[part]
                gathered = values.gather(1, targets[whole, None])
                if in_kernels:
                    # The server's top-K: one read of the chunk. Only the gradient needs the probabilities themselves.
                    top_ids, top_values, normaliser = topk_shard(values, k, 0)
                    top, log_total = normaliser.unbind(-1)
                    if expected is not None:
                        exp = torch.sub(values, top[:, None], out=scratch[: len(values)]).exp_()
                        total = log_total.exp()
                else:
                    top_values, top_ids, top = _top(values, k)
                    if log_counts is None:
                        exp = torch.sub(values, top[:, None], out=scratch[: len(values)])
                    else:
                        exp = (values - top[:, None]).add_(log_counts)
                    exp.exp_()
                    total = exp.sum(-1)
                    log_total = total.log()
                # Relative to the maximum first: near p = 1 the difference is all there is.
                target[whole] = gathered[:, 0].to(wide) - top - log_total
                ids[whole], log_probs[whole] = top_ids, top_values - top[:, None] - log_total[:, None]
                if expected is not None:
                    exp.scatter_(1, torch.cat((targets[whole, None], top_ids), dim=1), 0.0)
                    values.copy_(exp)
                    scale[part] = total
            if expected is not None:
                expected[chunk] = torch.mm(logits, weight) / scale[:, None]
        ctx.mark_non_differentiable(ids)
        ctx.save_for_backward(weight, targets, target, ids, log_probs, expected, log_counts)
        ctx.dtype = hidden.dtype  # type: ignore[attr-defined]
        return target, ids, log_probs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad_target: Tensor, _: Tensor, grad_log_probs: Tensor
    ) -> tuple[Tensor | None, None, None, None, None, None]:
        weight, targets, target, ids, log_probs, expected, log_counts = ctx.saved_tensors  # type: ignore[attr-defined]
        total = grad_target + grad_log_probs.sum(-1)
        tokens = torch.cat((targets[:, None], ids), dim=1)
        probs = torch.cat((target[:, None], log_probs), dim=1).exp()
        if log_counts is not None:
            probs = probs * log_counts.to(probs.dtype).exp()[tokens]
        # A target that is also a candidate is one token: its two gradients meet before they are rounded.
        same = ids == targets[:, None]
        alone = ~same.any(-1, keepdim=True)
        grads = torch.cat((grad_target[:, None] * alone, grad_log_probs + grad_target[:, None] * same), dim=1)
        probs[:, :1] *= alone
        coefficients = grads - total[:, None] * probs
        grad = expected.mul(-total[:, None])
        add_weighted_rows_(grad, weight, tokens, coefficients)
        return grad.to(ctx.dtype), None, None, None, None, None  # type: ignore[attr-defined]


def add_weighted_rows_(out: Tensor, table: Tensor, rows: Tensor, coefficients: Tensor) -> None:
    """Add sum_j coefficients[r, j] * table[rows[r, j]] to out [R, H], a bounded number of gathered rows at a time."""
    step = max(1, (32 << 20) // (rows.shape[1] * table.shape[1] * table.dtype.itemsize))
    for at in range(0, len(rows), step):
        part = slice(at, at + step)
        gathered = table[rows[part]]
        out[part] += torch.bmm(coefficients[part, None].to(table.dtype), gathered)[:, 0]


def _top(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the k largest values and their ids [R, k], ties to the lower id, and the maximum [R], from logits [R, V]."""
    rows, vocab = logits.shape
    wide = torch.promote_types(logits.dtype, torch.float32)
    full = vocab // BLOCK
    maxima = logits[:, : full * BLOCK].unflatten(1, (full, BLOCK)).amax(-1) if full else logits[:, :0]
    if full * BLOCK < vocab:
        maxima = torch.cat((maxima, logits[:, full * BLOCK :].amax(-1, keepdim=True)), dim=1)
    top = maxima.amax(-1).to(wide)
    if k == 0:
        return top.new_empty(rows, 0), torch.empty(rows, 0, dtype=torch.long, device=logits.device), top
    # A block beats another by its maximum and, at equal maxima, by standing first: whatever it holds of that value has
    # lower ids. So k blocks in that order hold the k best tokens, and blocks in id order keep ties in id order.
    blocks = _order(maxima, min(k, maxima.shape[1])).sort(-1).values
    ids = (blocks[..., None] * BLOCK + torch.arange(BLOCK, device=logits.device)).flatten(1)
    values = logits.gather(1, ids.clamp_max(vocab - 1)).to(wide).masked_fill(ids >= vocab, -torch.inf)
    best = _order(values, k)
    return values.gather(1, best), ids.gather(1, best), top


def _order(values: Tensor, k: int) -> Tensor:
    """Return the positions [R, k] of the k largest values [R, n] in falling order, equal values by position."""
    if values.dtype == torch.float64:
        return values.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    # One integer that orders by value, then by position: topk alone promises nothing among equals, which bf16 logits
    # have many of. Adding zero turns -0.0 into 0.0.
    bits = (values.float() + 0.0).view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    position = torch.arange(values.shape[1], device=values.device)
    return torch.topk((ordered << 32) | (0xFFFFFFFF - position), k, dim=-1).indices
