"""A drafter: backbone and head, and one block drafted with them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..config import DraftConfig
from .backbone import ContextKV, DFlashBackbone, block_inputs
from .heads import BlockStates, Proposal, TargetVocabulary, build_head


class Draft(nn.Module):
    """The weights of one checkpoint. The target's embedding and lm_head come with each call."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        self.backbone = DFlashBackbone(config)
        self.head = build_head(config)

    @property
    def dtype(self) -> torch.dtype:
        return self.backbone.fc.weight.dtype

    def slot_hidden(
        self,
        anchor_ids: Tensor,
        anchor_positions: Tensor,
        context: ContextKV,
        visible: Tensor,
        target: TargetVocabulary,
        num_slots: int | None = None,
    ) -> Tensor:
        """Return the slots' hidden states d_s [n, M, S, H] of blocks anchored at anchor_ids [n, M].

        anchor_positions [n, M]: absolute; context: keys and values of T tokens; visible [n, M, T]: those before each
        anchor; num_slots: draft only this many leading slots. Raises ValueError when it exceeds the trained number.
        """
        config = self.config
        slots = config.num_slots if num_slots is None else num_slots
        if not 1 <= slots <= config.num_slots:
            raise ValueError(f"num_slots must lie in 1..{config.num_slots}, got {slots}")
        ids, positions = block_inputs(anchor_ids, anchor_positions, slots + config.first_slot, config.mask_token_id)
        hidden = self.backbone(target.embed(ids).to(self.dtype), positions, context, visible)
        # Contiguous, because a matrix product over a strided batch is done block by block, several times slower.
        return hidden[:, :, config.first_slot :].contiguous()

    def propose(
        self,
        anchor_ids: Tensor,
        anchor_positions: Tensor,
        context: ContextKV,
        visible: Tensor,
        anchor_hidden: Tensor,
        anchor_valid: Tensor,
        target: TargetVocabulary,
        rule: str,
        temperature: float | Tensor | None = None,
        generator: torch.Generator | None = None,
        num_slots: int | None = None,
    ) -> Proposal:
        """Return the proposal of N = n*M blocks, in order; arguments as `slot_hidden`, and per block the context feature
        of the last position before its anchor: anchor_hidden [n, M, H], anchor_valid [n, M] bool; temperature a number
        or [N]."""
        hidden = self.slot_hidden(anchor_ids, anchor_positions, context, visible, target, num_slots)
        block = BlockStates(hidden.flatten(0, 1), anchor_hidden.flatten(0, 1), anchor_valid.flatten(), anchor_ids.flatten())
        return self.head.propose(block, target, rule, temperature, generator)
