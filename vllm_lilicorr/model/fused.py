"""The LiLiCorr head as it is served: one object from slot logits to committed tokens, every buffer allocated once.

`FusedLiLiCorrHead` is built from a `LiLiCorrHead` (the readable definition of every weight) and lays the same weights out for the
matrix products. It runs on CUDA with the Triton kernels of `vllm_lilicorr.kernels`, and on the CPU with their torch twins (or, under
`TRITON_INTERPRET=1`, with the interpreted kernels). It knows nothing of vLLM; the two shapes it is called in are

    CUDA graph, or interpreted engine            eager CPU engine
    ---------------------------------            ----------------
    fused.candidates(logits)                     fused.candidates_from_hidden(slot_hidden, lm_head)
    fused.propose(..., rule="sampled",           fused.propose(..., rule="sampled",
        rows=req_state_of_each_block,                temperature=temperature,
        temperature=per_state, seeds=per_state,      uniforms=torch.rand(N, S, generator=...))
        positions=slot_positions,                proposal.dense(vocab_size) -> [N, S, V] probabilities
        tokens_out=draft_tokens,
        draft_logits=..., cached_ids=...)

Nothing in `candidates` or `propose` synchronises with the host, has a data-dependent shape, or allocates anything that outlives the
call's own buffers, so both can be captured. Buffers are overwritten by the next call: what must survive has to be copied out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from vllm_lilicorr.kernels._triton import check_shape, use_triton
from vllm_lilicorr.kernels.anchor_fusion import anchor_operand
from vllm_lilicorr.kernels.bias_silu import bias_silu
from vllm_lilicorr.kernels.fused_linear import Norm, fused_linear
from vllm_lilicorr.kernels.lattice_attention import lattice_attention, lattice_bias
from vllm_lilicorr.kernels.lattice_nodes import FeatureWeights, lattice_nodes
from vllm_lilicorr.kernels.linear import PackedLinear
from vllm_lilicorr.kernels.rms_norm import rms_norm
from vllm_lilicorr.kernels.score_and_walk import DraftLogits, Randomness, Walked, score_and_walk
from vllm_lilicorr.kernels.topk_logprobs import merge_topk, topk_logprobs, topk_shard
from vllm_lilicorr.model.heads.lilicorr import LiLiCorrHead

FUSED_ROWS = 256
"""Most nodes (N * S * K) of a call whose products are fused, where that is asked for: small tiles read operands too often beyond."""

_CHUNK = 32  # blocks the tower takes at a time: enough to fill a GPU, and what bounds the workspace


@dataclass(frozen=True)
class FusedProposal:
    """One drafted batch of N blocks; every tensor is a view of a static buffer of the head that made it.

    tokens      [N, S]    int64    committed token ids
    index       [N, S]    int64    their rank among the slot's candidates
    ids         [N, S, K] int64    candidate token ids in rank order
    log_probs   [N, S, K] float32  their full-vocabulary log-probabilities under the drafter
    scores      [N, S, K] float32  z_s: scores of the slot's candidates given the committed predecessor, before temperature
    probs       [N, S, K] float32  the proposal the verifier must be given on those K ids, zero elsewhere: softmax(z_s / T) under
                                   "sampled" (one-hot where T = 0), one-hot under the other rules
    """

    tokens: torch.Tensor
    index: torch.Tensor
    ids: torch.Tensor
    log_probs: torch.Tensor
    scores: torch.Tensor
    probs: torch.Tensor

    def dense(self, vocab_size: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """Returns probs as [N, S, vocab_size] float32, zero off the candidates (a fresh tensor, or `out` overwritten).

        Where a slot holds an id more than once its probabilities add up.
        """
        shape = (*self.tokens.shape, vocab_size)
        out = self.probs.new_zeros(shape) if out is None else out.zero_()
        check_shape("out", out, *shape)
        return out.scatter_add_(-1, self.ids, self.probs)


class _Layer(NamedTuple):
    """One tower layer, laid out. The offsets are the biases the residual stream lacks where each norm reads it (None on the CPU, whose
    products add them)."""

    attn_norm: torch.Tensor
    attn_offset: torch.Tensor | None
    qkv: PackedLinear
    out: PackedLinear
    mlp_norm: torch.Tensor
    mlp_offset: torch.Tensor | None
    up: PackedLinear
    down: PackedLinear
    out_bias: torch.Tensor
    down_bias: torch.Tensor


class FusedLiLiCorrHead:
    """The head's weights laid out for serving, with the buffers of up to `max_blocks` concurrent blocks.

    head        the readable module; its weights are copied (converted to `dtype`), it is not kept
    max_blocks  largest N of any call (vLLM: max_num_seqs)
    num_slots   S of every call, 1 <= S <= block_size - 1 (vLLM: num_speculative_tokens); default block_size - 1
    device, dtype  where and in what the head computes (bfloat16, float16, float32); default: the module's own
    products    "library": every matrix product is cuBLAS's. "fused": with at most FUSED_ROWS nodes in a call, the tower's are Triton's with
                their norms and epilogues inside, 18 launches instead of 27. Which is faster is for `python -m vllm_lilicorr.bench head`
                to say on the GPU at hand; without a GPU it changes nothing (but in the interpreter).
    """

    _projected: torch.Tensor | None

    def __init__(
        self,
        head: LiLiCorrHead,
        *,
        max_blocks: int,
        num_slots: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        products: str = "library",
    ) -> None:
        if products not in ("library", "fused"):
            raise ValueError(f"products must be 'library' or 'fused', got '{products}'")
        self.products = products
        # Called with the name of a part of `propose` ("walk"), for a caller that times it.
        self.timed: Callable[[str], AbstractContextManager[Any]] = nullcontext
        own = head.slot_embedding
        self.device = torch.device(own.device if device is None else device)
        self.dtype = own.dtype if dtype is None else dtype
        self.num_slots = head.max_slots if num_slots is None else num_slots
        self.max_blocks = max_blocks
        if self.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise ValueError(f"the serving head computes in bfloat16, float16 or float32, not {self.dtype}")
        self.max_slots = head.max_slots
        if not 1 <= self.num_slots <= self.max_slots:
            raise ValueError(f"num_slots must lie in 1..{self.max_slots} (the trained block), got {self.num_slots}")
        if max_blocks < 1:
            raise ValueError(f"max_blocks must be positive, got {max_blocks}")
        config = head.config
        self.topk, self.width, self.factor_dim = config.candidate_topk, config.hidden_size, config.factor_dim
        self.num_heads, self.hidden = config.num_heads, head.pass_hidden_proj.in_features
        self.sigma, self.vector_eps, self.norm_eps = config.logit_scale, config.vector_eps, head.output_norm.eps
        with torch.inference_mode(False), torch.no_grad():
            self._lay_out(head)
            self._allocate()
        self._vocab_size = 0  # of the candidates at hand

    def for_slots(self, num_slots: int) -> FusedLiLiCorrHead:
        """Returns a head for another draft length, with its own buffers and the same weights (nothing is copied)."""
        if not 1 <= num_slots <= self.max_slots:
            raise ValueError(f"num_slots must lie in 1..{self.max_slots} (the trained block), got {num_slots}")
        other = copy.copy(self)
        other.num_slots = num_slots
        with torch.inference_mode(False):
            other._allocate()
        return other

    def project_embedding(self, embedding: torch.Tensor) -> None:
        """Takes token_proj out of every later call: the frozen embedding [V, H] is projected here, once, and `propose` gathers from the result.

        It is kept as [V, W] in the head's dtype (Qwen3-8B: 311 MB), against a seventh of the head's arithmetic and 8 MB of its weights a
        call. `propose` then needs neither `embedding` nor `token_embeddings`, and ignores them. Heads made by `for_slots` afterwards share
        it. Does nothing where W = H. Raises ValueError if the embedding is not H wide.
        """
        check_shape("embedding", embedding, -1, self.hidden)
        if self.node_token is None:
            return
        with torch.inference_mode(False), torch.no_grad():
            projected = torch.empty(len(embedding), self.width, dtype=self.dtype, device=self.device)
            for rows, part in zip(projected.split(8192), embedding.detach().split(8192), strict=True):
                rows.copy_(self.node_token(part.to(self.device, self.dtype)))
        self._projected = projected

    def _lay_out(self, head: LiLiCorrHead) -> None:
        """Copies the weights into the shapes the products and kernels read."""

        def ours(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.detach().to(self.device, self.dtype, copy=True).contiguous()

        def linear(weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
            return PackedLinear(ours(weight), None if bias is None else ours(bias))

        # Where kernels run, the residual stream is kept without the biases of what is added to it; the norms add their sum.
        self.kernels = use_triton(torch.empty(0, device=self.device))
        lacking = torch.zeros(self.width, dtype=torch.float32, device=self.device)

        def residual(module: nn.Linear) -> PackedLinear:
            if self.kernels:
                lacking.add_(module.bias.detach().to(self.device, torch.float32))
            return linear(module.weight, None if self.kernels else module.bias)

        def offset() -> torch.Tensor | None:
            return lacking.clone() if self.kernels else None

        token_proj, down = head.token_proj, head.feature_mlp.down_proj
        self.projected = isinstance(token_proj, nn.Linear)
        node_bias = down.bias.float() + (token_proj.bias.float() if self.projected else 0.0)
        positions = head.slot_embedding[0, 0].float() + head.rank_embedding[0, 0].float() + node_bias
        self.positions = ours(positions.flatten(0, 1))
        # [token_proj | down_proj] in one, and its two parts.
        weight = ours(torch.cat([token_proj.weight, down.weight], dim=1) if self.projected else down.weight)
        self.node = PackedLinear(weight, None) if self.kernels and self.projected else None
        self.node_feature = PackedLinear(weight[:, -self.width :], None)
        self.node_token = PackedLinear(weight[:, : -self.width], None) if self.projected else None
        self._projected = None
        self.features = FeatureWeights(
            ours(head.feature_norm.weight), ours(head.feature_norm.bias),
            ours(head.feature_mlp.up_proj.weight.t()), ours(head.feature_mlp.up_proj.bias),
        )  # fmt: skip
        self.slot_states = linear(head.pass_hidden_proj.weight, head.pass_hidden_proj.bias)

        self.relative_slot_bias, self.same_slot_bias = ours(head.relative_slot_bias), ours(head.same_slot_bias)
        self.layers = []
        for layer in head.layers:
            attn_offset, out = offset(), residual(layer.attn.out_proj)
            mlp_offset, down = offset(), residual(layer.mlp.down_proj)
            self.layers.append(
                _Layer(
                    ours(layer.attn_norm.weight), attn_offset, linear(layer.attn.in_proj_weight, layer.attn.in_proj_bias), out,
                    ours(layer.mlp_norm.weight), mlp_offset, linear(layer.mlp.up_proj.weight, layer.mlp.up_proj.bias), down,
                    ours(layer.attn.out_proj.bias), ours(layer.mlp.down_proj.bias),
                )
            )  # fmt: skip
        self.output_norm, self.output_offset = ours(head.output_norm.weight), offset()

        self.context = linear(head.context_proj.weight, head.context_proj.bias)
        self.anchor_norm = ours(head.anchor_norm.weight)
        of_node, of_anchor, of_product = head.factor_input_proj.weight.split(self.width, dim=1)
        # [W_a; anchor_out_head]: both read the anchor's state. The fusion's bias rides along.
        self.anchor = linear(
            torch.cat((of_anchor, head.anchor_out_head.weight)), torch.cat((head.factor_input_proj.bias, head.anchor_out_head.bias))
        )
        self.fusion = linear(torch.cat((of_node, of_product), dim=1), None)
        self.vectors = linear(
            torch.cat((head.out_head.weight, head.in_head.weight)), torch.cat((head.out_head.bias, head.in_head.bias))
        )

    def _allocate(self) -> None:
        """Allocates what a call returns, for max_blocks blocks, and the tower's workspace, for one chunk of them."""
        n, slots, topk = self.max_blocks, self.num_slots, self.topk
        self._ids = torch.zeros(n, slots, topk, dtype=torch.int64, device=self.device)
        self._log_probs = torch.zeros(n, slots, topk, dtype=torch.float32, device=self.device)
        self._walked = Walked.empty(n, slots, topk, self.device)
        chunk = min(n, _CHUNK)
        rows, mlp = chunk * slots * topk, self.layers[0].up.out_features if self.layers else 0

        def buffer(*shape: int) -> torch.Tensor:
            return torch.empty(*shape, dtype=self.dtype, device=self.device)

        # The kernel adds the two tables itself.
        self.attention_bias = None if self.kernels else lattice_bias(self.relative_slot_bias, self.same_slot_bias, slots, topk)

        self._stream, self._fused = buffer(rows, self.width), buffer(rows, 2 * self.width)
        hidden = self.hidden if self.projected else 0
        # Side by side where one product reads both.
        self._operand = buffer(rows, hidden + self.width) if self.node is not None else None
        self._tokens = self._operand[:, :hidden] if self._operand is not None else buffer(rows, hidden) if hidden else None
        self._active = self._operand[:, hidden:] if self._operand is not None else buffer(rows, self.width)
        # The anchor's branch needs nothing of the tower until the end: it runs beside it.
        self._side = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        if self.kernels:
            self._slot_states, self._context, self._anchor_state = (buffer(r, self.width) for r in (chunk * slots, chunk, chunk))
            self._anchor = buffer(chunk, self.width + self.factor_dim)
            self._normed, self._attended = buffer(rows, self.width), buffer(rows, self.width)
            self._qkv, self._mlp, self._vectors = buffer(rows, 3 * self.width), buffer(rows, mlp), buffer(rows, 2 * self.factor_dim)

    def _rows(self, name: str, rows: int) -> torch.Tensor | None:
        """Returns the leading `rows` of a workspace buffer; None on the CPU, whose products return their own."""
        return getattr(self, name)[:rows] if self.kernels else None

    # --- candidates -------------------------------------------------------------------------------------------------

    def candidates(self, logits: torch.Tensor, *, vocab_size: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the top-K of each slot, ids [N, S, K] int64 and full-vocabulary log-probabilities [N, S, K] float32 (static).

        logits [N*S, C >= vocab_size], bf16/fp16/fp32, last dimension contiguous; columns from `vocab_size` on are ignored (padding).
        Ties go to the lower id.
        """
        n = self._blocks_of("logits", logits)
        self._vocab_size = logits.shape[1] if vocab_size is None else vocab_size
        topk_logprobs(logits, self.topk, vocab_size, self._flat_candidates(0, n))
        return self._ids[:n], self._log_probs[:n]

    def candidates_from_hidden(
        self,
        slot_hidden: torch.Tensor,
        lm_head: torch.Tensor | Callable[[torch.Tensor], torch.Tensor],
        *,
        vocab_size: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns what `candidates` does, from slot_hidden [N, S, H] and the output head, a weight [C, H] or a callable
        [rows, H] -> logits [rows, C]; never holds the logits of more than a few dozen blocks."""
        n = slot_hidden.shape[0]
        check_shape("slot_hidden", slot_hidden, -1, self.num_slots, self.hidden)
        self._check_blocks("slot_hidden", n)
        for start in range(0, n, _CHUNK):
            stop = min(start + _CHUNK, n)
            rows = slot_hidden[start:stop].flatten(0, 1)
            logits = F.linear(rows.to(lm_head.dtype), lm_head) if isinstance(lm_head, torch.Tensor) else lm_head(rows)
            topk_logprobs(logits, self.topk, vocab_size, self._flat_candidates(start, stop))
            self._vocab_size = logits.shape[1] if vocab_size is None else vocab_size
        return self._ids[:n], self._log_probs[:n]

    def shard_candidates(self, logits: torch.Tensor, *, vocab_start: int, vocab_size: int | None = None) -> torch.Tensor:
        """Returns one vocabulary shard's candidates as a packed [N*S, 2K+2] float32 tensor (bit patterns of K ids, K logits, the
        shard's log-sum-exp): all-gather it over the tensor-parallel ranks and hand [R, N*S, 2K+2] to `merge_candidates`.

        logits [N*S, C]: the shard's columns, column c being token vocab_start + c; `vocab_size` of them are real.
        """
        self._blocks_of("logits", logits)
        ids, values, lse = topk_shard(logits, self.topk, vocab_start, vocab_size)
        return torch.cat((ids.int().view(torch.float32), values, lse), dim=1)

    def merge_candidates(self, gathered: torch.Tensor, *, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns what `candidates` would return on the whole vocabulary, from the gathered shards [R, N*S, 2K+2]."""
        check_shape("gathered", gathered, -1, -1, 2 * self.topk + 2)
        n = self._blocks_of("gathered", gathered[0])
        ids, values, lse = gathered.split((self.topk, self.topk, 2), dim=-1)
        merge_topk(ids.view(torch.int32), values, lse, self._flat_candidates(0, n))
        self._vocab_size = vocab_size
        return self._ids[:n], self._log_probs[:n]

    def _flat_candidates(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._ids[start:stop].flatten(0, 1), self._log_probs[start:stop].flatten(0, 1)

    def _blocks_of(self, name: str, rows: torch.Tensor) -> int:
        """Returns N of a tensor of N*S rows."""
        if rows.ndim != 2 or rows.shape[0] % self.num_slots:
            raise ValueError(f"{name} must have a multiple of {self.num_slots} rows (one a slot), got {list(rows.shape)}")
        self._check_blocks(name, rows.shape[0] // self.num_slots)
        return rows.shape[0] // self.num_slots

    def _check_blocks(self, name: str, n: int) -> None:
        if not 1 <= n <= self.max_blocks:
            raise ValueError(f"{name} holds {n} blocks; this head was built for 1..{self.max_blocks} (max_blocks)")

    def _check_vocabulary(self, embedding: torch.Tensor) -> None:
        if embedding.shape[0] < self._vocab_size:
            raise ValueError(f"embedding has {embedding.shape[0]} rows, but candidates come from {self._vocab_size} tokens")

    # --- scores and tokens ------------------------------------------------------------------------------------------

    def propose(
        self,
        slot_hidden: torch.Tensor,
        anchor_hidden: torch.Tensor,
        anchor_valid: torch.Tensor,
        *,
        embedding: torch.Tensor | None = None,
        token_embeddings: torch.Tensor | None = None,
        rule: str = "greedy",
        temperature: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
        uniforms: torch.Tensor | None = None,
        seeds: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        tokens_out: torch.Tensor | None = None,
        draft_logits: torch.Tensor | None = None,
        cached_ids: torch.Tensor | None = None,
    ) -> FusedProposal:
        """Returns the drafted blocks, scoring and walking the candidates found by the last `candidates*`/`merge_candidates` call.

        slot_hidden [N, S, H]    d_s, the drafter's final-normed states of the slots
        anchor_hidden [N, H]     context feature of the last position before the anchor (hidden_norm applied)
        anchor_valid [N] bool    False where the block has no context; that row of anchor_hidden may hold anything
        embedding [>=V, H]       the target's input embedding, gathered here; or, where it is sharded,
        token_embeddings [N, S, K, H]  the rows of `ids`, gathered by the caller. Neither after `project_embedding`
        rule                     "greedy" | "sampled" | "exact" | "exact-normalized"
        rows [N] int             state row of each block (any stride), -1 for an inert padded block: nothing is written for it.
                                 Default: block n is row n
        temperature [R] float32  by state row; "sampled" only. A row with temperature 0 is greedy
        uniforms [N, S] float32  the draws, in [0, 1); or
        seeds [R] int64, positions [N, S] int64  Philox key by state row and counter by slot, so a draw depends on (seed, position) alone
        tokens_out [N, S] int64  where to write the tokens too (vLLM's draft_tokens)
        draft_logits [R, S, >=V] float32 and cached_ids [R, S, K] int64  the proposal in the layout the V2 rejection sampler reads: under
                                 "sampled" `scores` at the K ids of the block's state row (the sampler applies the temperature), under
                                 the other rules 0 at the token; -inf elsewhere. The ids written last time (cached_ids, zeros at
                                 first) are reset. draft_logits must start as all -inf.

        Raises ValueError on shapes that do not fit, an unknown rule, or "sampled" without temperature and draws.
        """
        n = slot_hidden.shape[0]
        self._check_blocks("slot_hidden", n)
        check_shape("slot_hidden", slot_hidden, n, self.num_slots, self.hidden)
        check_shape("anchor_hidden", anchor_hidden, n, self.hidden)
        check_shape("anchor_valid", anchor_valid, n)
        if self._projected is not None:
            embedding, token_embeddings = None, None
            self._check_vocabulary(self._projected)
        elif (embedding is None) == (token_embeddings is None):
            raise ValueError("give either embedding (the whole table) or token_embeddings (the candidates' rows)")
        if embedding is not None:
            check_shape("embedding", embedding, -1, self.hidden)
            self._check_vocabulary(embedding)
        elif token_embeddings is not None:
            check_shape("token_embeddings", token_embeddings, n, self.num_slots, self.topk, self.hidden)
        if (draft_logits is None) != (cached_ids is None):
            raise ValueError("draft_logits and cached_ids go together: the second says what to clear in the first")
        table = None if draft_logits is None or cached_ids is None else DraftLogits(draft_logits, cached_ids)

        for start in range(0, n, _CHUNK):
            part = slice(start, min(start + _CHUNK, n))
            vectors, anchor = self._tower(
                part,
                slot_hidden[part],
                anchor_hidden[part],
                anchor_valid[part],
                embedding,
                None if token_embeddings is None else token_embeddings[part],
            )
            out, incoming = vectors.split(self.factor_dim, dim=1)
            with self.timed("walk"):
                walk_part(
                    part, out, incoming, anchor[:, self.width :], self._ids, rule, self.sigma, self.vector_eps, self._walked, rows, temperature,
                    Randomness(uniforms, seeds, positions), tokens_out, table,
                )  # fmt: skip
        w = self._walked
        return FusedProposal(w.tokens[:n], w.index[:n], self._ids[:n], self._log_probs[:n], w.scores[:n], w.probs[:n])

    def _tower(
        self,
        part: slice,
        slot_hidden: torch.Tensor,
        anchor_hidden: torch.Tensor,
        anchor_valid: torch.Tensor,
        embedding: torch.Tensor | None,
        token_embeddings: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the out and in vectors [n*S*K, 2d] of one chunk's candidates, before normalisation, and [W_a a + b, anchor_out] [n, W+d]."""
        n, slots, _ = slot_hidden.shape
        buffer = self._rows
        with self._beside():
            context = self.context(anchor_hidden.to(self.dtype), buffer("_context", n))
            state = rms_norm(context, self.anchor_norm, self.norm_eps, valid=anchor_valid, out=buffer("_anchor_state", n))
            anchor = self.anchor(state, buffer("_anchor", n))

        states = self.slot_states(slot_hidden.flatten(0, 1).to(self.dtype), buffer("_slot_states", n * slots))
        x = self._nodes(self._ids[part], self._log_probs[part], states, embedding, token_embeddings)
        fuse = self.kernels and self.products == "fused" and len(x) <= FUSED_ROWS
        x = (self._layers_fused if fuse else self._layers)(x, n)
        self._join()
        row = anchor[:, : self.width]
        if fuse:
            # The attention's buffer is done with, and takes the fusion.
            norm, weight = Norm(self.output_norm, self.norm_eps), self.fusion.weight
            g = fused_linear(x, weight, row, self._attended[: len(x)], norm=norm, anchor=state, silu=True)
        else:
            fused = anchor_operand(x, self.output_offset, self.output_norm, self.norm_eps, state, self._fused[: len(x)])
            # The residual stream is done with.
            g = bias_silu(self.fusion(fused, self._stream[: len(x)]), row)
        return self.vectors(g, buffer("_vectors", len(x))), anchor

    def _beside(self) -> AbstractContextManager[Any]:
        """Returns a context whose work goes to a second stream on CUDA: nothing until `_join` waits for it. A capture follows."""
        if self._side is None:
            return nullcontext()
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self._side)

    def _join(self) -> None:
        if self._side is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._side)

    def _attend(self, layer: _Layer, qkv: torch.Tensor, n: int) -> torch.Tensor:
        """Returns the attended values [n*S*K, W] of qkv [n*S*K, 3W]."""
        out = self._rows("_attended", len(qkv))
        q, k, v = qkv.view(n, -1, 3, self.num_heads, self.width // self.num_heads).unbind(2)
        attended = lattice_attention(
            q, k, v, self.relative_slot_bias, self.same_slot_bias, self.topk, None if out is None else out.view(q.shape), self.attention_bias
        )
        return attended.view(len(qkv), self.width)

    def _layers(self, x: torch.Tensor, n: int) -> torch.Tensor:
        """Returns the residual stream [n*S*K, W] after the tower's layers (where kernels run, without the residual branches' biases)."""
        rows, buffer = len(x), self._rows
        for layer in self.layers:
            y = rms_norm(x, layer.attn_norm, self.norm_eps, layer.attn_offset, out=buffer("_normed", rows))
            x = layer.out.add_to(x, self._attend(layer, layer.qkv(y, buffer("_qkv", rows)), n))
            y = rms_norm(x, layer.mlp_norm, self.norm_eps, layer.mlp_offset, out=buffer("_normed", rows))
            x = layer.down.add_to(x, layer.up.silu(y, buffer("_mlp", rows)))
        return x

    def _layers_fused(self, x: torch.Tensor, n: int) -> torch.Tensor:
        """Returns the residual stream after the tower's layers, with all biases, five launches a layer."""
        qkv, mlp = self._qkv[: len(x)], self._mlp[: len(x)]
        for layer in self.layers:
            fused_linear(x, layer.qkv.weight, layer.qkv.bias, qkv, norm=Norm(layer.attn_norm, self.norm_eps))
            fused_linear(self._attend(layer, qkv, n), layer.out.weight, layer.out_bias, x, add=True)
            fused_linear(x, layer.up.weight, layer.up.bias, mlp, norm=Norm(layer.mlp_norm, self.norm_eps), silu=True)
            fused_linear(mlp, layer.down.weight, layer.down_bias, x, add=True)
        return x

    def _nodes(
        self,
        ids: torch.Tensor,
        log_probs: torch.Tensor,
        states: torch.Tensor,
        embedding: torch.Tensor | None,
        token_embeddings: torch.Tensor | None,
    ) -> torch.Tensor:
        """Returns the node tensor [n*S*K, W]."""
        rows = ids.numel()
        given = None if token_embeddings is None else token_embeddings.flatten(0, 2).to(self.dtype)
        tokens = self._tokens[:rows] if self._tokens is not None else None
        if self._projected is not None:
            embedding, tokens = self._projected, None
        elif given is not None and not self.projected:
            # They go to the sum itself: row r of what was given is "token" r.
            embedding, ids, given = given, torch.arange(rows, device=self.device).view_as(ids), None
        active, x = self._active[:rows], self._stream[:rows]
        lattice_nodes(ids, log_probs, embedding, states, self.positions, self.features, tokens, active, x)
        if self.node is not None and given is None and tokens is not None:
            assert self._operand is not None
            return self.node.add_to(x, self._operand[:rows])
        x = self.node_feature.add_to(x, active)
        factor = given if given is not None else tokens
        return x if self.node_token is None or factor is None else self.node_token.add_to(x, factor)


def walk_part(
    part: slice,
    out: torch.Tensor,
    incoming: torch.Tensor,
    anchor: torch.Tensor,
    ids: torch.Tensor,
    rule: str,
    sigma: float,
    eps: float,
    walked: Walked,
    rows: torch.Tensor | None,
    temperature: torch.Tensor | None,
    random: Randomness,
    tokens_out: torch.Tensor | None,
    table: DraftLogits | None,
) -> None:
    """Does `score_and_walk` for the blocks `part` of a call. out, incoming and anchor are those blocks' own; the rest is the whole call's."""
    uniforms, seeds, positions = random
    if rows is None:
        # Block n is state row n, and state rows are counted from the batch's start, not from the part's.
        start = part.start
        temperature, seeds = _from(temperature, start), _from(seeds, start)
        table = None if table is None else DraftLogits(table.table[start:], table.cached_ids[start:])
    score_and_walk(
        out, incoming, anchor, ids[part], rule, sigma, eps, Walked(*(buffer[part] for buffer in walked)), _part(rows, part), temperature,
        Randomness(_part(uniforms, part), seeds, _part(positions, part)), _part(tokens_out, part), table,
    )  # fmt: skip


def _part(tensor: torch.Tensor | None, part: slice) -> torch.Tensor | None:
    return None if tensor is None else tensor[part]


def _from(tensor: torch.Tensor | None, start: int) -> torch.Tensor | None:
    return None if tensor is None else tensor[start:]
