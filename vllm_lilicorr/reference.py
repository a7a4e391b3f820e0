"""The reference decoder: speculative decoding in plain transformers, the oracle every faster path is tested against.

One decoder serves one prompt and a batch alike. All rows of a batch advance by one block at a time; both caches, the
target's and the drafter's, hold the same columns, and a column that some row rejected is a hole masked out for that row.
Columns every row rejected are cropped, so with one row there are no holes at all.

    python -m vllm_lilicorr.reference --target DIR --prompts FILE.jsonl --draft CKPT
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .chat import Conversation, read_prompts, render
from .errors import UserError, run_command
from .io import check_writable_file, write_file_atomically
from .model import Draft, Proposal
from .model.backbone import ContextKV, concat_context
from .model.checkpoint import load_draft
from .model.heads import BlockStates
from .target import Target, TargetShape, check_fits, load_target, load_tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Block:
    """One drafted and verified block: the anchor's absolute position, the drafted tokens, how many of them the verifier
    accepted (before any stop token or limit truncates), and the smallest margin that decided the draft."""

    anchor: int
    draft: tuple[int, ...]
    accepted: int
    margin: float


@dataclass
class Decoded:
    """What one prompt decoded to: output_ids; margins, the target's top-2 logit gap at each of them; the blocks verified."""

    output_ids: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)

    @property
    def accepted(self) -> list[int]:
        return [block.accepted for block in self.blocks]


def acceptance_length(accepted: Sequence[int]) -> float:
    """Return tau, (accepted draft tokens + blocks) / blocks, over all blocks together; NaN without blocks."""
    return (sum(accepted) + len(accepted)) / len(accepted) if accepted else float("nan")


@dataclass(frozen=True)
class Sampling:
    """How a run draws: temperature 0 is greedy. Drafting and verification have random streams of their own, so that drafting
    never consumes the verifier's."""

    temperature: float = 0.0
    seed: int = 0

    def stream(self, which: int) -> torch.Generator:
        return torch.Generator().manual_seed(2 * self.seed + which)


class ReferenceDecoder:
    """Decodes batches of prompts with a target and, unless rule is `none`, a drafter.

    rule: `none`, or one of the drafter head's rules. num_slots: draft only this many leading slots.
    """

    def __init__(
        self,
        target: Target,
        draft: Draft | None = None,
        rule: str = "none",
        sampling: Sampling = Sampling(),
        stop_ids: Sequence[int] = (),
        num_slots: int | None = None,
    ) -> None:
        if rule != "none" and draft is None:
            raise UserError(f"rule {rule} needs a drafter; name one with --draft, or use --rule none")
        if draft is not None and rule != "none" and rule not in draft.head.rules:
            raise UserError(f"rule {rule} is not offered by {draft.config.architecture}; it has {', '.join(draft.head.rules)}")
        self.target, self.rule, self.sampling = target, rule, sampling
        self.draft = None if rule == "none" else draft
        self.stop_ids = frozenset(stop_ids)
        self.num_slots = (num_slots or draft.config.num_slots) if draft is not None else 0
        self.draft_stream, self.verify_stream = sampling.stream(0), sampling.stream(1)

    @torch.no_grad()
    def decode(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Decoded]:
        """Return what each prompt (token ids) decodes to, at most `max_tokens` tokens each, a stop token included.

        Ends early at a stop token and at the target's maximum length. Past the drafter's maximum length the target goes
        on alone. Raises UserError for a prompt that leaves no room for a token.
        """
        for prompt in prompts:
            if not 0 < len(prompt) < self.target.max_positions:
                raise UserError(
                    f"a prompt of {len(prompt)} tokens does not fit the target's maximum length {self.target.max_positions}; "
                    "shorten it"
                )
        state = self._prefill(prompts, max_tokens)
        while not all(state.done):
            self._step(state)
        return state.decoded

    def _prefill(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> _State:
        from transformers import DynamicCache

        device = self.target.device
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        width = int(lengths.max())
        ids = torch.zeros(len(prompts), width, dtype=torch.long, device=device)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt, device=device)
        limits = [min(max_tokens, self.target.max_positions - len(prompt)) for prompt in prompts]
        state = _State(
            cache=DynamicCache(config=self.target.model.config),
            valid=torch.zeros(len(prompts), 0, dtype=torch.bool, device=device),
            anchor_ids=ids[:, 0],
            positions=torch.zeros(len(prompts), dtype=torch.long, device=device),
            limits=limits,
            decoded=[Decoded() for _ in prompts],
            done=[False] * len(prompts),
        )
        final = self._forward(state, ids)
        self._keep(state, lengths - 1)
        last = self.target.logits(final[torch.arange(len(final), device=device), lengths - 1])
        tokens = self._next_token(last)
        state.commit(tokens[:, None], _top2_gap(last)[:, None], torch.zeros_like(lengths), lengths, self.stop_ids)
        return state

    def _step(self, state: _State) -> None:
        proposal = self._propose(state)
        if proposal is None:
            drafts = state.anchor_ids.new_zeros(len(state.anchor_ids), 0)
            drafting = torch.zeros(len(drafts), dtype=torch.bool)
        else:
            drafts, drafting = proposal.tokens, self._may_draft(state)
        inputs = torch.cat((state.anchor_ids[:, None], drafts), dim=1)
        anchors = state.positions
        logits = self.target.logits(self._forward(state, inputs))
        accepted, tokens = self._verify(logits, drafts, drafting, proposal)
        self._keep(state, accepted)
        for row, done in enumerate(state.done):
            if not done and drafting[row]:
                assert proposal is not None
                margin = proposal.margin[row].item()
                state.decoded[row].blocks.append(
                    Block(int(anchors[row]), tuple(drafts[row].tolist()), int(accepted[row]), margin)
                )
        state.commit(tokens, _top2_gap(logits), accepted, anchors + accepted + 1, self.stop_ids)

    def _forward(self, state: _State, ids: Tensor) -> Tensor:
        """Return the target's final states [n, q, H] for ids [n, q], which follow each row's committed tokens."""
        n, q = ids.shape
        offsets = torch.arange(q, device=ids.device)
        positions = state.positions[:, None] + offsets
        causal = (offsets[:, None] >= offsets[None, :]).expand(n, 1, q, q)
        mask = torch.cat((state.valid[:, None, None].expand(n, 1, q, -1), causal), dim=-1)
        states = self.target.forward(ids, positions, mask, state.cache)
        state.pending = (states.taps, positions)
        return states.final

    def _keep(self, state: _State, last: Tensor) -> None:
        """Keep columns 0..last [n] of the pass just made, per row: crop what every row rejected, mask what some rows did."""
        taps, positions = state.pending
        kept = int(last.max()) + 1
        if kept < taps.shape[1]:
            state.cache.crop(kept - taps.shape[1])
        valid = torch.arange(kept, device=last.device) <= last[:, None]
        state.valid = torch.cat((state.valid, valid), dim=1)
        if self.draft is not None:
            # The drafter's context keys and values are computed once a token, from the target's states of this pass.
            backbone = self.draft.backbone
            features = backbone.context_features(taps[:, :kept].to(self.draft.dtype))
            fresh = backbone.context_kv(features, positions[:, :kept])
            state.context = fresh if state.context is None else concat_context((state.context, fresh))
            state.anchor_hidden = features.gather(1, last[:, None, None].expand(-1, 1, features.shape[-1]))

    def _may_draft(self, state: _State) -> Tensor:
        """Return [n] bool: every position of a row's block lies within the drafter's maximum length."""
        assert self.draft is not None
        config = self.draft.config
        return state.positions + self.num_slots + config.first_slot <= config.max_position_embeddings

    def _propose(self, state: _State) -> Proposal | None:
        if self.draft is None or not bool(self._may_draft(state).any()):
            return None
        assert state.context is not None and state.anchor_hidden is not None
        return self.draft.propose(
            state.anchor_ids[:, None],
            state.positions[:, None],
            state.context,
            state.valid[:, None],
            state.anchor_hidden,
            torch.ones_like(state.positions, dtype=torch.bool)[:, None],
            self.target.vocabulary,
            self.rule,
            self.sampling.temperature,
            self.draft_stream,
            self.num_slots,
        )

    def _next_token(self, logits: Tensor) -> Tensor:
        """Return the target's own choice [n] for logits [n, V]."""
        if self.sampling.temperature == 0:
            return logits.argmax(-1)
        return _draw(self._probabilities(logits), self.verify_stream)

    def _probabilities(self, logits: Tensor) -> Tensor:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        # Relative to the maximum, so that a temperature near zero divides to 0 and -inf, never to NaN.
        temperature = max(self.sampling.temperature, torch.finfo(wide.dtype).tiny)
        return ((wide - wide.amax(-1, keepdim=True)) / temperature).softmax(-1)

    def _verify(self, logits: Tensor, drafts: Tensor, drafting: Tensor, proposal: Proposal | None) -> tuple[Tensor, Tensor]:
        """Return accepted [n] and tokens [n, S+1]: the accepted drafts, the target's token behind them, then filler."""
        slots = drafts.shape[1]
        if self.sampling.temperature == 0:
            choices = logits.argmax(-1)
            matches = (choices[:, :slots] == drafts) & drafting[:, None]
            # Accepted drafts equal the target's choices, so the choices are the output whatever was accepted.
            return matches.long().cumprod(1).sum(1), choices
        probs = self._probabilities(logits)
        uniforms = torch.rand(drafts.shape, generator=self.verify_stream, dtype=probs.dtype).to(probs.device)
        accepted = rejection_accept(probs, drafts, proposal, uniforms)
        accepted = torch.where(drafting, accepted, 0)
        final = _draw(residual(probs, drafts, proposal, accepted, drafting), self.verify_stream)
        tokens = torch.cat((drafts, drafts.new_zeros(len(drafts), 1)), dim=1)
        return accepted, tokens.scatter(1, accepted[:, None], final[:, None])


def rejection_accept(probs: Tensor, drafts: Tensor, proposal: Proposal | None, uniforms: Tensor) -> Tensor:
    """Return how many leading drafts [n] the rejection test accepts (Leviathan et al., 2023; Chen et al., 2023).

    probs [n, S+1, V]: the target's distributions; drafts [n, S]; uniforms [n, S] in [0, 1). Draft x of slot s is accepted
    with probability min(1, p(x) / q(x)), q being the proposal's distribution, or a point mass where it has none.
    """
    slots = drafts.shape[1]
    if slots == 0:
        return torch.zeros(len(drafts), dtype=torch.long, device=probs.device)
    p = probs[:, :slots].gather(-1, drafts[..., None])[..., 0]
    q = torch.ones_like(p)
    if proposal is not None and proposal.probs is not None:
        q = (proposal.probs * (proposal.candidate_ids == drafts[..., None])).sum(-1).to(p.dtype)
    # Strictly: a draw may be 0, and what the target gives no probability must never pass.
    return (uniforms * q < p).long().cumprod(1).sum(1)


def residual(probs: Tensor, drafts: Tensor, proposal: Proposal | None, accepted: Tensor, drafting: Tensor) -> Tensor:
    """Return the distribution [n, V] of the token behind `accepted` [n] drafts: the normalised positive part of p - q at a
    rejected slot, p itself behind a wholly accepted (or absent) draft."""
    n, slots = drafts.shape
    p = probs.gather(1, accepted[:, None, None].expand(-1, 1, probs.shape[-1]))[:, 0]
    if slots == 0:
        return p
    slot = accepted.clamp_max(slots - 1)[:, None]
    q = torch.zeros_like(p)
    if proposal is not None and proposal.probs is not None:
        topk = proposal.candidate_ids.shape[-1]
        wide = slot[..., None].expand(-1, 1, topk)
        q.scatter_add_(1, proposal.candidate_ids.gather(1, wide)[:, 0], proposal.probs.gather(1, wide)[:, 0].to(q.dtype))
    else:
        q.scatter_(1, drafts.gather(1, slot), 1.0)
    rejected = (drafting & (accepted < slots))[:, None]
    left = (p - q).clamp_min(0)
    # p == q leaves nothing; rejection then has probability zero, and rounding that got here anyway draws from p.
    left = torch.where(left.sum(-1, keepdim=True) > 0, left, p)
    return torch.where(rejected, left, p)


def _draw(weights: Tensor, stream: torch.Generator) -> Tensor:
    """Return one index [n] a row, drawn in proportion to weights [n, V]."""
    return torch.multinomial(weights.to("cpu"), 1, generator=stream)[:, 0].to(weights.device)


def _top2_gap(logits: Tensor) -> Tensor:
    best, second = logits.float().topk(2, dim=-1).values.unbind(-1)
    return best - second


@dataclass
class _State:
    """A batch in flight: caches and their valid columns, each row's anchor, and what has been decoded."""

    cache: Any
    valid: Tensor
    anchor_ids: Tensor
    positions: Tensor
    limits: list[int]
    decoded: list[Decoded]
    done: list[bool]
    context: ContextKV | None = None
    anchor_hidden: Tensor | None = None
    pending: Any = None

    def commit(self, tokens: Tensor, margins: Tensor, accepted: Tensor, positions: Tensor, stop_ids: frozenset[int]) -> None:
        """Append each live row's tokens 0..accepted, up to a stop token or its limit; the last one is the new anchor."""
        for row, decoded in enumerate(self.decoded):
            if self.done[row]:
                continue
            count = int(accepted[row]) + 1
            for token, margin in zip(tokens[row, :count].tolist(), margins[row, :count].tolist()):
                decoded.output_ids.append(token)
                decoded.margins.append(margin)
                if token in stop_ids or len(decoded.output_ids) >= self.limits[row]:
                    self.done[row] = True
                    break
        self.anchor_ids = tokens.gather(1, accepted[:, None])[:, 0]
        self.positions = positions


@torch.no_grad()
def blocks_at(
    target: Target,
    draft: Draft,
    token_ids: Sequence[int],
    anchors: Sequence[int],
    num_slots: int | None = None,
    chunk: int = 64,
) -> Iterator[BlockStates]:
    """Yield, `chunk` blocks at a time, what the head sees of blocks along a given sequence: anchored at `anchors` (absolute
    positions), each after exactly token_ids[:anchor + 1] had been committed."""
    ids = torch.tensor([list(token_ids)], device=target.device)
    positions = torch.arange(ids.shape[1], device=target.device)[None]
    taps = target.forward(ids, positions).taps
    features = draft.backbone.context_features(taps.to(draft.dtype))
    context = draft.backbone.context_kv(features, positions)
    for first in range(0, len(anchors), chunk):
        at = torch.tensor([list(anchors[first : first + chunk])], device=target.device)
        anchor_ids, before = ids.gather(1, at), (at - 1).clamp_min(0)
        visible = positions[:, None] < at[..., None]
        hidden = draft.slot_hidden(anchor_ids, at, context, visible, target.vocabulary, num_slots)
        anchor_hidden = features.gather(1, before[..., None].expand(-1, -1, features.shape[-1]))
        yield BlockStates(hidden.flatten(0, 1), anchor_hidden.flatten(0, 1), (at > 0).flatten(), anchor_ids.flatten())


@torch.no_grad()
def drafts_at(
    target: Target,
    draft: Draft,
    token_ids: Sequence[int],
    anchors: Sequence[int],
    rule: str,
    num_slots: int | None = None,
    temperature: float | None = None,
    generator: torch.Generator | None = None,
    chunk: int = 64,
) -> Proposal:
    """Return the proposals of M = len(anchors) blocks along a given sequence: what the drafter would draft at each anchor
    (absolute positions) after exactly token_ids[:anchor + 1] had been committed."""
    blocks = blocks_at(target, draft, token_ids, anchors, num_slots, chunk)
    parts = [draft.head.propose(block, target.vocabulary, rule, temperature, generator) for block in blocks]
    probs = [part.probs for part in parts if part.probs is not None]
    return Proposal(
        tokens=torch.cat([part.tokens for part in parts]),
        candidate_ids=torch.cat([part.candidate_ids for part in parts]),
        log_probs=torch.cat([part.log_probs for part in parts]),
        probs=torch.cat(probs) if probs else None,
        margin=torch.cat([part.margin for part in parts]),
    )


def stop_token_ids(target: Target, tokenizer: Any) -> set[int]:
    """Return the ids that end a turn: the generation config's and the tokenizer's end tokens."""
    ids = target.model.generation_config.eos_token_id
    ids = [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
    return {*ids, tokenizer.eos_token_id} - {None}


def decode_conversation(decoder: ReferenceDecoder, tokenizer: Any, conversation: Conversation, max_tokens: int) -> Decoded:
    """Return the answers to a conversation's turns, one after another, each after the target's own earlier answers.

    The answers' token ids, margins and blocks stand in one `Decoded`, in order. A later turn for which the answers left no
    room in the target's maximum length is not asked any more.
    """
    messages = list(conversation.messages)
    whole = Decoded()
    for turn in conversation.turns:
        messages.append({"role": "user", "content": turn})
        prompt = render(tokenizer, messages)
        if whole.output_ids and len(prompt) >= decoder.target.max_positions:
            break
        decoded = decoder.decode([prompt], max_tokens)[0]
        whole.output_ids += decoded.output_ids
        whole.margins += decoded.margins
        whole.blocks += decoded.blocks
        answer = tokenizer.decode(decoded.output_ids, skip_special_tokens=True)
        messages.append({"role": "assistant", "content": answer})
    return whole


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m vllm_lilicorr.reference", description="Decode prompts speculatively in plain transformers."
    )
    parser.add_argument("--target", required=True, help="the target's Hugging Face folder")
    parser.add_argument("--prompts", required=True, help="JSON Lines: turns, prompt or messages")
    parser.add_argument("--draft", help="drafter checkpoint")
    parser.add_argument(
        "--rule",
        choices=["none", "argmax", "greedy", "sampled", "exact", "exact-normalized"],
        help="how a block is drafted; default: the method's own rule, or none without --draft",
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="the target's sampling temperature; 0 is greedy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=256, help="tokens an answer")
    parser.add_argument("--limit", type=int, help="only the first N prompts")
    parser.add_argument("--num-slots", type=int, help="draft only this many leading slots")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32")
    parser.add_argument("--json", metavar="OUT", help="write JSON Lines: index, output_ids, accepted of each prompt")
    args = parser.parse_args(argv)
    for name in ("max_tokens", "limit", "num_slots"):
        value = getattr(args, name)
        if value is not None and not 1 <= value <= sys.maxsize:
            parser.error(f"--{name.replace('_', '-')} must lie in 1..{sys.maxsize}, got {value}")
    if not 0 <= args.temperature < float("inf"):
        parser.error(f"--temperature must be a finite number of at least 0, got {args.temperature}")
    if not 0 <= args.seed < 2**62:
        parser.error(f"--seed must lie in 0..2**62-1, got {args.seed}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    from tqdm import tqdm

    args = parse_arguments(argv)
    prompts = read_prompts(args.prompts, args.limit)
    if args.json is not None:
        check_writable_file(args.json)
    dtype = DTYPES[args.dtype]
    tokenizer = load_tokenizer(args.target)
    draft = load_draft(args.draft, dtype=dtype) if args.draft else None
    if draft is not None:
        for warning in check_fits(draft.config, TargetShape.load(args.target), tokenizer):
            print(f"warning: {warning}", file=sys.stderr)
        if args.num_slots is not None and args.num_slots > draft.config.num_slots:
            raise UserError(f"--num-slots is {args.num_slots}, but {args.draft} drafts at most {draft.config.num_slots}")
    target = load_target(args.target, draft.config.target_layer_ids if draft else (), dtype)
    rule = args.rule or (draft.head.rules[0] if draft else "none")
    decoder = ReferenceDecoder(
        target, draft, rule, Sampling(args.temperature, args.seed), sorted(stop_token_ids(target, tokenizer)), args.num_slots
    )
    check_lengths(prompts, tokenizer, target.max_positions, args.prompts)
    results: list[Decoded] = []
    began = time.perf_counter()
    with tqdm(prompts, unit="prompt", disable=None) as bar:
        for conversation in bar:
            results.append(decode_conversation(decoder, tokenizer, conversation, args.max_tokens))
            tokens = sum(len(result.output_ids) for result in results)
            accepted = [count for result in results for count in result.accepted]
            bar.set_postfix_str(f"{tokens / (time.perf_counter() - began):.1f} tokens/s, tau {acceptance_length(accepted):.3f}")
    seconds = time.perf_counter() - began
    report(results, seconds, rule)
    if args.json is not None:
        lines = [
            json.dumps({"index": index, "output_ids": result.output_ids, "accepted": result.accepted})
            for index, result in enumerate(results)
        ]
        write_file_atomically(args.json, "\n".join(lines) + "\n")
    return 0


def check_lengths(prompts: Sequence[Conversation], tokenizer: Any, limit: int, source: str) -> None:
    """Raise UserError, before anything is decoded, naming the first prompt that leaves the target no room for an answer."""
    for number, conversation in enumerate(prompts, start=1):
        messages = [*conversation.messages, {"role": "user", "content": conversation.turns[0]}]
        length = len(render(tokenizer, messages))
        if length >= limit:
            raise UserError(
                f"{source}, prompt {number}: has {length} tokens, but the target's maximum length is {limit}; "
                "shorten or remove it"
            )


def report(results: Sequence[Decoded], seconds: float, rule: str) -> None:
    """Print tau, acceptance by position and tokens/s."""
    tokens = sum(len(result.output_ids) for result in results)
    blocks = [block for result in results for block in result.blocks]
    print(f"rule {rule}: {len(results)} prompts, {tokens} tokens, {tokens / seconds:.1f} tokens/s")
    if blocks:
        accepted = [block.accepted for block in blocks]
        print(f"acceptance length (block-weighted tau): {acceptance_length(accepted):.4f} over {len(blocks)} blocks")
        slots = max(len(block.draft) for block in blocks)
        shares = [sum(count > s for count in accepted) / len(accepted) for s in range(slots)]
        print("accepted by position: " + " ".join(f"{s + 1}:{share:.3f}" for s, share in enumerate(shares)))


if __name__ == "__main__":
    run_command(main)
