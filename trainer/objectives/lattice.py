"""What the heads share that score a lattice of candidates and then walk through it."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from vllm_lilicorr.model.lattice import walk

from ..token_log_probs import TokenLogProbs
from .base import Blocks, Objective


class LatticeObjective(Objective):
    """An objective on scores (start [N, K], pair [N, S-1, K, K]) of a block's candidates."""

    rules: ClassVar[tuple[str, ...]] = ("argmax", "greedy", "exact", "exact-normalized")
    losses: ClassVar[tuple[str, ...]] = ("own",)

    def scores(self, blocks: Blocks, candidates: TokenLogProbs) -> tuple[Tensor, Tensor]:
        """Return the head's (start, pair) over the candidates."""
        raise NotImplementedError

    @torch.no_grad()
    def drafts(self, blocks: Blocks) -> tuple[dict[str, Tensor], Tensor | None]:
        found = self._candidates(blocks, self.topk)
        start, pair = self.scores(blocks, found)
        paths = {rule: found.ids.gather(-1, walk(start, pair, rule).index[..., None])[..., 0] for rule in self.rules[1:]}
        return {"argmax": found.ids[..., 0], **paths}, self._oracle(blocks, found)
