"""The LiLiCorr head: one small transformer over the whole lattice, an out and an in vector a candidate, cosine scores
(paper, Section 3.2 and Appendix A).

In the order the data flows: nodes, tower, anchor, vectors, scores. This is the one definition of the head's weights; the
trainer trains it and the server lays the same weights out for its kernels.

Shapes: N blocks, S slots (any number of leading ones up to the trained B-1), K candidates, H the target's width, W the
head's, d the width of the vectors.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_lilicorr.kernels._triton import has_kernels
from vllm_lilicorr.kernels.lattice_attention import lattice_attention

from ...config import DraftConfig, LiLiCorrConfig
from ..backbone import RMSNorm
from ..lattice import NUM_FEATURES, candidate_features
from .base import BlockStates, Candidates, LatticeHead, TargetVocabulary, ranked_candidates

FEATURE_NORM_EPS = 1e-5
Bias: TypeAlias = Tensor | tuple[Tensor, Tensor]
"""The tower's attention bias [heads, S*K, S*K]; or the tables it is made of, [heads, 2B-1] by distance, [heads] inside a slot."""


class MLP(nn.Module):
    """Linear, SiLU, Linear; biases, no gate."""

    def __init__(self, in_size: int, hidden_size: int, out_size: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(in_size, hidden_size)
        self.down_proj = nn.Linear(hidden_size, out_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.up_proj(x)))


class LatticeAttention(nn.Module):
    """Multi-head attention over all S*K nodes at once, no mask, an additive bias from the slots' distance."""

    def __init__(self, size: int, num_heads: int, topk: int) -> None:
        super().__init__()
        self.num_heads, self.topk = num_heads, topk
        self.in_proj_weight = nn.Parameter(torch.empty(3 * size, size))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * size))
        self.out_proj = nn.Linear(size, size)

    def forward(self, x: Tensor, bias: Bias) -> Tensor:
        """Return [N, S*K, W] from nodes x [N, S*K, W] and the bias; its tables have the kernels attend."""
        qkv = F.linear(x, self.in_proj_weight, self.in_proj_bias).unflatten(-1, (3, self.num_heads, -1))
        if isinstance(bias, tuple):
            (q, k, v), (relative, same) = qkv.unbind(2), bias
            out = lattice_attention(q, k, v, relative, same, self.topk)
        else:
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2)
        return self.out_proj(out.flatten(-2))


class LatticeLayer(nn.Module):
    """x += MHA(RMSNorm(x), bias); x += MLP(RMSNorm(x))."""

    def __init__(self, config: LiLiCorrConfig, rms_norm_eps: float) -> None:
        super().__init__()
        width = config.hidden_size
        self.attn_norm = RMSNorm(width, rms_norm_eps)
        self.attn = LatticeAttention(width, config.num_heads, config.candidate_topk)
        self.mlp_norm = RMSNorm(width, rms_norm_eps)
        self.mlp = MLP(width, config.mlp_hidden_size, width)

    def forward(self, x: Tensor, bias: Bias) -> Tensor:
        x = x + self.attn(self.attn_norm(x), bias)
        return x + self.mlp(self.mlp_norm(x))


class LiLiCorrHead(LatticeHead):
    """Scores of neighbouring candidates, each formed in sight of the whole lattice.

    Parameters at the paper's settings: 36,758,794 for H = 4096 and 32,040,202 for H = 2560.
    """

    prefix = "lilicorr."

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        if not isinstance(config.head, LiLiCorrConfig):
            raise TypeError(f"LiLiCorrHead needs a LiLiCorrConfig, got {type(config.head).__name__}")
        head = config.head
        self.config = head
        self.max_slots, self.block_size = config.num_slots, config.block_size
        hidden, width, eps = config.hidden_size, head.hidden_size, config.rms_norm_eps

        self.token_proj = nn.Identity() if width == hidden else nn.Linear(hidden, width)
        self.pass_hidden_proj = nn.Linear(hidden, width)
        self.feature_norm = nn.LayerNorm(NUM_FEATURES, eps=FEATURE_NORM_EPS)
        self.feature_mlp = MLP(NUM_FEATURES, width, width)
        self.slot_embedding = nn.Parameter(torch.empty(1, 1, self.max_slots, 1, width))
        self.rank_embedding = nn.Parameter(torch.empty(1, 1, 1, head.candidate_topk, width))

        self.relative_slot_bias = nn.Parameter(torch.empty(head.num_heads, 2 * self.block_size - 1))
        self.same_slot_bias = nn.Parameter(torch.empty(head.num_heads))
        self.layers = nn.ModuleList(LatticeLayer(head, eps) for _ in range(head.num_layers))
        self.output_norm = RMSNorm(width, eps)

        self.context_proj = nn.Linear(hidden, width)
        self.anchor_norm = RMSNorm(width, eps)
        self.factor_input_proj = nn.Linear(3 * width, width)
        self.out_head = nn.Linear(width, head.factor_dim)
        self.in_head = nn.Linear(width, head.factor_dim)
        self.anchor_out_head = nn.Linear(width, head.factor_dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise as the paper's trainer does: Linears N(0, 0.02) with zero bias, the fused in_proj Xavier-uniform,
        slot and rank tables and attention biases zero. The vector heads are never zero: a product of two zero vectors
        would have no gradient."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
            elif isinstance(module, LatticeAttention):
                nn.init.xavier_uniform_(module.in_proj_weight)
                nn.init.zeros_(module.in_proj_bias)
            elif isinstance(module, RMSNorm):
                nn.init.ones_(module.weight)
        self.feature_norm.reset_parameters()
        for table in (self.slot_embedding, self.rank_embedding, self.relative_slot_bias, self.same_slot_bias):
            nn.init.zeros_(table)

    def forward(
        self,
        token_embeddings: Tensor,
        candidate_log_probs: Tensor,
        slot_hidden: Tensor,
        anchor_hidden: Tensor,
        anchor_valid: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return (start [N, K], pair [N, S-1, K, K]): sigma times the cosines, in fp32 (fp64 in fp64).

        token_embeddings [N, S, K, H]: the target's input embedding of every candidate; candidate_log_probs [N, S, K]:
        full-vocabulary log-probabilities in rank order; slot_hidden [N, S, H]: the backbone's d_s; anchor_hidden [N, H]:
        the context feature of the last position before the anchor; anchor_valid [N] bool: False where there is none (the
        row may then hold anything). Raises ValueError on shapes that do not fit.
        """
        anchor_out, out, incoming = self.vectors(token_embeddings, candidate_log_probs, slot_hidden, anchor_hidden, anchor_valid)
        sigma = self.config.logit_scale
        start = sigma * torch.einsum("nd,nkd->nk", anchor_out, incoming[:, 0])
        pair = sigma * (out[:, :-1] @ incoming[:, 1:].transpose(-1, -2))
        return start, pair

    def lattice(self, block: BlockStates, target: TargetVocabulary) -> tuple[Candidates, Tensor, Tensor]:
        found = ranked_candidates(target.logits(block.slot_hidden), self.config.candidate_topk)
        start, pair = self(target.embed(found.ids), found.log_probs, block.slot_hidden, block.anchor_hidden, block.anchor_valid)
        return found, start, pair

    def vectors(
        self,
        token_embeddings: Tensor,
        candidate_log_probs: Tensor,
        slot_hidden: Tensor,
        anchor_hidden: Tensor,
        anchor_valid: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the unit vectors o_anchor [N, d], o [N, S, K, d] and i [N, S, K, d] in fp32 (fp64 in fp64)."""
        self._check_shapes(token_embeddings, candidate_log_probs, slot_hidden, anchor_hidden, anchor_valid)
        slots = candidate_log_probs.shape[1]
        x = self.nodes(token_embeddings, candidate_log_probs, slot_hidden).flatten(1, 2)
        bias: Bias
        # Where kernels run, they compute what is differentiated; a compiler makes its own of torch's operations.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling() and has_kernels(x):
            # Copies: what attention keeps for its backward pass must outlive ZeRO's partitioning of the parameters (stage 3).
            bias = self.relative_slot_bias.clone(), self.same_slot_bias.clone()
        else:
            bias = self.attention_bias(slots)
        for layer in self.layers:
            x = layer(x, bias)
        x = self.output_norm(x)

        anchor = self.anchor(anchor_hidden, anchor_valid)
        row = anchor[:, None].expand_as(x)
        fused = F.silu(self.factor_input_proj(torch.cat((x, row, x * row), dim=-1)))
        fused = fused.unflatten(1, (slots, -1))
        return (
            self._unit(self.anchor_out_head(anchor)),
            self._unit(self.out_head(fused)),
            self._unit(self.in_head(fused)),
        )

    def nodes(self, token_embeddings: Tensor, candidate_log_probs: Tensor, slot_hidden: Tensor) -> Tensor:
        """Return the node [N, S, K, W] of every candidate: its token, its slot's state, its confidence, slot and rank."""
        slots = candidate_log_probs.shape[1]
        dtype = self.slot_embedding.dtype
        features = candidate_features(candidate_log_probs).to(dtype)
        return (
            self.token_proj(token_embeddings.to(dtype))
            + self.pass_hidden_proj(slot_hidden.to(dtype))[:, :, None]
            + self.feature_mlp(self.feature_norm(features))
            + self.slot_embedding[0, :, :slots]
            + self.rank_embedding[0]
        )

    def attention_bias(self, slots: int) -> Tensor:
        """Return the tower's additive attention bias [heads, S*K, S*K] for the leading `slots` slots."""
        slot = torch.arange(slots, device=self.relative_slot_bias.device).repeat_interleave(self.config.candidate_topk)
        distance = slot[:, None] - slot[None, :]
        relative = self.relative_slot_bias[:, distance + self.block_size - 1]
        return relative + self.same_slot_bias[:, None, None] * (distance == 0)

    def anchor(self, anchor_hidden: Tensor, anchor_valid: Tensor) -> Tensor:
        """Return the anchor's state a [N, W]; exactly zero where `anchor_valid` is False, whatever the row holds."""
        valid = anchor_valid[:, None]
        # Selected, not multiplied, and on both sides of the projection: a row of NaN reaches neither the scores (0 * NaN)
        # nor, through the outer product, the gradient of context_proj.
        rows = anchor_hidden.to(self.slot_embedding.dtype)
        projected = self.context_proj(rows.where(valid, torch.zeros_like(rows)))
        return self.anchor_norm(projected.where(valid, torch.zeros_like(projected)))

    def _unit(self, vectors: Tensor) -> Tensor:
        wide = vectors.to(torch.promote_types(vectors.dtype, torch.float32))
        return F.normalize(wide, dim=-1, eps=self.config.vector_eps)

    def _check_shapes(self, embeddings: Tensor, log_probs: Tensor, hidden: Tensor, anchor: Tensor, valid: Tensor) -> None:
        if log_probs.ndim != 3:
            raise ValueError(f"candidate_log_probs must be [N, S, K], got {tuple(log_probs.shape)}")
        n, slots, topk = log_probs.shape
        width = self.pass_hidden_proj.in_features
        if not 1 <= slots <= self.max_slots or topk != self.config.candidate_topk:
            raise ValueError(
                f"candidate_log_probs must be [N, 1..{self.max_slots}, {self.config.candidate_topk}], "
                f"got {tuple(log_probs.shape)}"
            )
        expected = (
            ("token_embeddings", embeddings, (n, slots, topk, width)),
            ("slot_hidden", hidden, (n, slots, width)),
            ("anchor_hidden", anchor, (n, width)),
            ("anchor_valid", valid, (n,)),
        )
        for name, tensor, shape in expected:
            if tensor.shape != shape:
                raise ValueError(f"{name} must be {shape}, got {tuple(tensor.shape)}")
        if valid.dtype != torch.bool:
            raise ValueError(f"anchor_valid must be bool, got {valid.dtype}")
