"""No head: DFlash proposes every slot's most probable token."""

from __future__ import annotations

from ...config import DraftConfig
from .base import DraftHead


class DFlashHead(DraftHead):
    """The plain drafter; it has no weights."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
