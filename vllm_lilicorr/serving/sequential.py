"""DSpark and Domino inside vLLM: one slot after another over the whole vocabulary, each corrected by the tokens before it.

The loop is a fixed sequence of launches, one turn a slot: it reads nothing back to the host and allocates what its turn needs,
so a CUDA graph holds it whole, as it holds the other methods' single walk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..model.heads import BlockStates, DominoHead, DSparkHead
from .head import DraftingHead, Step, write_live

Draw = Callable[[Tensor, int], tuple[Tensor, Tensor | None]]
"""From one slot's logits [N, V] and its number to tokens [N] and, where the runner is to have it, their distribution [N, V]."""


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

    def steps(self, block: BlockStates) -> Any:
        """Return an object with `correction(slot)`, what is added to the slot's logits [N, V] or None, and `read(tokens [N])`."""
        raise NotImplementedError

    def draft(self, block: BlockStates, rule: str, step: Step, options: dict[str, Any]) -> SequentialProposal:
        n, slots, _ = block.slot_hidden.shape
        with self.timing.part("candidates"):
            logits = self.model.full_logits(block.slot_hidden.flatten(0, 1)).unflatten(0, (n, slots))
        with self.timing.part("head and walk"):
            steps = None if rule == "argmax" else self.steps(block)
            draw = sampler(options, step.use_fp64) if rule == "sampled" else _argmax
            tokens, probs = [], []
            for slot in range(slots):
                # In full precision, as the reference: sums of bf16 logits would tie.
                row = logits[:, slot].float()
                added = None if steps is None else steps.correction(slot)
                row = row if added is None else row + added
                with self.timing.part("walk"):
                    chosen, distribution = draw(row, slot)
                if step.withheld is not None:
                    chosen = chosen.masked_fill(step.withheld, step.null_token)
                if step.observe is not None:
                    step.observe(row, slot)
                tokens.append(chosen)
                if distribution is not None:
                    probs.append(distribution)
                if steps is not None and slot + 1 < slots:
                    steps.read(chosen)
            drafted, dense = torch.stack(tokens, 1), torch.stack(probs, 1) if probs else None
            if step.withheld is not None and rule == "sampled":
                make_certain(step.withheld, step.null_token, dense, options.get("draft_logits"), options.get("rows"))
            self.rate(block, drafted, step.confidence_out)
            write_live(options.get("tokens_out"), drafted, options.get("rows"))
        return SequentialProposal(drafted, dense)

    def rate(self, block: BlockStates, tokens: Tensor, out: Tensor | None) -> None:
        """Write how likely each slot is accepted to `out` [>=N, S], where the head says so and somebody asks."""

    def dense(self, proposal: SequentialProposal) -> Tensor:
        assert proposal.probs is not None
        return proposal.probs


def _argmax(logits: Tensor, slot: int) -> tuple[Tensor, None]:
    return logits.argmax(-1), None


_CERTAIN = 1e30
"""A logit beside which, at any temperature vLLM accepts, every other has no mass, and which stays finite when divided by it."""


def make_certain(withheld: Tensor, token: int, probs: Tensor | None, table: Tensor | None, rows: Tensor | None) -> None:
    """Leave nothing but `token` in the distributions of the blocks where withheld [N] is set: in place, in probs [N, S, V] and in
    the verifier's logits, table [R, S, V] by state rows [N]. Of the table one column is touched, not the vocabulary."""
    if probs is not None:
        probs.masked_fill_(withheld[:, None, None], 0.0)
        probs[..., token].masked_fill_(withheld[:, None], 1.0)
    if table is not None and rows is not None:
        # The draw has just written these rows. Adding is right for padding too: it adds 0 to a row that another block may own.
        added = table.new_zeros(len(rows)).masked_fill_(withheld & (rows >= 0), _CERTAIN)
        column = table[:, :, token]
        column.index_add_(0, rows.clamp_min(0).long(), added[:, None].expand(-1, column.shape[1]))


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

    rows, positions = options["rows"].contiguous(), options["positions"]
    columns = torch.arange(positions.shape[1], dtype=torch.int32, device=positions.device)

    def draw(logits: Tensor, slot: int) -> tuple[Tensor, None]:
        tokens = gumbel_sample(
            logits, rows, temperature, options["seeds"], positions[:, slot], apply_temperature=True, is_drafting=True,
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

    def steps(self, block: BlockStates) -> Any:
        return _DSparkSteps(self.model.head, block.anchor_ids)

    @property
    def has_confidence(self) -> bool:
        return self.model.head.confidence_head is not None

    def rate(self, block: BlockStates, tokens: Tensor, out: Tensor | None) -> None:
        if out is not None and self.has_confidence:
            previous = torch.cat((block.anchor_ids[:, None], tokens[:, :-1]), 1)
            out[: len(tokens)] = self.model.head.confidence(block.slot_hidden, previous)


class _DSparkSteps:
    def __init__(self, head: DSparkHead, anchor_ids: Tensor) -> None:
        self.head, self.previous = head, anchor_ids

    def correction(self, slot: int) -> Tensor:
        return self.head.bias(self.previous)

    def read(self, tokens: Tensor) -> None:
        self.previous = tokens


class DominoDrafting(SequentialDrafting):
    """The GRU over the tokens committed so far."""

    def steps(self, block: BlockStates) -> Any:
        return _DominoSteps(self.model.head, block, self.model.embed_candidates)


class _DominoSteps:
    """The head's `begin`, `correction` and `read` for serving: what the slots' states contribute is computed for all slots at
    once, and the GRU is spelled out, because cuDNN's is a plan of its own that a captured graph would have to keep alive."""

    def __init__(self, head: DominoHead, block: BlockStates, embed: Callable[[Tensor], Tensor]) -> None:
        self.head, self.embed = head, embed
        first, _, self.out = head.embed_proj
        width = block.slot_hidden.shape[-1]
        self.of_state = first.weight[:, width:]
        self.of_hidden = F.linear(block.slot_hidden.to(first.weight.dtype), first.weight[:, :width])
        self.state = first.weight.new_zeros(len(block.anchor_ids), head.prefix_gru.hidden_size)
        self.read(block.anchor_ids)

    def correction(self, slot: int) -> Tensor | None:
        if slot < self.head.pure_prefix:
            return None
        return self.out(F.silu(self.of_hidden[:, slot] + F.linear(self.state, self.of_state)))

    def read(self, tokens: Tensor) -> None:
        gru = self.head.prefix_gru
        of_token = F.linear(self.embed(tokens).to(self.state.dtype), gru.weight_ih_l0).chunk(3, -1)
        of_state = F.linear(self.state, gru.weight_hh_l0).chunk(3, -1)
        reset, update = (torch.sigmoid(of_token[gate] + of_state[gate]) for gate in (0, 1))
        fresh = torch.tanh(of_token[2] + reset * of_state[2])
        self.state = fresh + update * (self.state - fresh)
