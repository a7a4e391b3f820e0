"""LILICORR_TIMING=FILE: where the wall time of drafting goes, on an engine that runs eagerly on a CPU.

Of every decode step: drafting in all, and of it the candidates, and head and walk, and of these the walk alone (the scores it
compares with it: they are one call); and everything else that passes until the next step drafts, and of it the
verification (from where the target's pass begins to where drafting does: logits and the rejection sampler with it). Seconds and
counts, summed, written as JSON every hundred steps and at the end. On a GPU these times would be those of launching kernels:
use a profiler there.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

from torch import nn

VARIABLE = "LILICORR_TIMING"


class Timing:
    """Sums up; every method is free when the variable is not set."""

    @classmethod
    def from_environment(cls) -> Timing:
        return cls(os.environ.get(VARIABLE) or None)

    def __init__(self, path: str | None) -> None:
        self.path = path
        self.seconds: dict[str, float] = {}
        self.steps = self.blocks = 0
        self._step: dict[str, float] = {}
        self._entered = self._left = self._verifying = 0.0
        if path:
            atexit.register(self.write)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time a part of drafting."""
        if self.path is None:
            yield
            return
        began = time.perf_counter()
        yield
        self._step[name] = self._step.get(name, 0.0) + time.perf_counter() - began

    def watch(self, target: nn.Module) -> None:
        """Note when each pass of the target begins."""
        if self.path is not None:
            target.register_forward_pre_hook(self._begin)

    def _begin(self, *_: object) -> None:
        self._verifying = time.perf_counter()

    def enter(self) -> None:
        """Drafting begins."""
        if self.path is not None:
            self._entered = time.perf_counter()
            self._step = {}

    def leave(self, requests: int, longest_query: int) -> None:
        """Drafting of a step ends; steps that prefill more than a block are not counted."""
        if self.path is None:
            return
        now = time.perf_counter()
        outside = self._entered - self._left
        # An idle engine waits between steps; a step of a CPU takes no longer than this.
        if longest_query <= 64 and self._left and outside < 5.0:
            verification = self._entered - max(self._verifying, self._left)
            parts = {"drafting": now - self._entered, "everything else": outside, "verification": verification, **self._step}
            for name, seconds in parts.items():
                self.seconds[name] = self.seconds.get(name, 0.0) + seconds
            self.steps += 1
            self.blocks += requests
            if self.steps % 100 == 0:
                self.write()
        self._left = now

    def write(self) -> None:
        """Write the sums."""
        assert self.path is not None
        Path(self.path).write_text(json.dumps({"steps": self.steps, "blocks": self.blocks, "seconds": self.seconds}))
