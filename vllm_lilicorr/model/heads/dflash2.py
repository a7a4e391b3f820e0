"""DFlash2's selector: what a pair of neighbouring tokens scores is a product of two learned tables, gated by the slot's
state, on top of the later token's logit.

    score(p, c) = logit(c) + <predecessor[p] * hidden_projection(d_s), successor[c]>

The grouped convolution that goes with it is the backbone's (`backbone.GroupedConv`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...config import DFlash2Config, DraftConfig
from .base import BlockStates, Candidates, LatticeHead, TargetVocabulary, ranked_candidates


class DFlash2Head(LatticeHead):
    """Codebooks [V, r] for a token as predecessor and as successor, and the projection [H -> r] of the slot's state.

    Parameters: 2 * V * r + H * r; with r = 256 at Qwen3-8B size (V = 151,936, H = 4096) 78,839,808.
    """

    prefix = "candidate_selector."

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        assert isinstance(config.head, DFlash2Config)
        self.top_k = config.head.top_k
        self.predecessor_codebook = nn.Parameter(torch.empty(config.vocab_size, config.head.rank))
        self.successor_codebook = nn.Parameter(torch.empty(config.vocab_size, config.head.rank))
        self.hidden_projection = nn.Linear(config.hidden_size, config.head.rank, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise tables and projection N(0, 0.02); none may be zero, or their product has no gradient."""
        for weight in (self.predecessor_codebook, self.successor_codebook, self.hidden_projection.weight):
            nn.init.normal_(weight, std=0.02)

    def forward(self, candidate_ids: Tensor, unary: Tensor, slot_hidden: Tensor, anchor_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return (start [N, K], pair [N, S-1, K, K]) of candidate_ids [N, S, K] with logits or log-probabilities `unary`
        [N, S, K], slot states [N, S, H] and the anchors' own tokens [N], the first predecessors; in fp32 (fp64 in fp64)."""
        if unary.shape != candidate_ids.shape or slot_hidden.shape[:2] != candidate_ids.shape[:2]:
            raise ValueError(
                f"unary and slot_hidden must go with candidate_ids {tuple(candidate_ids.shape)}, "
                f"got {tuple(unary.shape)} and {tuple(slot_hidden.shape)}"
            )
        wide = torch.promote_types(self.successor_codebook.dtype, torch.float32)
        gate = self.hidden_projection(slot_hidden.to(self.successor_codebook.dtype)).to(wide)  # [N, S, r]
        successors = self.successor_codebook[candidate_ids].to(wide)  # [N, S, K, r]
        anchor = self.predecessor_codebook[anchor_ids].to(wide)  # [N, r]
        earlier = self.predecessor_codebook[candidate_ids[:, :-1]].to(wide)  # [N, S-1, K, r]
        unary = unary.to(wide)
        start = unary[:, 0] + torch.einsum("nr,nkr->nk", anchor * gate[:, 0], successors[:, 0])
        pair = unary[:, 1:, None] + (earlier * gate[:, 1:, None]) @ successors[:, 1:].transpose(-1, -2)
        return start, pair

    def lattice(self, block: BlockStates, target: TargetVocabulary) -> tuple[Candidates, Tensor, Tensor]:
        found = ranked_candidates(target.logits(block.slot_hidden), self.top_k)
        # A slot's log-partition is the same for all its candidates, so log-probabilities choose as logits do.
        start, pair = self(found.ids, found.log_probs, block.slot_hidden, block.anchor_ids)
        return found, start, pair
