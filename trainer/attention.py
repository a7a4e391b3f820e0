"""Attention of many blocks over one context: one definition of who sees what, for two ways to compute it.

Keys are the T context tokens followed by the M*B positions of the blocks themselves. A block sees the context before its
anchor and, both ways, its own B positions; nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def block_mask(anchors: Tensor, context_length: int, block_size: int) -> MaskFunction:
    """Return the mask as a function of (sequence, head, query, key) indices; anchors [n, M] are absolute positions."""

    def sees(sequence: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block = query // block_size
        before_anchor = (key < context_length) & (key < anchors[sequence, block])
        own = (key >= context_length) & ((key - context_length) // block_size == block)
        return before_anchor | own

    return sees


class BlockAttention:
    """The `attention` argument of the backbone for one batch of blocks, its mask built once for all layers."""

    def __init__(self, anchors: Tensor, context_length: int, block_size: int, backend: str | None = None) -> None:
        self.sees = block_mask(anchors, context_length, block_size)
        self.sequences, self.blocks = anchors.shape
        self.queries, self.keys = self.blocks * block_size, context_length + self.blocks * block_size
        self.device = anchors.device
        self.backend = backend or ("flex" if anchors.is_cuda else "sdpa")

    @functools.cached_property
    def dense(self) -> Tensor:
        """[n, 1, M*B, T + M*B] bool."""
        index = functools.partial(torch.arange, device=self.device)
        return self.sees(
            index(self.sequences)[:, None, None], index(1), index(self.queries)[None, :, None], index(self.keys)[None, None]
        )[:, None]

    @functools.cached_property
    def sparse(self) -> Any:
        """The same as flex_attention's block-sparse mask."""
        from torch.nn.attention.flex_attention import create_block_mask

        return create_block_mask(self.sees, self.sequences, None, self.queries, self.keys, device=self.device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor, visible: Tensor) -> Tensor:
        """Return [n, M, B, heads, head_dim]; shapes as `vllm_lilicorr.model.backbone.block_attention`. `visible`, the dense
        mask that function takes, is not needed."""
        keys = torch.cat((context_k, k.flatten(1, 2)), dim=1).transpose(1, 2)
        values = torch.cat((context_v, v.flatten(1, 2)), dim=1).transpose(1, 2)
        queries = q.flatten(1, 2).transpose(1, 2)
        grouped = queries.shape[1] != keys.shape[1]
        if self.backend == "flex":
            out = _compiled_flex()(queries, keys, values, block_mask=self.sparse, enable_gqa=grouped)
        else:
            out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=self.dense, enable_gqa=grouped)
        return out.transpose(1, 2).unflatten(1, q.shape[1:3])


@functools.cache
def _compiled_flex() -> Any:
    """Uncompiled, flex_attention materialises every score; on a CPU that is what tests compare with."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True) if torch.cuda.is_available() else flex_attention
