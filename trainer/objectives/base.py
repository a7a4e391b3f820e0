"""The plain drafter's objective, and the frame that a head's objective fills in (paper, Sections 3.3 and 3.4).

An objective is the module DeepSpeed trains: the drafter plus what turns a batch into losses. The target's embedding and
lm_head are its inputs, never its parameters, so no optimizer can touch them.

    L_DFlash = sum w_s * (-log p_s(g_s)) / sum w_s        w_s = exp(-(s-1) / beta)

Denominators are global over the ranks of one micro-step. DeepSpeed averages gradients over the ranks, so each rank's
loss is its own sums times the number of ranks over the global denominators.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vllm_lilicorr.config import DFlashConfig, HeadConfig
from vllm_lilicorr.model import Draft, TargetVocabulary
from vllm_lilicorr.model.backbone import block_inputs
from vllm_lilicorr.model.heads import BlockStates

from ..attention import BlockAttention
from ..data import Batch
from ..losses import ground_truth_candidates, leading_run, position_weights
from ..settings import require
from ..token_log_probs import TokenLogProbs, token_log_probs
from ..vocabulary import SampledVocabulary
from .config import ObjectiveConfig


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

    def select(self, index: Tensor | slice) -> Blocks:
        return Blocks(**{name: value[index] for name, value in vars(self).items()})

    @property
    def states(self) -> BlockStates:
        return BlockStates(self.slot_hidden, self.anchor_hidden, self.anchor_valid, self.anchor_ids)

    @property
    def previous(self) -> Tensor:
        """The ground truth's token before each slot [N, S]: the anchor's own, then the labels."""
        return torch.cat((self.anchor_ids[:, None], self.labels[:, :-1]), dim=1)


Sums = dict[str, tuple[Tensor, Tensor]]
"""One rank's {name: (numerator, denominator)}; summed over the ranks and divided they are the logged values."""

Terms = tuple[Tensor, Sums]
"""A micro-step's result: the loss to call backward on (see the module's text), and this rank's sums. Plain containers:
ZeRO's hooks look inside."""


@dataclass(frozen=True)
class HeadLoss:
    """A head's part of the loss, weight * value / denominator, the denominator summed over the ranks; value has the
    gradient. sums: what is logged of it."""

    value: Tensor
    weight: float
    denominator: Tensor
    sums: Sums


class Objective(nn.Module):
    """The plain drafter's objective, L_DFlash, and the frame that a head's objective fills in.

    head_config: what `head.NAME` describes. rules: the decode rules that evaluation measures. losses: the values of
    `objective.loss` that the head has. bounded: whether all rules choose among a slot's candidates, so that following the
    best candidate (coverage) bounds them. steps: the optimizer steps of the whole run.
    """

    head_config: ClassVar[type[HeadConfig]] = DFlashConfig
    rules: ClassVar[tuple[str, ...]] = ("argmax",)
    losses: ClassVar[tuple[str, ...]] = ("own", "common")
    bounded: ClassVar[bool] = True
    metrics_topk: ClassVar[int] = 8

    def __init__(
        self,
        draft: Draft,
        config: ObjectiveConfig,
        target: TargetVocabulary,
        sampled: SampledVocabulary | None = None,
        steps: int = 1,
    ) -> None:
        super().__init__()
        self.draft = draft
        self.config = config
        self.steps = steps
        # In a tuple, so that nn.Module registers neither: they are frozen and belong to the target.
        self._frozen = (target, sampled)

    @classmethod
    def check(cls, config: ObjectiveConfig, head: HeadConfig | None) -> None:
        """Raise `Invalid` where `config` asks for what this head's objective (head: its section, if any) does not have."""
        require(
            config.loss in cls.losses,
            "objective.loss",
            f"is '{config.loss}', but this head has only {', '.join(cls.losses)}; set it to {cls.losses[0]}",
        )

    def weights(self, step: int) -> dict[str, float]:
        """Return the logged terms whose weighted sum is the loss of optimizer step `step`."""
        return {"dflash": 1.0}

    def outside_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that the losses use without calling the module that holds them: ZeRO has to be told."""
        return []

    @property
    def target(self) -> TargetVocabulary:
        return self._frozen[0]

    @property
    def topk(self) -> int:
        """Candidates a slot whose log-probabilities are computed."""
        return self.metrics_topk

    def draft_blocks(self, batch: Batch) -> Blocks:
        """Return the batch's blocks, drafted in one pass. Slot s is labelled with the token s + 1 positions behind the
        anchor in either layout; they differ in the block position that drafts it (`DraftConfig.first_slot`)."""
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

    def usable(self, blocks: Blocks) -> Tensor:
        """Return which blocks [N] the head's loss may take."""
        return blocks.eligible

    def lattice_blocks(self, blocks: Blocks, num_sequences: int) -> Tensor:
        """Return the indices of the blocks whose head is computed, at least one of them."""
        chosen = self.usable(blocks)
        if self.config.head_anchors is not None:
            rank = blocks.rank.masked_fill(~chosen, len(chosen)).view(num_sequences, -1)
            chosen = chosen & (rank.argsort(-1).argsort(-1) < self.config.head_anchors).flatten()
        index = chosen.nonzero()[:, 0]
        # Every rank runs the head at every micro-step, or those that partition its weights would wait for each other.
        # A block that is not usable supervises nothing: all its sums are exactly 0.
        return index if len(index) else index.new_zeros(1)

    def forward(self, batch: Batch, step: int = 0) -> Terms:
        """Return the losses of one micro-step."""
        blocks = self.draft_blocks(batch)
        index = self.lattice_blocks(blocks, len(batch.ids))
        topk = self.topk
        slots = blocks.labels.shape[1]

        vocabulary = self._vocabulary(step)
        chosen = blocks.select(index)
        inside = vocabulary(chosen.slot_hidden.flatten(0, 1), chosen.labels.flatten(), topk)
        rest = left_out(blocks, index)
        outside = vocabulary(blocks.slot_hidden[rest], blocks.labels[rest], 0)

        weights = position_weights(slots, self.config.beta, blocks.labels.device).expand(len(blocks.labels), -1)
        supervised = chosen.supervised.flatten()
        inside_weights = torch.where(supervised, weights[index].flatten(), 0.0)
        dflash = -(inside_weights * inside.target).sum() - (weights[rest] * outside.target).sum()
        normaliser = self.normaliser(blocks.supervised, self.config.beta)

        lattice = TokenLogProbs(
            inside.target.view(-1, slots), inside.ids.view(-1, slots, topk), inside.log_probs.view(-1, slots, topk)
        )
        truth, covered = ground_truth_candidates(lattice.ids, chosen.labels)
        prefix = leading_run(covered & chosen.eligible[:, None])
        head = self.head_sums(chosen, lattice, truth, prefix, batch.final.flatten(0, 1))
        return self._combine(dflash, normaliser, prefix, chosen, lattice, head)

    def normaliser(self, supervised: Tensor, beta: float) -> Tensor:
        """Return what a sum over slots weighted with decay `beta` is divided by, of slots supervised [N, S]."""
        weights = position_weights(supervised.shape[1], beta, supervised.device).expand(len(supervised), -1)
        if not self.config.dflash_normalize:
            return supervised.any(-1).sum().to(weights.dtype)
        return torch.where(supervised, weights, 0.0).sum()

    def _vocabulary(self, step: int):  # type: ignore[no-untyped-def]
        sampled = self._frozen[1]
        if sampled is not None and self.training:
            return sampled.at(step)
        return lambda hidden, labels, k: token_log_probs(hidden.to(self.target.lm_head.dtype), self.target.lm_head, labels, k)

    def head_sums(self, blocks: Blocks, lattice: TokenLogProbs, truth: Tensor, prefix: Tensor, final: Tensor) -> HeadLoss | None:
        """Return the head's loss on its blocks (truth, prefix [N, S]: which candidate is the label, and the oracle prefix;
        final: the target's final states); the plain drafter has none."""
        return None

    def _combine(
        self, dflash: Tensor, normaliser: Tensor, prefix: Tensor, blocks: Blocks, lattice: TokenLogProbs, head: HeadLoss | None
    ) -> Terms:
        slots_supervised = prefix.sum().to(dflash.dtype)
        count = blocks.eligible.sum().to(dflash.dtype)
        totals = over_ranks(normaliser, slots_supervised if head is None else head.denominator)
        loss = world_size() * dflash / totals[0]
        top1 = leading_run((lattice.ids[..., 0] == blocks.labels) & blocks.eligible[:, None])
        sums = {
            "dflash": (dflash.detach(), normaliser),
            "oracle_prefix": (slots_supervised, count),
            "top1_prefix": (top1.sum().to(dflash.dtype), count),
        }
        if head is not None:
            loss = loss + world_size() * head.weight * head.value / totals[1]
            sums |= head.sums
        return loss, sums

    @torch.no_grad()
    def drafts(self, blocks: Blocks) -> tuple[dict[str, Tensor], Tensor | None]:
        """Return ({rule: drafted tokens [N, S]}, oracle prefix lengths [N]) over the full vocabulary, for evaluation.

        Slots that are not supervised end the oracle prefix. It is None where the head is not `bounded` by candidates.
        """
        found = self._candidates(blocks, self.topk)
        return {"argmax": found.ids[..., 0]}, self._oracle(blocks, found)

    def _candidates(self, blocks: Blocks, topk: int) -> TokenLogProbs:
        slots = blocks.labels.shape[1]
        hidden = blocks.slot_hidden.flatten(0, 1).to(self.target.lm_head.dtype)
        found = token_log_probs(hidden, self.target.lm_head, blocks.labels.flatten(), topk)
        return TokenLogProbs(found.target.view(-1, slots), found.ids.view(-1, slots, topk), found.log_probs.view(-1, slots, topk))

    def _oracle(self, blocks: Blocks, found: TokenLogProbs) -> Tensor:
        return leading_run(ground_truth_candidates(found.ids, blocks.labels)[1] & blocks.supervised).sum(-1)


def left_out(blocks: Blocks, index: Tensor) -> Tensor:
    """Return the supervised slots [N, S] of the blocks that are not in `index`."""
    inside = torch.zeros(len(blocks.labels), dtype=torch.bool, device=blocks.labels.device)
    inside[index] = True
    return blocks.supervised & ~inside[:, None]


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def over_ranks(*denominators: Tensor) -> Tensor:
    """Return the denominators summed over the ranks; an empty set's is replaced by 1, for its numerator is exactly 0."""
    totals = torch.stack(denominators)
    if world_size() > 1:
        dist.all_reduce(totals)
    return totals.where(totals > 0, torch.ones_like(totals))
