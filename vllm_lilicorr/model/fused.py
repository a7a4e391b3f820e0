"""The LiLiCorr head as it is served: one object from slot logits to committed tokens, every buffer allocated once.

`FusedLiLiCorrHead` is built from a `LiLiCorrHead` (the readable definition of every weight) and lays the same weights out for the
matrix products. It runs on CUDA with the Triton kernels of `vllm_lilicorr.kernels`, and on the CPU with their torch twins (or, under
`TRITON_INTERPRET=1`, with the interpreted kernels). It knows nothing of vLLM; the two shapes it is called in are

    CUDA graph, or interpreted engine            eager CPU engine
    ---------------------------------            ----------------
    fused.candidates(logits)                     fused.candidates(logits)
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

from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_lilicorr.model.heads.lilicorr import LiLiCorrHead


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
        """Returns probs as [N, S, vocab_size] float32, zero off the candidates (a fresh tensor, or `out` overwritten)."""
        raise NotImplementedError


class FusedLiLiCorrHead:
    """The head's weights laid out for serving, with the buffers of up to `max_blocks` concurrent blocks.

    head        the readable module; its weights are copied (converted to `dtype`), it is not kept
    max_blocks  largest N of any call (vLLM: max_num_seqs)
    num_slots   S of every call, 1 <= S <= block_size - 1 (vLLM: num_speculative_tokens); default block_size - 1
    device, dtype  where and in what the head computes (bfloat16, float16, float32); default: the module's own
    """

    def __init__(
        self,
        head: LiLiCorrHead,
        *,
        max_blocks: int,
        num_slots: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        raise NotImplementedError

    def candidates(
        self, logits: torch.Tensor, *, vocab_size: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the top-K of each slot, ids [N, S, K] int64 and full-vocabulary log-probabilities [N, S, K] float32 (static).

        logits [N*S, C >= vocab_size], bf16/fp16/fp32, last dimension contiguous; columns from `vocab_size` on are ignored (padding).
        Ties go to the lower id.
        """
        raise NotImplementedError

    def candidates_from_hidden(
        self, slot_hidden: torch.Tensor, lm_head: torch.Tensor | Callable[[torch.Tensor], torch.Tensor], *, vocab_size: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns what `candidates` does, from slot_hidden [N, S, H] and the output head, a weight [C, H] or a callable
        [rows, H] -> logits [rows, C]; never holds the logits of more than a few dozen blocks."""
        raise NotImplementedError

    def shard_candidates(self, logits: torch.Tensor, *, vocab_start: int, vocab_size: int | None = None) -> torch.Tensor:
        """Returns one vocabulary shard's candidates as a packed [N*S, 2K+1] float32 tensor (bit patterns of K ids, K logits, the
        shard's log-sum-exp): all-gather it over the tensor-parallel ranks and hand [R, N*S, 2K+1] to `merge_candidates`."""
        raise NotImplementedError

    def merge_candidates(self, gathered: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns what `candidates` would return on the whole vocabulary, from the gathered shards [R, N*S, 2K+1]."""
        raise NotImplementedError

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
        token_embeddings [N, S, K, H]  the rows of `ids`, gathered by the caller
        rule                     "greedy" | "sampled" | "exact" | "exact-normalized"
        rows [N] int             state row of each block (any stride), -1 for an inert padded block: nothing is written for it.
                                 Default: block n is row n
        temperature [R] float32  by state row; "sampled" only. A row with temperature 0 is greedy
        uniforms [N, S] float32  the draws, in [0, 1); or
        seeds [R] int64, positions [N, S] int64  Philox key by state row and counter by slot, so a draw depends on (seed, position) alone
        tokens_out [N, S] int64  where to write the tokens too (vLLM's draft_tokens)
        draft_logits [R, S, >=V] float32 and cached_ids [R, S, K] int64  the proposal in the layout the V2 rejection sampler reads:
                                 `scores` at the K ids of the block's state row, -inf elsewhere. The ids written last time (cached_ids,
                                 zeros at first) are reset to -inf. draft_logits must start as all -inf.
        """
        raise NotImplementedError
