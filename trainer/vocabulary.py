"""A sampled softmax for training on a CPU: the corpus' own tokens, and random others that stand for the rest.

Each of r others drawn from the V - C tokens outside the corpus counts (V - C) / r times in the normaliser, which makes
it an unbiased estimate of the full one. Ranks and numerators are the full softmax's, restricted to the tokens present.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .token_log_probs import TokenLogProbs, token_log_probs

_STREAM = 2


@dataclass(frozen=True)
class PresentTokens:
    """P tokens that stand for all V: ids [P], their rows of lm_head [P, H], log_counts [P]: token i counts exp(log_counts)
    times; columns [V]: where each token is among them, -1 for absent ones."""

    ids: Tensor
    weight: Tensor
    log_counts: Tensor
    columns: Tensor

    def inside(self, labels: Tensor) -> Tensor:
        """Return where the labels are. One of an unsupervised slot may be any token of a prompt; its value is never used."""
        return self.columns[labels].clamp_min(0)


class SampledVocabulary:
    """The tokens of a corpus, and how to draw `others` more for a step."""

    def __init__(self, corpus_tokens: Iterable[int], lm_head: Tensor, others: int, seed: int) -> None:
        self.lm_head, self.seed = lm_head, seed
        self.tokens = np.unique(np.fromiter(corpus_tokens, np.int64))
        self.rest = np.setdiff1d(np.arange(lm_head.shape[0]), self.tokens)
        self.others = min(others, len(self.rest))

    def draw(self, step: int) -> PresentTokens:
        """Return the tokens of step `step`: all ranks and resumes draw the same others for it."""
        generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([self.seed, _STREAM, step])))
        drawn = generator.choice(self.rest, self.others, replace=False)
        # In id order, so that equal logits still go to the lower id.
        tokens = np.sort(np.concatenate((self.tokens, drawn)))
        device = self.lm_head.device
        ids = torch.from_numpy(tokens).to(device)
        log_counts = torch.zeros(len(ids), device=device)
        if self.others:
            log_counts[torch.from_numpy(np.isin(tokens, drawn)).to(device)] = math.log(len(self.rest) / self.others)
        columns = torch.full((self.lm_head.shape[0],), -1, dtype=torch.long, device=device)
        columns[ids] = torch.arange(len(ids), device=device)
        return PresentTokens(ids, self.lm_head[ids], log_counts, columns)

    def at(self, step: int) -> Callable[[Tensor, Tensor, int], TokenLogProbs]:
        """Return the operation (hidden, labels, k) over the tokens of step `step`."""
        present = self.draw(step)

        def apply(hidden: Tensor, labels: Tensor, k: int) -> TokenLogProbs:
            weight = present.weight
            found = token_log_probs(hidden.to(weight.dtype), weight, present.inside(labels), k, present.log_counts)
            return TokenLogProbs(found.target, present.ids[found.ids], found.log_probs)

        return apply
