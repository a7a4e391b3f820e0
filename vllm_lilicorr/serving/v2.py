"""Drafting on vLLM's V2 model runner (a GPU; on a CPU with interpreted Triton): a `DFlashSpeculator` with our heads.

On a GPU the runner captures `_prepare_graph_forward` and `_generate_draft` in one FULL CUDA graph. So whatever they do here has
static shapes and addresses, reads nothing back to the host, and is inert for padded rows: those have request state -1, and the
head writes neither tokens nor proposals for them. The two supported releases differ in where the anchor's row is published
(before the graph, or inside it): one small class each.
"""

from __future__ import annotations

import inspect
import logging
import os
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

from ..errors import UserError
from ..model.heads import BlockStates
from .head import PLAIN_VARIABLE, Observer, Step, plain_head
from .hooks import served_options
from .methods import METHODS
from .model import served_draft
from .trace import DEBUG_VARIABLE, VARIABLE, Trace, debug

logger = logging.getLogger("vllm.vllm_lilicorr")


class DraftSpeculator(DFlashSpeculator):
    """Drafts by the served model's head; `draft_logits` holds the proposal of its sampled drafts."""

    _speculator_name = "vllm-lilicorr"

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        if getattr(vllm_config, "watermark_config", None) is not None:
            raise UserError("watermarking cannot be combined with a drafter of vllm-lilicorr: it draws no watermark; remove one")
        super().__init__(vllm_config, device)
        check_variables(device.type, vllm_config.compilation_config.cudagraph_mode)
        options = served_options(self.draft_model_config.hf_config)
        if options["confidence_threshold"]:
            logger.warning(
                "confidence_threshold has no effect on the V2 model runner, which verifies whole blocks; outputs are the same"
            )
        self.limit = options["max_len"]
        probabilistic = self.draft_logits is not None
        self.rule = "sampled" if probabilistic else options["path_rule"]
        # In the shifted layout the anchor's position drafts the first token, and a block has one row fewer.
        self.sample_from_anchor = served_draft(self.draft_model_config.hf_config).head.shifted
        self.num_query_per_req = self.num_speculative_steps + (0 if self.sample_from_anchor else 1)
        self.anchor_hidden = torch.zeros(self.max_num_reqs, self.hidden_size, dtype=self.dtype, device=device)
        self.anchor_valid = torch.zeros(self.max_num_reqs, dtype=torch.bool, device=device)
        self.trace = Trace.from_environment()
        self._proposal: Any = None

    def draft_logits_spec(self, vllm_config: VllmConfig) -> tuple[torch.dtype, float]:
        # In the precision it was drawn in. A walk writes the K candidates of a slot and nothing else.
        return torch.float32, -float("inf")

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> nn.Module:
        model = super().load_draft_model(target_model, target_attn_layer_names)
        model.check_vocabulary(target_model)
        model.lay_out_products()
        self.drafting = METHODS[type(model.draft.head)].build(model, self.max_num_reqs)
        model.set_block_width(self.num_query_per_req)
        # vLLM estimates acceptance from scores where no head was trained to say it.
        self.use_acceptance_estimator = self.enable_adaptive_verification and not self.drafting.has_confidence
        return model

    def _publish_anchor(self, num_reqs: int, query_start_loc: Tensor, num_rejected: Tensor) -> None:
        """Copy each request's last context feature before its anchor to the static buffers."""
        starts = query_start_loc[:num_reqs]
        ends = query_start_loc[1 : num_reqs + 1] - num_rejected[:num_reqs]
        rows = (ends - 1).clamp_min(0).long()
        self.anchor_hidden[:num_reqs].copy_(self.model.context_feature(self.hidden_states[rows]))
        self.anchor_valid[:num_reqs].copy_(ends > starts)

    def _past_limit(self, num_reqs: int) -> Tensor:
        """Return [num_reqs] bool: the block's last position lies at or past the drafter's limit (or the target's)."""
        last = self.sample_pos[: num_reqs * self.num_speculative_steps].view(num_reqs, -1)[:, -1]
        if self.sample_from_anchor:
            last = last - 1  # a row drafts the token behind it
        # vLLM's maximum can shrink after the speculator is built (automatic fitting to the memory).
        return last >= min(self.limit, self.max_model_len)

    def _generate_draft(
        self,
        num_reqs: int,
        num_tokens_padded: int,
        attn_metadata: dict[str, Any] | None,
        slot_mappings: dict[str, Tensor] | None,
        num_tokens_across_dp: Tensor | None,
        cudagraph_runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE,
    ) -> None:
        slots = self.num_speculative_steps
        count = num_reqs * slots
        past = self._past_limit(num_reqs)
        if slot_mappings is not None:
            # vLLM clamps queries past the block table into its last block, where they would overwrite context keys. The
            # mappings handed in are views of this buffer, so the pass below sees the change.
            for group in self.draft_kv_cache_group_ids:
                queries = self.block_tables.slot_mappings[group, : num_reqs * self.num_query_per_req].view(num_reqs, -1)
                queries.masked_fill_(past[:, None], PAD_SLOT_ID)
        hidden = self._run_model(num_tokens_padded, attn_metadata, slot_mappings, num_tokens_across_dp, cudagraph_runtime_mode)
        anchor_ids = self.input_buffers.input_ids[: num_reqs * self.num_query_per_req].view(num_reqs, -1)[:, 0]
        block = BlockStates(
            hidden[self.sample_indices[:count]].view(num_reqs, slots, -1),
            self.anchor_hidden[:num_reqs],
            self.anchor_valid[:num_reqs],
            anchor_ids.long(),
        )
        adaptive = self.enable_adaptive_verification
        step = Step(
            # The verifier checks a fixed number of drafts. A withheld row proposes the mask token with certainty: the target
            # never produces it, and what it does produce is distributed as without drafts.
            withheld=past,
            null_token=self.parallel_drafting_token_id,
            observe=self._observe(num_reqs, past) if self.use_acceptance_estimator else None,
            confidence_out=self.draft_token_confidence_probs if adaptive and self.drafting.has_confidence else None,
            use_fp64=self.use_fp64_gumbel,
        )
        self._proposal = self.drafting.propose(
            block,
            self.rule,
            step,
            rows=self.sample_idx_mapping[:count].view(num_reqs, slots)[:, 0],
            temperature=self.temperature,
            seeds=self.seeds,
            # A draw is keyed by the position before the drawn token, as vLLM's are.
            positions=self.sample_pos[:count].view(num_reqs, slots) - 1,
            tokens_out=self.draft_tokens,
            draft_logits=self.draft_logits,
        )
        if adaptive:
            # Nothing of a withheld row is worth verifying, and what is not verified teaches the estimator nothing.
            self.draft_token_confidence_probs[:num_reqs].masked_fill_(past[:, None], 0.0)

    def _observe(self, num_reqs: int, past: Tensor) -> Observer:
        """Return what hands vLLM's acceptance estimator the scores that decided, before temperature. It shares one slope between
        all requests, so it sees nothing of a row `past` [num_reqs] the limit: those are padding to it."""
        slots = self.num_speculative_steps
        rows = self.sample_idx_mapping[: num_reqs * slots].view(num_reqs, slots).masked_fill(past[:, None], -1)

        def observe(scores: Tensor, slot: int | None) -> None:
            if slot is None:
                self._maybe_predict_acceptance(scores, rows.flatten(), self.sample_col[: num_reqs * slots])
            else:
                self._maybe_predict_acceptance(scores, rows[:, slot], self.sample_col[slot])

        return observe

    def propose(
        self, input_batch: Any, *args: Any, dummy_run: bool = False, num_speculative_tokens: int | None = None, **kwargs: Any
    ) -> Tensor:
        """Return drafts [num_reqs, slots]; arguments as vLLM's."""
        drafts = super().propose(input_batch, *args, dummy_run=dummy_run, num_speculative_tokens=num_speculative_tokens, **kwargs)
        if self.trace is not None and not dummy_run:
            # Where no request wants a draft, vLLM 0.33 writes the context and hands back the drafts of the step before.
            drafted = num_speculative_tokens != 0
            self._record(input_batch, drafts, drafted, num_sampled=args[4], num_rejected=args[5])
        return drafts

    def _record(self, input_batch: Any, drafts: Tensor, drafted: bool, num_sampled: Tensor, num_rejected: Tensor) -> None:
        assert self.trace is not None
        count = len(drafts)
        asked = input_batch.num_draft_tokens_per_req
        asked = [0] * count if asked is None else asked[:count].tolist()
        positions = self.sample_pos.view(self.max_num_reqs, -1)[:count, 0] - 1
        withheld = self._past_limit(count).tolist()
        self.trace.step(
            list(input_batch.req_ids[:count]),
            [drafted and n > 0 for n in num_sampled[:count].tolist()],
            positions.tolist(),
            self._proposal.ids[:count].tolist() if drafted else [[]] * count,
            [[] if past else row for past, row in zip(withheld, drafts.tolist(), strict=True)],
            [n - lost if n else None for n, lost in zip(asked, num_rejected[:count].tolist(), strict=True)],
        )


class Speculator032(DraftSpeculator):
    """vLLM 0.32: the anchor is published eagerly, before the graph is replayed."""

    def prepare_context_anchor(self, input_batch: Any, num_rejected: Tensor) -> None:
        self._publish_anchor(input_batch.num_reqs, input_batch.query_start_loc, num_rejected)


class Speculator033(DraftSpeculator):
    """vLLM 0.33: the anchor is published inside the graph, from a count of rejections at a fixed address."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self._num_rejected = torch.zeros(self.max_num_reqs, dtype=torch.int32, device=device)

    def prepare_context_anchor(self, num_reqs: int, query_start_loc: Tensor, num_rejected: Tensor | None) -> None:
        assert num_rejected is not None
        self._publish_anchor(num_reqs, query_start_loc, num_rejected)


def check_variables(device: str, mode: CUDAGraphMode | None) -> None:
    """Raise UserError when a debugging variable is set that reads tensors back while this device drafts in a captured graph."""
    if device != "cuda" or mode is None or mode.decode_mode() != CUDAGraphMode.FULL:
        return
    asked = {DEBUG_VARIABLE: debug(), PLAIN_VARIABLE: plain_head(), VARIABLE: bool(os.environ.get(VARIABLE))}
    for name in (name for name, is_set in asked.items() if is_set):
        raise UserError(
            f"{name} reads back what a captured CUDA graph drafts, which it cannot; serve with --enforce-eager or unset it"
        )


def build_speculator(vllm_config: VllmConfig, device: torch.device) -> DraftSpeculator:
    """Return the speculator for the installed release."""
    inside_graph = "query_start_loc" in inspect.signature(DFlashSpeculator.prepare_context_anchor).parameters
    return (Speculator033 if inside_graph else Speculator032)(vllm_config, device)
