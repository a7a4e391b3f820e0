"""The methods served here, one entry each: what a speculative configuration may ask of it, and what drafts with it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..config import DFlash2Config, DominoConfig, DSparkConfig, HeadConfig, LiLiCorrConfig

WALKS = ("greedy", "exact", "exact-normalized", "argmax")
ONE_BY_ONE = ("greedy", "argmax")


@dataclass(frozen=True)
class Method:
    """path_rules: the method itself first; sampled: whether it has a proposal distribution to draw from; stock: the name vLLM's
    own implementation goes by, if it has one; drafting: the class behind the runners, as module:name; variants: keys under
    `dflash_config`, or beside it, by which vLLM knows kinds of this drafter that are not trained here, and the values that ask
    for nothing; stock_keys: keys of vLLM's SpeculativeConfig that only its own implementation knows."""

    path_rules: tuple[str, ...]
    sampled: bool
    stock: str | None
    drafting: str
    variants: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    stock_keys: tuple[str, ...] = ()

    def build(self, model: Any, max_blocks: int) -> Any:
        """Return what drafts with the loaded `model`: a `head.DraftingHead` for at most `max_blocks` concurrent blocks."""
        module, name = self.drafting.split(":")
        return getattr(importlib.import_module(module, __package__), name)(model, max_blocks)


METHODS: dict[type[HeadConfig], Method] = {
    LiLiCorrConfig: Method(WALKS, True, "dflash", ".head:LiLiCorrDrafting"),
    DFlash2Config: Method(
        WALKS,
        True,
        "dflash",
        ".head:DFlash2Drafting",
        {"input_embedding_scale": (1, 1.0), "output_multiplier": (1, 1.0), "final_logit_softcapping": (0, 0.0)},
    ),
    DSparkConfig: Method(
        ONE_BY_ONE,
        True,
        "dspark",
        ".sequential:DSparkDrafting",
        {"dspark_bonus_anchor": (False,), "dspark_draft_topk": (), "logit_scale": (1, 1.0)},
        stock_keys=("dspark_draft_topk",),
    ),
    DominoConfig: Method(ONE_BY_ONE, False, None, ".sequential:DominoDrafting"),
}
"""Plain DFlash has no entry: it is vLLM's to serve."""

PATH_RULES = WALKS
"""Every rule of any method."""
