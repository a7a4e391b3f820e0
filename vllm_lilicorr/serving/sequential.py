"""DSpark and Domino inside vLLM: one slot after another over the whole vocabulary, each corrected by the tokens before it.

The loop is a fixed sequence of launches: it reads nothing back to the host, its workspace is allocated once, and what else it
needs comes from the graph's own pool, so a CUDA graph holds it whole, as it holds the other methods' single walk. A slot drafted
greedily is one launch for DSpark (`corrected_argmax`) and three for Domino (`gru_cell`, the bottleneck, `corrected_argmax`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_lilicorr.kernels.corrected_argmax import Best, Correction, corrected_argmax
from vllm_lilicorr.kernels.fused_linear import fused_linear
from vllm_lilicorr.kernels.gru_cell import gru_cell

from ..model.heads import BlockStates, DominoHead, DSparkHead
from .head import DraftingHead, Step, plain_head, write_live

Draw = Callable[[Tensor, int], tuple[Tensor, Tensor | None]]
"""From one slot's logits [N, V] and its number to tokens [N] and, where the runner is to have it, their distribution [N, V]."""

Correct = Callable[[int, Tensor], Correction | Tensor | None]
"""From a slot's number and the tokens [N] before it to what is added to its logits: a product, the sum itself [N, V], or nothing.
Called for every slot in order."""


@dataclass(frozen=True)
class SequentialProposal:
    """tokens, index [N, S], ids [N, S, 1] (the tokens: every token is a candidate), probs [N, S, V] of sampled drafts on V1."""

    tokens: Tensor
    probs: Tensor | None

    @property
    def index(self) -> Tensor:
        return torch.zeros_like(self.tokens)

    @property
    def ids(self) -> Tensor:
        return self.tokens[..., None]


class SequentialDrafting(DraftingHead):
    """Drafts left to right; a subclass says how the tokens chosen so far correct a slot."""

    def __init__(self, model: Any, max_blocks: int) -> None:
        super().__init__(model, max_blocks)
        self._plain = plain_head()
        with torch.inference_mode(False):
            self._best = Best.empty(max_blocks, next(model.head.parameters()).device)

    def correct(self, block: BlockStates) -> Correct:
        """Return what corrects the slots of these blocks."""
        raise NotImplementedError

    def draft(self, block: BlockStates, rule: str, step: Step, options: dict[str, Any]) -> SequentialProposal:
        n, slots, _ = block.slot_hidden.shape
        with self.timing.part("candidates"):
            logits = self.model.full_logits(block.slot_hidden.flatten(0, 1)).unflatten(0, (n, slots))
        with self.timing.part("head and walk"):
            correct = None if rule == "argmax" else readable(self.model, block) if self._plain else self.correct(block)
            draw = sampler(options, step.use_fp64) if rule == "sampled" else None
            drafted = torch.empty(n, slots, dtype=torch.int64, device=logits.device)
            # In full precision, as the reference: sums of bf16 logits would tie.
            shown = draw is not None or step.observe is not None
            scores = logits.new_empty(n, logits.shape[-1], dtype=torch.float32) if shown else None
            chosen, drawn, probs = block.anchor_ids, [], []
            for slot in range(slots):
                correction = None if correct is None else correct(slot, chosen)
                row = logits[:, slot]
                if isinstance(correction, Tensor):
                    row, correction = row.float() + correction, None
                with self.timing.part("walk"):
                    chosen = corrected_argmax(
                        row, correction, drafted[:, slot], self._best,
                        withheld=step.withheld, null_token=step.null_token, scores=scores,
                    )  # fmt: skip
                    if draw is not None and scores is not None:
                        chosen, distribution = draw(scores, slot)
                        drawn.append(chosen)
                        if distribution is not None:
                            probs.append(distribution)
                if step.observe is not None and scores is not None:
                    step.observe(scores, slot)
            drafted = torch.stack(drawn, 1) if drawn else drafted
            self.rate(block, drafted, step.confidence_out)
            write_live(options.get("tokens_out"), drafted, options.get("rows"))
        return SequentialProposal(drafted, torch.stack(probs, 1) if probs else None)

    def rate(self, block: BlockStates, tokens: Tensor, out: Tensor | None) -> None:
        """Write how likely each slot is accepted to `out` [>=N, S], where the head says so and somebody asks."""

    def dense(self, proposal: SequentialProposal) -> Tensor:
        assert proposal.probs is not None
        return proposal.probs


def readable(model: Any, block: BlockStates) -> Correct:
    """Return the corrections of the module that the trainer trains (LILICORR_PLAIN_HEAD=1)."""
    head, target = model.head, SimpleNamespace(embed=model.embed_candidates)
    state: Any = None

    def correct(slot: int, previous: Tensor) -> Tensor | None:
        nonlocal state
        state = head.read(state, previous, target) if slot else head.begin(block, target)
        return head.correction(state, slot, block)

    return correct


def sampler(options: dict[str, Any], use_fp64: bool) -> Draw:
    """Return how a slot is drawn from softmax(logits / temperature); rows with temperature 0 are greedy.

    With `uniforms` [N, S] in [0, 1), by the inverse of the cumulative distribution, which is returned. With `seeds` and
    `positions`, by vLLM's sampler of its V2 runner, which writes the logits into `draft_logits` for its verifier and does
    nothing for rows of state -1.
    """
    temperature = options["temperature"]
    if options.get("uniforms") is not None:
        return lambda logits, slot: draw_uniform(logits, temperature, options["uniforms"][:, slot])
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    # Contiguous once a block: the sampler would copy what is not, slot by slot.
    rows, positions = options["rows"].contiguous(), options["positions"].t().contiguous()
    columns = torch.arange(len(positions), dtype=torch.int32, device=positions.device)

    def draw(logits: Tensor, slot: int) -> tuple[Tensor, None]:
        tokens = gumbel_sample(
            logits, rows, temperature, options["seeds"], positions[slot], apply_temperature=True, is_drafting=True,
            logits_cache=options["draft_logits"], logits_cache_col=columns[slot], use_fp64=use_fp64,
        )  # fmt: skip
        return tokens, None

    return draw


def draw_uniform(logits: Tensor, temperature: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Return tokens [N] and the distribution [N, V] they are drawn from: softmax(logits / temperature), by uniforms [N] in
    [0, 1); a row with temperature 0 takes the argmax with certainty."""
    greedy = torch.zeros_like(logits).scatter_(1, logits.argmax(-1, keepdim=True), 1.0)
    # Relative to the maximum, so that a temperature near zero divides to 0 and -inf, never to NaN.
    tiny = torch.finfo(logits.dtype).tiny
    warm = ((logits - logits.amax(-1, keepdim=True)) / temperature.clamp_min(tiny)[:, None]).softmax(-1)
    probs = torch.where((temperature > 0)[:, None], warm, greedy)
    # In fp64 the running sum over the vocabulary resolves every token; the first to exceed the draw is never one of no mass.
    cumulative = probs.double().cumsum(-1)
    target = uniforms.double()[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True)[:, 0], probs


class DSparkDrafting(SequentialDrafting):
    """The bias of the token before; the confidence head, where the checkpoint has one, for vLLM's adaptive verification."""

    def correct(self, block: BlockStates) -> Correct:
        head: DSparkHead = self.model.head
        before, after = head.markov_head.markov_w1.weight, head.markov_head.markov_w2.weight
        return lambda slot, previous: Correction(before, after, previous)

    @property
    def has_confidence(self) -> bool:
        return self.model.head.confidence_head is not None

    def rate(self, block: BlockStates, tokens: Tensor, out: Tensor | None) -> None:
        if out is not None and self.has_confidence:
            previous = torch.cat((block.anchor_ids[:, None], tokens[:, :-1]), 1)
            out[: len(tokens)] = self.model.head.confidence(block.slot_hidden, previous)


class DominoDrafting(SequentialDrafting):
    """The GRU over the tokens committed so far."""

    def __init__(self, model: Any, max_blocks: int) -> None:
        super().__init__(model, max_blocks)
        head: DominoHead = model.head
        weight = head.embed_proj[0].weight
        with torch.inference_mode(False):
            # The state before a token and the one after it, in turn.
            self._states = weight.new_zeros(2, max_blocks, head.prefix_gru.hidden_size, requires_grad=False)
            self._bottleneck = weight.new_zeros(max_blocks, weight.shape[0], requires_grad=False)

    def correct(self, block: BlockStates) -> Correct:
        """The head's `begin`, `correction` and `read`: what the slots' states contribute is computed for all slots at once, and
        the GRU is our own, because cuDNN's is a plan that a captured graph would have to keep alive."""
        head: DominoHead = self.model.head
        gru, (first, _, out) = head.prefix_gru, head.embed_proj
        n, _, width = block.slot_hidden.shape
        of_hidden, of_state = first.weight[:, :width], first.weight[:, width:]
        added = F.linear(block.slot_hidden.to(first.weight.dtype), of_hidden)
        states, bottleneck = self._states[:, :n], self._bottleneck[:n]
        table = self.model.plain_embedding()
        states[1].zero_()

        def correct(slot: int, previous: Tensor) -> Correction | None:
            before, state = states[1 - slot % 2], states[slot % 2]
            x, ids = (self.model.embed_candidates(previous), None) if table is None else (table, previous)
            gru_cell(x, ids, before, gru.weight_ih_l0, gru.weight_hh_l0, state)
            if slot < head.pure_prefix:
                return None
            return Correction(fused_linear(state, of_state, added[:, slot], bottleneck, silu=True), out.weight)

        return correct
