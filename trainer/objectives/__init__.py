"""The training objective of each kind of head, one file each, and the one registry that says which."""

from __future__ import annotations

import dataclasses

from .base import Blocks, HeadLoss, Objective, Terms
from .config import ObjectiveConfig
from .dflash2 import DFlash2Objective
from .domino import DominoObjective
from .dspark import DSparkObjective
from .lilicorr import LiLiCorrObjective

OBJECTIVES: dict[str, type[Objective]] = {
    "dflash": Objective,
    "lilicorr": LiLiCorrObjective,
    "dflash2": DFlash2Objective,
    "dspark": DSparkObjective,
    "domino": DominoObjective,
}
"""Every trainable head by the name that `draft.head` takes; its configuration's fields are the keys of `head.NAME`."""

HeadSettings = dataclasses.make_dataclass(
    "HeadSettings",
    [(name, objective.head_config | None, None) for name, objective in OBJECTIVES.items()],  # type: ignore[operator]
    frozen=True,
)
HeadSettings.__doc__ = "One section a head; `draft.head` chooses which is trained, so that one file describes all arms."

__all__ = ["OBJECTIVES", "Blocks", "HeadLoss", "HeadSettings", "Objective", "ObjectiveConfig", "Terms"]
