"""What enters the tower besides matrix products: candidate embeddings, confidence features, slot and rank tables.

    node(s, k) = token_proj(E[c_{s,k}]) + pass_hidden_proj(d_s) + feature_mlp(feature_norm(f_{s,k})) + slot[s] + rank[k]

Its matrix products share one accumulator: with active = SiLU(up(feature_norm(f))) and base = pass_hidden_proj(d_s) + slot[s] + rank[k] +
biases, node = base + E[c] token_proj^T + active feature_mlp.down_proj^T, and where tokens = E[c] and active lie side by side in memory that is
one product that adds to its output. This operation writes tokens, active and base. Where the head is as wide as the target there is no
token_proj: E[c] goes to base.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from ._triton import ROWS, cdiv, check_shape, next_power_of_2, tl, triton, use_triton

_BLOCK = 1024
LAYER_NORM_EPS = 1e-5


class FeatureWeights(NamedTuple):
    """feature_norm's weight [5] and bias [5]; feature_mlp.up_proj's weight [5, W] (transposed: a feature's row is contiguous) and bias [W]."""

    norm_weight: torch.Tensor
    norm_bias: torch.Tensor
    up_weight: torch.Tensor
    up_bias: torch.Tensor


@triton.jit
def _lattice_nodes_kernel(
    ids_ptr, log_probs_ptr, embedding_ptr, embedding_stride, slot_states_ptr, slot_states_stride, positions_ptr,
    norm_weight_ptr, norm_bias_ptr, up_weight_ptr, up_bias_ptr, tokens_ptr, tokens_stride, active_ptr, active_stride, base_ptr,
    nodes, slots, hidden, width, eps, K: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    node, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = node < nodes
    slot_row, own_rank = node // K, (node % K)[:, None]
    dtype = base_ptr.dtype.element_ty
    node_row = node.to(tl.int64)[:, None]
    # TOKENS: what becomes of E[c]. 0: nothing here, 1: to `tokens`, 2: to `base`.
    if TOKENS != 0:
        token = tl.load(ids_ptr + node, mask=real, other=0).to(tl.int64)
        embedding_ptr += token[:, None] * embedding_stride + column[None, :]
    if TOKENS == 1:
        in_hidden = real[:, None] & (column < hidden)[None, :]
        token_row = tl.load(embedding_ptr, mask=in_hidden, other=0.0).to(dtype)
        tl.store(tokens_ptr + node_row * tokens_stride + column[None, :], token_row, mask=in_hidden)
    if tl.program_id(1) * BLOCK < width:
        # f = [log p, p, log p - max log p, rank / (K-1), rank == 0], rounded to the head's dtype, then LayerNorm over the five.
        ranks = tl.arange(0, K)
        log_probs = tl.load(log_probs_ptr + slot_row[:, None] * K + ranks[None, :], mask=real[:, None], other=0.0)
        own = tl.sum(tl.where(ranks[None, :] == own_rank, log_probs, 0.0), axis=1)[:, None]
        f = tl.arange(0, 8)[None, :]
        features = tl.where(f == 0, own, tl.where(f == 1, tl.exp(own), own - tl.max(log_probs, axis=1)[:, None]))
        features = tl.where(f == 3, own_rank.to(tl.float32) / max(K - 1, 1), features)
        features = tl.where(f == 4, tl.where(own_rank == 0, 1.0, 0.0), features)
        features = tl.where(f < 5, features, 0.0).to(dtype).to(tl.float32)
        mean = tl.sum(features, axis=1) / 5
        centred = tl.where(f < 5, features - mean[:, None], 0.0)
        scale = tl.rsqrt(tl.sum(centred * centred, axis=1) / 5 + eps)
        norm_weight = tl.load(norm_weight_ptr + f, mask=f < 5, other=0.0).to(tl.float32)
        norm_bias = tl.load(norm_bias_ptr + f, mask=f < 5, other=0.0).to(tl.float32)
        features = (centred * scale[:, None] * norm_weight + norm_bias).to(dtype).to(tl.float32)

        in_width = column < width
        mask = real[:, None] & in_width[None, :]
        up = tl.zeros([ROWS, BLOCK], tl.float32) + tl.load(up_bias_ptr + column, mask=in_width, other=0.0).to(tl.float32)[None, :]
        for i in tl.static_range(5):
            one = tl.sum(tl.where(f == i, features, 0.0), axis=1)
            weight = tl.load(up_weight_ptr + i * width + column, mask=in_width, other=0.0).to(tl.float32)
            up += one[:, None] * weight[None, :]
        tl.store(active_ptr + node_row * active_stride + column[None, :], (up * tl.sigmoid(up)).to(dtype), mask=mask)

        state_at = slot_states_ptr + slot_row.to(tl.int64)[:, None] * slot_states_stride + column[None, :]
        position_at = positions_ptr + ((slot_row % slots)[:, None] * K + own_rank) * width + column[None, :]
        base = tl.load(state_at, mask=mask, other=0.0).to(tl.float32) + tl.load(position_at, mask=mask, other=0.0).to(tl.float32)
        if TOKENS == 2:
            base += tl.load(embedding_ptr, mask=mask, other=0.0).to(tl.float32)
        tl.store(base_ptr + node_row * width + column[None, :], base.to(dtype), mask=mask)


def _lattice_nodes_triton(ids, log_probs, embedding, slot_states, positions, features, tokens, active, base):
    n, slots, topk = ids.shape
    nodes, width = base.shape
    hidden = 0 if tokens is None else tokens.shape[1]
    block = min(_BLOCK, next_power_of_2(max(hidden, width)))
    table, out = base if embedding is None else embedding, base if tokens is None else tokens
    _lattice_nodes_kernel[(cdiv(nodes, ROWS), cdiv(max(hidden, width), block))](
        ids, log_probs, table, table.stride(0), slot_states, slot_states.stride(0), positions, *features,
        out, out.stride(0), active, active.stride(0), base, nodes, slots, hidden, width, LAYER_NORM_EPS,
        K=topk, TOKENS=0 if embedding is None else 2 if tokens is None else 1, ROWS=ROWS, BLOCK=block, num_warps=4,
    )  # fmt: skip


@functools.lru_cache(maxsize=64)
def _rank_columns(topk: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns the features [K, 5] of a slot, of which the three that depend on probabilities are yet to be filled in."""
    with torch.inference_mode(False):
        columns = torch.zeros(topk, 5, dtype=torch.float32, device=device)
        columns[:, 3] = torch.arange(topk, device=device) / max(topk - 1, 1)
        columns[0, 4] = 1.0
        return columns.to(dtype)


def lattice_nodes_torch(ids, log_probs, embedding, slot_states, positions, features, tokens, active, base):
    """`lattice_nodes` in torch operations."""
    n, slots, topk = ids.shape
    width, dtype = base.shape[1], base.dtype
    f = _rank_columns(topk, dtype, ids.device).repeat(n, slots, 1, 1)
    wide = log_probs.float()
    f[..., 0] = wide
    f[..., 1] = wide.exp()
    f[..., 2] = wide - wide.amax(-1, keepdim=True)
    f = torch.nn.functional.layer_norm(f, (5,), features.norm_weight, features.norm_bias, LAYER_NORM_EPS)
    up = torch.addmm(features.up_bias, f.view(-1, 5), features.up_weight, out=active)
    torch.nn.functional.silu(up, inplace=True)
    table = positions.view(1, -1, topk, width)[:, :slots]
    torch.add(slot_states.view(n, slots, 1, width), table, out=base.view(n, slots, topk, width))
    if embedding is None:
        return
    if tokens is None:
        base += embedding.index_select(0, ids.flatten())
    elif tokens.dtype == embedding.dtype:
        torch.index_select(embedding, 0, ids.flatten(), out=tokens)
    else:
        tokens.copy_(embedding.index_select(0, ids.flatten()))


def lattice_nodes(
    ids: torch.Tensor,
    log_probs: torch.Tensor,
    embedding: torch.Tensor | None,
    slot_states: torch.Tensor,
    positions: torch.Tensor,
    features: FeatureWeights,
    tokens: torch.Tensor | None,
    active: torch.Tensor,
    base: torch.Tensor,
) -> None:
    """Fills tokens [N*S*K, H], active [N*S*K, W] and base [N*S*K, W]: base + tokens token_proj^T + active down_proj^T is the node tensor.

    ids [N, S, K] int64 and log_probs [N, S, K] float32, contiguous: the candidates; embedding [V, H]: rows by id, at any stride; slot_states
    [N*S, W]: pass_hidden_proj(d_s); positions [>= S*K, W]: slot table + rank table + the products' biases, slot-major. tokens and active may be
    columns of one tensor. tokens None: no token_proj, the embedding (H = W) goes to base. embedding None: the caller has the candidates'
    rows and multiplies them itself. Features are computed in float32 and rounded to the head's dtype before feature_norm.
    Raises ValueError on shapes that do not fit. The node of the paper, Appendix A.
    """
    n, slots, topk = ids.shape
    rows, width = base.shape
    check_shape("log_probs", log_probs, n, slots, topk)
    check_shape("base", base, n * slots * topk, width)
    check_shape("active", active, rows, width)
    check_shape("slot_states", slot_states, n * slots, width)
    check_shape("positions", positions, -1, width)
    check_shape("up_weight", features.up_weight, 5, width)
    if embedding is None:
        tokens = None
    elif tokens is None:
        check_shape("embedding", embedding, -1, width)
    else:
        check_shape("tokens", tokens, rows, embedding.shape[1])
    if positions.shape[0] < slots * topk:
        raise ValueError(f"positions must hold at least {slots * topk} rows, got {positions.shape[0]}")
    for name, tensor in {"ids": ids, "log_probs": log_probs, "base": base, "positions": positions}.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
    run = _lattice_nodes_triton if use_triton(base) else lattice_nodes_torch
    run(ids, log_probs, embedding, slot_states, positions, features, tokens, active, base)
