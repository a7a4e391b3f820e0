"""One fused operation over logits that a head has corrected: log p of given tokens, the argmax, the distance to the target.

A sequential head adds a product of low rank to a slot's logits,

    l_u = <W_u, h> + <U_u, e>          W the frozen lm_head [V, H], U the head's own table [V, r], e [r] from the head

so unlike in `token_log_probs` the table itself gets a gradient, and the distance to the target's distribution needs two
full distributions a row. Both exist for one chunk of rows at a time and are computed again in the backward pass: beside
the table's own gradient no memory grows with V, and none with rows * V.

    d log p(g) / d l_u = [u = g] - p_u
    d L1 / d l_u       = p_u (s_u - sum_v p_v s_v)          L1 = sum_u |p_u - q_u|,  s = sign(p - q)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .token_log_probs import chunk_rows


@dataclass(frozen=True)
class CorrectedLogProbs:
    """target [R]: log p of the given tokens; l1 [R]: sum_u |p_u - q_u| in 0..2, or zeros without a target distribution;
    top [R]: the most probable token. fp32 (fp64 in fp64); equal logits go to the lower id."""

    target: Tensor
    l1: Tensor
    top: Tensor


def corrected_log_probs(
    hidden: Tensor,
    weight: Tensor,
    extra: Tensor,
    table: Tensor,
    targets: Tensor,
    final: Tensor | None = None,
    log_counts: Tensor | None = None,
) -> CorrectedLogProbs:
    """Return log p of `targets` [R] under the logits hidden @ weight.T + extra @ table.T, and their distance to q.

    hidden [R, H], weight [V, H] of one dtype, weight without gradient; extra [R, r], table [V, r] of one dtype; q is the
    softmax of final [R, H] @ weight.T. `log_counts` [V]: a token stands for exp(log_counts) tokens (a sampled softmax's
    correction), in both distributions and in the distance. Raises ValueError on shapes or dtypes that do not fit.
    """
    rows, vocab = len(hidden), len(weight)
    for name, tensor, shape in (
        ("hidden", hidden, (rows, weight.shape[1])),
        ("extra", extra, (rows, table.shape[1])),
        ("table", table, (vocab, table.shape[1])),
        ("targets", targets, (rows,)),
        ("final", hidden if final is None else final, hidden.shape),
    ):
        if tensor.shape != shape:
            raise ValueError(f"{name} must be {tuple(shape)}, got {tuple(tensor.shape)}")
    if hidden.dtype != weight.dtype or extra.dtype != table.dtype:
        raise ValueError(
            f"hidden and weight, extra and table must have one dtype, got {hidden.dtype} and {weight.dtype}, "
            f"{extra.dtype} and {table.dtype}"
        )
    return CorrectedLogProbs(*_CorrectedLogProbs.apply(hidden, weight, extra, table, targets, final, log_counts))


class _CorrectedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        extra: Tensor,
        table: Tensor,
        targets: Tensor,
        final: Tensor | None,
        log_counts: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        target = torch.empty(len(hidden), dtype=wide, device=hidden.device)
        l1 = torch.zeros_like(target)
        top = torch.empty(len(hidden), dtype=torch.long, device=hidden.device)
        for part in _chunks(hidden, weight):
            logits = _logits(hidden[part], weight, extra[part], table)
            peak, top[part] = logits.max(-1)
            # Relative to the maximum first: near p = 1 the difference is all there is.
            gathered = logits.gather(1, targets[part, None])[:, 0] - peak
            shares, total = _softmax_(logits, log_counts)
            target[part] = gathered - total.log()
            if final is not None:
                theirs, _ = _softmax_(_logits(final[part], weight), log_counts)
                l1[part] = theirs.sub_(shares).abs_().sum(-1)
        ctx.mark_non_differentiable(top)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, extra, table, targets, final, log_counts)
        return target, l1, top

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad_target: Tensor | None, grad_l1: Tensor | None, _: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, extra, table, targets, final, log_counts = ctx.saved_tensors  # type: ignore[attr-defined]
        needs_hidden, _, needs_extra, needs_table, *_ = ctx.needs_input_grad  # type: ignore[attr-defined]
        needs_table = needs_table and len(hidden) > 0
        grad_hidden, grad_extra = torch.empty_like(hidden), torch.empty_like(extra)
        wide = torch.promote_types(table.dtype, torch.float32)
        grad_table = torch.zeros(table.shape, dtype=wide, device=table.device) if needs_table else None
        for part in _chunks(hidden, weight):
            shares, _ = _softmax_(_logits(hidden[part], weight, extra[part], table), log_counts)
            slope = torch.zeros_like(shares)
            if final is not None and grad_l1 is not None:
                theirs, _ = _softmax_(_logits(final[part], weight), log_counts)
                sign = torch.sub(shares, theirs, out=theirs).sign_()
                mean = torch.mul(shares, sign, out=slope).sum(-1, keepdim=True)
                slope = sign.sub_(mean).mul_(grad_l1[part, None])
            if grad_target is not None:
                slope.sub_(grad_target[part, None])
            slope.mul_(shares)
            if grad_target is not None:
                slope.scatter_add_(1, targets[part, None], grad_target[part, None])
            if needs_hidden:
                grad_hidden[part] = slope.to(weight.dtype) @ weight
            narrow = slope.to(table.dtype)
            if needs_extra:
                grad_extra[part] = narrow @ table
            if grad_table is not None:
                grad_table += narrow.t() @ extra[part]
        return (
            grad_hidden if needs_hidden else None,
            None,
            grad_extra if needs_extra else None,
            None if grad_table is None else grad_table.to(table.dtype),
            None,
            None,
            None,
        )


def _chunks(hidden: Tensor, weight: Tensor) -> list[slice]:
    wide = torch.promote_types(hidden.dtype, torch.float32)
    step = chunk_rows(len(weight), wide, hidden.device)
    return [slice(at, min(at + step, len(hidden))) for at in range(0, len(hidden), step)]


def _logits(hidden: Tensor, weight: Tensor, extra: Tensor | None = None, table: Tensor | None = None) -> Tensor:
    """Return new logits [R, V] in fp32 (fp64 in fp64), each product rounded as the drafter rounds it when it decodes."""
    logits = torch.mm(hidden, weight.t()).to(torch.promote_types(hidden.dtype, torch.float32))
    if extra is not None and table is not None:
        logits += torch.mm(extra, table.t())
    return logits


def _softmax_(logits: Tensor, log_counts: Tensor | None) -> tuple[Tensor, Tensor]:
    """Turn logits [R, V] into probabilities in place; return them and sum_u exp(l_u - max l) [R], both with the counts."""
    logits.sub_(logits.amax(-1, keepdim=True))
    if log_counts is not None:
        logits.add_(log_counts)
    total = logits.exp_().sum(-1)
    return logits.div_(total[:, None]), total
