"""The heads, one file each, chosen by the checkpoint's configuration.

To add one: its HeadConfig in `config.py`, its module here, one line in each registry (docs/contributing.md).
"""

from __future__ import annotations

from collections.abc import Callable

from ...config import DFlash2Config, DFlashConfig, DominoConfig, DraftConfig, DSparkConfig, HeadConfig, LiLiCorrConfig
from .base import BlockStates, DraftHead, LatticeHead, Proposal, TargetVocabulary
from .dflash import DFlashHead
from .dflash2 import DFlash2Head
from .domino import DominoHead
from .dspark import DSparkHead
from .lilicorr import LiLiCorrHead

HEADS: dict[type[HeadConfig], Callable[[DraftConfig], DraftHead]] = {
    DFlashConfig: DFlashHead,
    LiLiCorrConfig: LiLiCorrHead,
    DFlash2Config: DFlash2Head,
    DSparkConfig: DSparkHead,
    DominoConfig: DominoHead,
}


def build_head(config: DraftConfig) -> DraftHead:
    """Return a freshly initialised head of the kind `config.head` names."""
    return HEADS[type(config.head)](config)


__all__ = [
    "HEADS",
    "BlockStates",
    "DFlash2Head",
    "DFlashHead",
    "DSparkHead",
    "DominoHead",
    "DraftHead",
    "LatticeHead",
    "LiLiCorrHead",
    "Proposal",
    "TargetVocabulary",
    "build_head",
]
