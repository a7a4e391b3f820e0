"""A sampled softmax for training on a CPU: the corpus' own tokens, and random others that stand for the rest.

Each of r others drawn from the V - C tokens outside the corpus counts (V - C) / r times in the normaliser, which makes
it an unbiased estimate of the full one. Ranks and numerators are the full softmax's, restricted to the tokens present.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor

from .token_log_probs import TokenLogProbs, token_log_probs

_STREAM = 2


class SampledVocabulary:
    """The tokens of a corpus, and how to draw `others` more for a step."""

    def __init__(self, corpus_tokens: Iterable[int], lm_head: Tensor, others: int, seed: int) -> None:
        self.lm_head, self.seed = lm_head, seed
        self.tokens = np.unique(np.fromiter(corpus_tokens, np.int64))
        self.rest = np.setdiff1d(np.arange(lm_head.shape[0]), self.tokens)
        self.others = min(others, len(self.rest))

    def at(self, step: int) -> Callable[[Tensor, Tensor, int], TokenLogProbs]:
        """Return the operation (hidden, labels, k) of step `step`: all ranks and resumes draw the same others for it."""
        generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([self.seed, _STREAM, step])))
        drawn = generator.choice(self.rest, self.others, replace=False)
        # In id order, so that equal logits still go to the lower id.
        tokens = np.sort(np.concatenate((self.tokens, drawn)))
        device = self.lm_head.device
        ids = torch.from_numpy(tokens).to(device)
        weight = self.lm_head[ids]
        log_counts = torch.zeros(len(ids), device=device)
        if self.others:
            log_counts[torch.from_numpy(np.isin(tokens, drawn)).to(device)] = math.log(len(self.rest) / self.others)
        inside = torch.full((self.lm_head.shape[0],), -1, dtype=torch.long, device=device)
        inside[ids] = torch.arange(len(ids), device=device)

        def apply(hidden: Tensor, labels: Tensor, k: int) -> TokenLogProbs:
            # A label of an unsupervised slot may be any token of a prompt; its value is never used.
            found = token_log_probs(hidden.to(weight.dtype), weight, inside[labels].clamp_min(0), k, log_counts)
            return TokenLogProbs(found.target, ids[found.ids], found.log_probs)

        return apply
