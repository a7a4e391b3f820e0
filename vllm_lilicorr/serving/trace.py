"""LILICORR_TRACE=FILE: what was drafted and what became of it, one JSON object a line and block. For debugging and tests.

    {"request": id, "anchor": absolute position, "candidates": [[...K ids]...S], "drafts": [...], "accepted": n | null}

`accepted` counts what the verifier accepted, before a stop token or max_tokens truncates; it is null where no verification
was seen (the request ended, or the drafts were not scheduled). A block that was withheld (length limit) has no drafts.
"""

from __future__ import annotations

import atexit
import json
import os
from typing import Any

VARIABLE = "LILICORR_TRACE"
DEBUG_VARIABLE = "LILICORR_DEBUG"


def debug() -> bool:
    """Whether tensors that index other tensors are checked at every step (LILICORR_DEBUG=1)."""
    return os.environ.get(DEBUG_VARIABLE, "") not in ("", "0")


class Trace:
    """Appends finished blocks to the file; a block is finished when its request is seen again."""

    @classmethod
    def from_environment(cls) -> Trace | None:
        path = os.environ.get(VARIABLE)
        return cls(path) if path else None

    def __init__(self, path: str) -> None:
        self._file = open(path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115  lives as long as the engine
        self._pending: dict[str, dict[str, Any]] = {}
        atexit.register(self.close)

    def step(
        self,
        requests: list[str],
        live: list[bool],
        anchors: list[int],
        candidates: list[list[list[int]]],
        drafts: list[list[int]],
        accepted: list[int | None],
    ) -> None:
        """Record one engine step: accepted[i] is of the block that request i drafted before, the rest is of its new one.

        Rows that are not `live` (inside a prompt) draft nothing that will be verified and open no block.
        """
        for request, count in zip(requests, accepted, strict=True):
            self._finish(request, count)
        for request in self._pending.keys() - set(requests):
            self._finish(request, None)
        for request, opens, anchor, ids, tokens in zip(requests, live, anchors, candidates, drafts, strict=True):
            if not opens:
                continue
            self._pending[request] = {"request": request, "anchor": anchor, "candidates": ids, "drafts": tokens}

    def _finish(self, request: str, accepted: int | None) -> None:
        block = self._pending.pop(request, None)
        if block is not None:
            # More than was drafted: the request was preempted, and what ran is its prompt again.
            accepted = None if accepted is not None and accepted > len(block["drafts"]) else accepted
            self._file.write(json.dumps(block | {"accepted": accepted}) + "\n")

    def close(self) -> None:
        """Write what is pending and close the file."""
        for request in list(self._pending):
            self._finish(request, None)
        self._file.close()
