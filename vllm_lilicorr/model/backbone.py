"""The DFlash backbone: one pass drafts a whole block (DFlash; paper, Section 3.1).

In the order the data flows: the target's tapped hidden states become one context feature per token; each layer projects
them to keys and values of its own; a block of one anchor and B-1 mask embeddings attends to the context before its
anchor and, in both directions, to itself.

Shapes: n sequences, T context tokens each, M blocks a sequence, B positions a block, H the width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import ConvConfig, DraftConfig

ContextKV = list[tuple[Tensor, Tensor]]
"""Per layer, the context's keys (normed, rotated) and values: [n, T, kv_heads, head_dim] each."""

Attention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, the mean square in fp32 (fp64 in fp64)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def rotary(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin [..., head_dim] of integer `positions` [...], the halves laid out as Qwen3 rotates them."""
    wide = torch.promote_types(dtype, torch.float32)
    exponent = torch.arange(0, head_dim, 2, dtype=wide, device=positions.device) / head_dim
    angle = positions.to(wide)[..., None] * theta**-exponent
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x [..., heads, head_dim] rotated by cos, sin [..., head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[..., None, :] + torch.cat((-second, first), dim=-1) * sin[..., None, :]


def block_attention(q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor, visible: Tensor) -> Tensor:
    """Return [n, M, B, heads, head_dim]: every block over its visible context and, both ways, over itself.

    q [n, M, B, heads, head_dim]; k, v [n, M, B, kv_heads, head_dim]; context_k, context_v [n, T, kv_heads, head_dim];
    visible [n, M, T] bool, or [n, 1, T] where all blocks see the same.
    """
    n, blocks, size, heads, _ = q.shape
    if blocks == 1:
        keys, values = (torch.cat(pair, dim=1) for pair in ((context_k, k[:, 0]), (context_v, v[:, 0])))
        mask = F.pad(visible, (0, size), value=True).expand(n, 1, -1)[:, :, None]
        return _grouped_attention(q[:, 0], keys, values, mask)[:, None]
    # Many blocks share one context: the blocks' own keys stand behind it, and each block sees only its own.
    keys = torch.cat((context_k, k.flatten(1, 2)), dim=1)
    values = torch.cat((context_v, v.flatten(1, 2)), dim=1)
    own = torch.eye(blocks, dtype=torch.bool, device=q.device).repeat_interleave(size, dim=1)
    mask = torch.cat((visible.expand(n, blocks, -1), own.expand(n, -1, -1)), dim=-1)
    mask = mask.repeat_interleave(size, dim=1)[:, None]
    return _grouped_attention(q.flatten(1, 2), keys, values, mask).unflatten(1, (blocks, size))


def _grouped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Scaled dot-product attention over [n, tokens, heads, head_dim]; fewer key heads are shared by groups of queries."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)


class DraftAttention(nn.Module):
    """Grouped-query attention whose context keys and values come from projected target features."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.head_dim, self.theta = config.head_dim, config.rope_theta
        bias = config.attention_bias
        q_size, kv_size = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=bias)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [..., kv_heads, head_dim] of context features or block states x [..., H]."""
        return rotate(self.k_norm(self._heads(self.k_proj(x))), cos, sin), self._heads(self.v_proj(x))

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, context: tuple[Tensor, Tensor], visible: Tensor, attention: Attention
    ) -> Tensor:
        q = rotate(self.q_norm(self._heads(self.q_proj(x))), cos, sin)
        k, v = self.keys_values(x, cos, sin)
        return self.o_proj(attention(q, k, v, *context, visible).flatten(-2))


class DraftMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class GroupedConv(nn.Module):
    """DFlash2's causal convolution inside the block, before and behind a sublayer (DFlash2; paper, Appendix C).

        y_t = sum_tap (base[tap] + delta_t[tap, group]) * x_{t-tap}

    The coefficients' position-dependent part comes from one projection of the sublayer's normed input, for both sides. It
    starts at zero and base at the identity, so that a fresh convolution changes nothing, bit for bit.

    Parameters: 2 * taps * H + 2 * taps * (H / group) * H; with 2 taps and groups of 16 at H = 4096, 4,210,688 a sublayer.
    """

    def __init__(self, hidden_size: int, conv: ConvConfig) -> None:
        super().__init__()
        self.taps, self.group_size = conv.kernel_size, conv.group_size
        self.base_kernel = nn.Parameter(torch.empty(2, self.taps, hidden_size))
        groups = hidden_size // self.group_size
        self.kernel_projection = nn.Linear(hidden_size, 2 * self.taps * groups, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.kernel_projection.weight)
        nn.init.zeros_(self.base_kernel)
        with torch.no_grad():
            self.base_kernel[:, 0] = 1.0

    def coefficients(self, x: Tensor) -> Tensor:
        """Return [..., 2, taps, H] for normed inputs x [..., H]: in front of the sublayer, and behind it."""
        delta = self.kernel_projection(x).unflatten(-1, (2, self.taps, -1))
        return self.base_kernel + delta.repeat_interleave(self.group_size, dim=-1)

    def convolve(self, x: Tensor, coefficients: Tensor) -> Tensor:
        """Return y [n, M, B', H] from x of that shape and one side's coefficients [n, M, B', taps, H]."""
        y = coefficients[..., 0, :] * x
        for tap in range(1, min(self.taps, x.shape[2])):
            y = y + coefficients[..., tap, :] * F.pad(x[:, :, :-tap], (0, 0, tap, 0))
        return y


class DraftLayer(nn.Module):
    """A pre-norm decoder layer over the block; the context enters through attention only and skips the input norm."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.attention_conv = GroupedConv(config.hidden_size, config.conv) if config.conv else None
        self.mlp_conv = GroupedConv(config.hidden_size, config.conv) if config.conv else None
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DraftAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = DraftMLP(config)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, context: tuple[Tensor, Tensor], visible: Tensor, attention: Attention
    ) -> Tensor:
        def attend(normed: Tensor) -> Tensor:
            return self.self_attn(normed, cos, sin, context, visible, attention)

        x = x + _convolved(self.attention_conv, attend, self.input_layernorm(x))
        return x + _convolved(self.mlp_conv, self.mlp, self.post_attention_layernorm(x))


def _convolved(conv: GroupedConv | None, sublayer: Callable[[Tensor], Tensor], normed: Tensor) -> Tensor:
    if conv is None:
        return sublayer(normed)
    before, behind = conv.coefficients(normed).unbind(-3)
    return conv.convolve(sublayer(conv.convolve(normed, before)), behind)


class DFlashBackbone(nn.Module):
    """The drafter's own weights; the target's embedding and lm_head are used and never held here."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise every projection N(0, 0.02), biases zero, norms one, convolutions to the identity."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, RMSNorm):
                nn.init.ones_(module.weight)
        for module in self.modules():
            if isinstance(module, GroupedConv):
                module.reset_parameters()

    def context_features(self, taps: Tensor) -> Tensor:
        """Return c [..., H] from the tapped layers' outputs, concatenated in layer order: taps [..., n_taps * H]."""
        return self.hidden_norm(self.fc(taps))

    def context_kv(self, features: Tensor, positions: Tensor) -> ContextKV:
        """Return every layer's context keys and values from features [n, T, H] at absolute positions [n, T]."""
        cos, sin = rotary(positions, self.config.head_dim, self.config.rope_theta, features.dtype)
        return [layer.self_attn.keys_values(features, cos, sin) for layer in self.layers]

    def forward(
        self,
        block_embeddings: Tensor,
        positions: Tensor,
        context: ContextKV,
        visible: Tensor,
        attention: Attention = block_attention,
    ) -> Tensor:
        """Return the final-normed hidden states [n, M, B', H] of every block position.

        block_embeddings [n, M, B', H]: the anchor's embedding, then B'-1 times the mask token's (B' <= B);
        positions [n, M, B']: absolute; visible [n, M, T] bool: the context each block may see, which is what lies before
        its anchor.
        """
        if block_embeddings.shape[2] > self.config.block_size:
            raise ValueError(f"blocks have at most {self.config.block_size} positions, got {block_embeddings.shape[2]}")
        if positions.shape != block_embeddings.shape[:3]:
            raise ValueError(f"positions must be {tuple(block_embeddings.shape[:3])}, got {tuple(positions.shape)}")
        cos, sin = rotary(positions, self.config.head_dim, self.config.rope_theta, block_embeddings.dtype)
        x = block_embeddings
        for layer, layer_context in zip(self.layers, context, strict=True):
            x = layer(x, cos, sin, layer_context, visible, attention)
        return self.norm(x)


def block_inputs(anchor_ids: Tensor, anchor_positions: Tensor, num_positions: int, mask_token_id: int) -> tuple[Tensor, Tensor]:
    """Return token ids and absolute positions [..., num_positions] of blocks that start at the anchors [...]."""
    ids = torch.full((*anchor_ids.shape, num_positions), mask_token_id, dtype=anchor_ids.dtype, device=anchor_ids.device)
    ids[..., 0] = anchor_ids
    return ids, anchor_positions[..., None] + torch.arange(num_positions, device=anchor_ids.device)


def concat_context(parts: Sequence[ContextKV]) -> ContextKV:
    """Return one context from several, in order along T."""
    layers = zip(*parts, strict=True)
    return [(torch.cat([k for k, _ in layer], dim=1), torch.cat([v for _, v in layer], dim=1)) for layer in layers]
