"""The training objective of each kind of head, and the one registry that says which (paper, Sections 3.3 and 3.4).

An objective is the module DeepSpeed trains: the drafter plus what turns a batch into losses. The target's embedding and
lm_head are its inputs, never its parameters, so no optimizer can touch them.

    L = L_DFlash + gamma * (L_CE + lambda * L_dist)

Denominators are global over the ranks of one micro-step. DeepSpeed averages gradients over the ranks, so each rank's
loss is its own sums times the number of ranks over the global denominators.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vllm_lilicorr.config import DFlashConfig, HeadConfig, LiLiCorrConfig
from vllm_lilicorr.model import Draft, TargetVocabulary
from vllm_lilicorr.model.backbone import block_inputs
from vllm_lilicorr.model.heads import BlockStates
from vllm_lilicorr.model.lattice import walk

from .attention import BlockAttention
from .data import Batch
from .losses import (
    cross_entropy_sum,
    distractor_sum,
    ground_truth_candidates,
    leading_run,
    position_weights,
    target_costs,
    teacher_forced_scores,
)
from .settings import require
from .token_log_probs import TokenLogProbs, token_log_probs
from .vocabulary import SampledVocabulary


@dataclass(frozen=True)
class ObjectiveConfig:
    """gamma, lambd, beta: the paper's weights of the head's loss, of the penalty, and the decay of L_DFlash's slot weights.

    dflash_normalize: divide L_DFlash by its sum of weights (else by the number of blocks).
    Sizes for training on a CPU, both off by default and never used in evaluation: train_vocab, normalise over the
    corpus' own tokens plus this many random others, which stand for the rest; head_anchors, compute the head's loss on
    this many anchors of each conversation.
    """

    gamma: float = 0.25
    lambd: float = 1.0
    beta: float = 7.0
    dflash_normalize: bool = True
    train_vocab: int | None = None
    head_anchors: int | None = None

    def __post_init__(self) -> None:
        require(self.beta > 0, "beta", f"must be positive, got {self.beta}")
        require(self.gamma >= 0 and self.lambd >= 0, "gamma", "and lambd must not be negative")
        for name in ("train_vocab", "head_anchors"):
            value = getattr(self, name)
            require(value is None or value > 0, name, f"must be positive, or null to switch it off; got {value}")


@dataclass(frozen=True)
class Blocks:
    """Drafted blocks of a batch, N = n*M in order. slot_hidden [N, S, H]; labels, supervised [N, S]; anchor_hidden
    [N, H], anchor_valid [N] (no context before position 0), anchor_ids [N]; final_rows [N, S]: the rows of the batch's
    final states that predict the labels; eligible [N]: blocks all of whose slots are supervised; rank [N]."""

    slot_hidden: Tensor
    labels: Tensor
    supervised: Tensor
    anchor_hidden: Tensor
    anchor_valid: Tensor
    anchor_ids: Tensor
    final_rows: Tensor
    eligible: Tensor
    rank: Tensor

    def select(self, index: Tensor) -> Blocks:
        return Blocks(**{name: value[index] for name, value in vars(self).items()})

    @property
    def states(self) -> BlockStates:
        return BlockStates(self.slot_hidden, self.anchor_hidden, self.anchor_valid, self.anchor_ids)


Terms = tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]
"""A micro-step's result: the loss to call backward on (see the module's text), and this rank's sums, {name: (numerator,
denominator)}; summed over the ranks and divided they are the logged values. Plain containers: ZeRO's hooks look inside."""


class Objective(nn.Module):
    """The plain drafter's objective, L_DFlash, and the frame that a head's objective fills in."""

    head_config: ClassVar[type[HeadConfig]] = DFlashConfig
    metrics_topk: ClassVar[int] = 8
    rules: ClassVar[tuple[str, ...]] = ("argmax",)

    def __init__(
        self, draft: Draft, config: ObjectiveConfig, target: TargetVocabulary, sampled: SampledVocabulary | None = None
    ) -> None:
        super().__init__()
        self.draft = draft
        self.config = config
        # In a tuple, so that nn.Module registers neither: they are frozen and belong to the target.
        self._frozen = (target, sampled)

    @property
    def target(self) -> TargetVocabulary:
        return self._frozen[0]

    def draft_blocks(self, batch: Batch) -> Blocks:
        """Return the batch's blocks, drafted in one pass."""
        draft, config = self.draft, self.draft.config
        n, tokens = batch.ids.shape
        positions = torch.arange(tokens, device=batch.ids.device)
        features = draft.backbone.context_features(batch.taps.to(draft.dtype))
        context = draft.backbone.context_kv(features, positions.expand(n, -1))
        anchor_ids = batch.ids.gather(1, batch.anchors)
        ids, block_positions = block_inputs(anchor_ids, batch.anchors, config.block_size, config.mask_token_id)
        hidden = draft.backbone(
            self.target.embed(ids).to(draft.dtype),
            block_positions,
            context,
            positions < batch.anchors[..., None],
            BlockAttention(batch.anchors, tokens, config.block_size),
        )
        offset = torch.arange(config.num_slots, device=batch.ids.device)
        label_positions = batch.anchors[..., None] + 1 + offset
        supervised = batch.valid[..., None] & (label_positions < batch.ends[..., None])
        rows = torch.arange(n, device=batch.ids.device)[:, None]
        before = (batch.anchors - 1).clamp_min(0)
        return Blocks(
            slot_hidden=hidden[:, :, config.first_slot :].flatten(0, 1),
            labels=batch.ids[rows[..., None], label_positions.clamp_max(tokens - 1)].flatten(0, 1),
            supervised=supervised.flatten(0, 1),
            anchor_hidden=features[rows, before].flatten(0, 1),
            anchor_valid=(batch.anchors > 0).flatten(),
            anchor_ids=anchor_ids.flatten(),
            final_rows=(rows[..., None] * tokens + (label_positions - 1).clamp_max(tokens - 1)).flatten(0, 1),
            eligible=supervised.all(-1).flatten(),
            rank=batch.rank.flatten(),
        )

    def lattice_blocks(self, blocks: Blocks, num_sequences: int) -> Tensor:
        """Return the indices of the blocks whose lattice is computed, at least one of them."""
        chosen = blocks.eligible
        if self.config.head_anchors is not None:
            rank = blocks.rank.masked_fill(~chosen, len(chosen)).view(num_sequences, -1)
            chosen = chosen & (rank.argsort(-1).argsort(-1) < self.config.head_anchors).flatten()
        index = chosen.nonzero()[:, 0]
        # Every rank runs the head at every micro-step, or those that partition its weights would wait for each other.
        # A block that is not eligible supervises nothing: all its sums are exactly 0.
        return index if len(index) else index.new_zeros(1)

    def forward(self, batch: Batch, step: int = 0) -> Terms:
        """Return the losses of one micro-step."""
        blocks = self.draft_blocks(batch)
        index = self.lattice_blocks(blocks, len(batch.ids))
        topk = getattr(self.draft.config.head, "candidate_topk", self.metrics_topk)
        slots = blocks.labels.shape[1]
        with_lattice = torch.zeros(len(blocks.labels), dtype=torch.bool, device=blocks.labels.device)
        with_lattice[index] = True

        vocabulary = self._vocabulary(step)
        chosen = blocks.select(index)
        inside = vocabulary(chosen.slot_hidden.flatten(0, 1), chosen.labels.flatten(), topk)
        rest = blocks.supervised & ~with_lattice[:, None]
        outside = vocabulary(blocks.slot_hidden[rest], blocks.labels[rest], 0)

        weights = position_weights(slots, self.config.beta, blocks.labels.device).expand(len(blocks.labels), -1)
        supervised = chosen.supervised.flatten()
        inside_weights = torch.where(supervised, weights[index].flatten(), 0.0)
        dflash = -(inside_weights * inside.target).sum() - (weights[rest] * outside.target).sum()
        normaliser = torch.where(blocks.supervised, weights, 0.0).sum()
        if not self.config.dflash_normalize:
            normaliser = blocks.supervised.any(-1).sum().to(weights.dtype)

        lattice = TokenLogProbs(
            inside.target.view(-1, slots), inside.ids.view(-1, slots, topk), inside.log_probs.view(-1, slots, topk)
        )
        truth, covered = ground_truth_candidates(lattice.ids, chosen.labels)
        prefix = leading_run(covered & chosen.eligible[:, None])
        head = self.head_sums(chosen, lattice, truth, prefix, batch.final.flatten(0, 1))
        return self._combine(dflash, normaliser, prefix, chosen, lattice, head)

    def _vocabulary(self, step: int):  # type: ignore[no-untyped-def]
        sampled = self._frozen[1]
        if sampled is not None and self.training:
            return sampled.at(step)
        return lambda hidden, labels, k: token_log_probs(hidden.to(self.target.lm_head.dtype), self.target.lm_head, labels, k)

    def head_sums(self, blocks: Blocks, lattice: TokenLogProbs, truth: Tensor, prefix: Tensor, final: Tensor) -> HeadSums | None:
        """Return the head's sums over the oracle prefixes (final: the target's final states); the plain drafter has none."""
        return None

    def _combine(
        self, dflash: Tensor, normaliser: Tensor, prefix: Tensor, blocks: Blocks, lattice: TokenLogProbs, head: HeadSums | None
    ) -> Terms:
        slots_supervised = prefix.sum().to(dflash.dtype)
        count = blocks.eligible.sum().to(dflash.dtype)
        world = dist.get_world_size() if dist.is_initialized() else 1
        totals = torch.stack((normaliser, slots_supervised))
        if world > 1:
            dist.all_reduce(totals)
        # An empty set is exactly 0: its numerator is, and its denominator is then replaced.
        totals = totals.where(totals > 0, torch.ones_like(totals))
        loss = world * dflash / totals[0]
        top1 = leading_run((lattice.ids[..., 0] == blocks.labels) & blocks.eligible[:, None])
        sums = {
            "dflash": (dflash.detach(), normaliser),
            "oracle_prefix": (slots_supervised, count),
            "top1_prefix": (top1.sum().to(dflash.dtype), count),
        }
        if head is not None:
            loss = loss + world * self.config.gamma * (head.ce + self.config.lambd * head.dist) / totals[1]
            sums |= {
                "ce": (head.ce.detach(), slots_supervised),
                "dist": (head.dist.detach(), slots_supervised),
                "slot_accuracy": (head.correct, slots_supervised),
                "score_spread": (head.spread, slots_supervised),
                "selected_prefix": (head.selected_prefix, count),
            }
        return loss, sums

    @torch.no_grad()
    def drafts(self, blocks: Blocks) -> tuple[dict[str, Tensor], Tensor]:
        """Return ({rule: drafted tokens [N, S]}, oracle prefix lengths [N]) over the full vocabulary, for evaluation.

        Slots that are not supervised end the oracle prefix.
        """
        found = self._candidates(blocks, self.metrics_topk)
        return {"argmax": found.ids[..., 0]}, self._oracle(blocks, found)

    def _candidates(self, blocks: Blocks, topk: int) -> TokenLogProbs:
        slots = blocks.labels.shape[1]
        hidden = blocks.slot_hidden.flatten(0, 1).to(self.target.lm_head.dtype)
        found = token_log_probs(hidden, self.target.lm_head, blocks.labels.flatten(), topk)
        return TokenLogProbs(found.target.view(-1, slots), found.ids.view(-1, slots, topk), found.log_probs.view(-1, slots, topk))

    def _oracle(self, blocks: Blocks, found: TokenLogProbs) -> Tensor:
        return leading_run(ground_truth_candidates(found.ids, blocks.labels)[1] & blocks.supervised).sum(-1)


@dataclass(frozen=True)
class HeadSums:
    """Sums over the oracle prefixes: ce, dist (with gradient); correct slots, score spread; and over blocks, the length
    of the greedy walk's matching prefix."""

    ce: Tensor
    dist: Tensor
    correct: Tensor
    spread: Tensor
    selected_prefix: Tensor


class LiLiCorrObjective(Objective):
    """L_DFlash + gamma * (L_CE + lambda * L_dist)."""

    head_config = LiLiCorrConfig
    rules = ("argmax", "greedy", "exact", "exact-normalized")

    def head_sums(self, blocks: Blocks, lattice: TokenLogProbs, truth: Tensor, prefix: Tensor, final: Tensor) -> HeadSums:
        start, pair = self._scores(blocks, lattice)
        scores = teacher_forced_scores(start, pair, truth)
        costs = torch.zeros_like(scores)
        costs[prefix] = target_costs(
            final[blocks.final_rows[prefix]], self.target.lm_head, blocks.labels[prefix], lattice.ids[prefix]
        ).to(costs.dtype)
        with torch.no_grad():
            taken = lattice.ids.gather(-1, walk(start, pair, "greedy").index[..., None])[..., 0]
            selected = leading_run((taken == blocks.labels) & blocks.eligible[:, None])
            spread = scores.amax(-1) - scores.amin(-1)
        return HeadSums(
            ce=cross_entropy_sum(scores, truth, prefix),
            dist=distractor_sum(scores, costs, prefix),
            correct=((scores.argmax(-1) == truth) & prefix).sum().to(scores.dtype),
            spread=torch.where(prefix, spread, 0.0).sum(),
            selected_prefix=selected.sum().to(scores.dtype),
        )

    def _scores(self, blocks: Blocks, lattice: TokenLogProbs) -> tuple[Tensor, Tensor]:
        return self.draft.head(
            self.target.embed(lattice.ids), lattice.log_probs, blocks.slot_hidden, blocks.anchor_hidden, blocks.anchor_valid
        )

    @torch.no_grad()
    def drafts(self, blocks: Blocks) -> tuple[dict[str, Tensor], Tensor]:
        found = self._candidates(blocks, self.draft.config.head.candidate_topk)  # type: ignore[attr-defined]
        start, pair = self._scores(blocks, found)
        paths = {rule: found.ids.gather(-1, walk(start, pair, rule).index[..., None])[..., 0] for rule in self.rules[1:]}
        return {"argmax": found.ids[..., 0], **paths}, self._oracle(blocks, found)


OBJECTIVES: dict[str, type[Objective]] = {"dflash": Objective, "lilicorr": LiLiCorrObjective}
"""Every trainable head by the name that `draft.head` takes; its configuration's fields are the keys of `head.NAME`."""

HeadSettings = dataclasses.make_dataclass(
    "HeadSettings",
    [(name, objective.head_config | None, None) for name, objective in OBJECTIVES.items()],  # type: ignore[operator]
    frozen=True,
)
HeadSettings.__doc__ = "One section a head; `draft.head` chooses which is trained, so that one file describes all arms."
