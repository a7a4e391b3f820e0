"""DSpark: a low-rank Markov bias on every slot's logits from the token before it, and a confidence a slot.

    logits_s += w2(w1[token before s])          confidence_s = sigmoid(proj([d_s, w1[token before s]]))

Shifted layout: the anchor's position predicts the first drafted token, whose predecessor is the anchor's own token.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...config import DraftConfig, DSparkConfig
from .base import BlockStates, TargetVocabulary
from .sequential import SequentialHead


class MarkovHead(nn.Module):
    """A V x V transition bias of rank r."""

    def __init__(self, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)


class ConfidenceHead(nn.Module):
    """A logit for the probability that a slot's token is accepted."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(size, 1)


class DSparkHead(SequentialHead):
    """The Markov head and, where configured, the confidence head.

    Parameters: 2 * V * r, and for the confidence H (+ r) + 1; with r = 256 and both at Qwen3-8B size (V = 151,936,
    H = 4096) 77,795,585.
    """

    rules = ("greedy", "sampled", "argmax")

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        assert isinstance(config.head, DSparkConfig)
        head = config.head
        self.with_markov = head.confidence_head_with_markov
        self.markov_head = MarkovHead(config.vocab_size, head.markov_rank)
        size = config.hidden_size + (head.markov_rank if self.with_markov else 0)
        self.confidence_head = ConfidenceHead(size) if head.enable_confidence_head else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise N(0, 0.02), the confidence's bias zero."""
        nn.init.normal_(self.markov_head.markov_w1.weight, std=0.02)
        nn.init.normal_(self.markov_head.markov_w2.weight, std=0.02)
        if self.confidence_head is not None:
            nn.init.normal_(self.confidence_head.proj.weight, std=0.02)
            nn.init.zeros_(self.confidence_head.proj.bias)

    def bias(self, tokens: Tensor) -> Tensor:
        """Return the bias [..., V] that tokens [...] put on the slot after them."""
        return self.markov_head.markov_w2(self.markov_head.markov_w1(tokens))

    def confidence(self, slot_hidden: Tensor, previous: Tensor) -> Tensor:
        """Return the probability [N, S] that each slot is accepted, from its state [N, S, H] and the token before it [N, S].

        Raises ValueError where the checkpoint has no confidence head.
        """
        if self.confidence_head is None:
            raise ValueError("this drafter has no confidence head (enable_confidence_head is false)")
        x = slot_hidden.to(self.confidence_head.proj.weight.dtype)
        if self.with_markov:
            x = torch.cat((x, self.markov_head.markov_w1(previous)), dim=-1)
        return self.confidence_head.proj(x)[..., 0].to(torch.promote_types(x.dtype, torch.float32)).sigmoid()

    def begin(self, block: BlockStates, target: TargetVocabulary) -> Tensor:
        return block.anchor_ids

    def correction(self, state: Tensor, slot: int, block: BlockStates) -> Tensor:
        return self.bias(state)

    def read(self, state: Tensor, tokens: Tensor, target: TargetVocabulary) -> Tensor:
        return tokens
