"""Domino: a GRU over the embeddings of the tokens committed so far corrects the logits of the next slot.

    logits_s += Linear(SiLU(Linear([d_s, g_s])))        g_s = GRU state after the anchor and the tokens of slots before s

Shifted layout; the first `pure_draft_prefix_len` slots stay as the backbone drafted them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...config import DominoConfig, DraftConfig
from .base import BlockStates, TargetVocabulary
from .sequential import SequentialHead


class DominoHead(SequentialHead):
    """prefix_gru (H -> G, no biases) and embed_proj (H + G -> E -> V, no biases).

    Parameters: 3 * G * (H + G) + (H + G) * E + E * V; with G = 1024, E = 256 at Qwen3-8B size (V = 151,936, H = 4096)
    55,934,976.
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        assert isinstance(config.head, DominoConfig)
        head = config.head
        self.pure_prefix = head.pure_draft_prefix_len
        self.prefix_gru = nn.GRU(config.hidden_size, head.gru_hidden_dim, bias=False, batch_first=True)
        self.embed_proj = nn.Sequential(
            nn.Linear(config.hidden_size + head.gru_hidden_dim, head.emb_dim, bias=False),
            nn.SiLU(),
            nn.Linear(head.emb_dim, config.vocab_size, bias=False),
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the projections N(0, 0.02), the GRU as torch does (uniform within 1/sqrt(G))."""
        self.prefix_gru.reset_parameters()
        for layer in (self.embed_proj[0], self.embed_proj[2]):
            nn.init.normal_(layer.weight, std=0.02)

    def states(self, embeddings: Tensor) -> Tensor:
        """Return the GRU's state [N, T, G] after each of the tokens embedded as [N, T, H], the anchor's first."""
        return self.prefix_gru(embeddings.to(self.embed_proj[0].weight.dtype))[0]

    def corrections(self, slot_hidden: Tensor, states: Tensor) -> Tensor:
        """Return what is added to the logits [..., V] of slots with states d_s [..., H] and g_s [..., G]."""
        return self.embed_proj(torch.cat((slot_hidden.to(states.dtype), states), dim=-1))

    def begin(self, block: BlockStates, target: TargetVocabulary) -> Tensor:
        return self.states(target.embed(block.anchor_ids)[:, None])[:, 0]

    def correction(self, state: Tensor, slot: int, block: BlockStates) -> Tensor | None:
        return None if slot < self.pure_prefix else self.corrections(block.slot_hidden[:, slot], state)

    def read(self, state: Tensor, tokens: Tensor, target: TargetVocabulary) -> Tensor:
        embedded = target.embed(tokens)[:, None].to(state.dtype)
        return self.prefix_gru(embedded, state[None].contiguous())[0][:, 0]
