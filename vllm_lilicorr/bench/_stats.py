"""Acceptance lengths from histograms, bootstrap intervals over prompts, and the rule for ties.

A histogram [S + 1] counts the blocks of one prompt by how many of their S drafts were accepted. Everything about acceptance
follows from it: accepted tokens, blocks, tau, acceptance by position.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

RESAMPLES = 10_000
LEAST_FLOOR = 0.01
"""The paper's tie band. A noise floor measured below it is taken as this: a few quiet runs prove no less."""


@dataclass(frozen=True)
class Interval:
    """A figure and the middle 95 % of its bootstrap distribution."""

    value: float
    low: float
    high: float


def tau(histograms: np.ndarray) -> float:
    """Return the block-weighted acceptance length of histograms [..., S + 1]; NaN without blocks."""
    counts = np.asarray(histograms, float).reshape(-1, np.shape(histograms)[-1]).sum(0)
    blocks = counts.sum()
    return float((counts @ np.arange(len(counts)) + blocks) / blocks) if blocks else math.nan


def by_position(histograms: np.ndarray) -> list[float]:
    """Return, for every slot, the share of blocks whose draft was accepted up to and including it."""
    counts = np.asarray(histograms, float).reshape(-1, np.shape(histograms)[-1]).sum(0)
    return [float(share) for share in counts[::-1].cumsum()[::-1][1:] / max(counts.sum(), 1)]


class Resampled:
    """Bootstrap over prompts, within each benchmark: the same resamples for every rule and drafter, so that ratios are paired."""

    def __init__(self, sizes: Mapping[str, int], seed: int = 0) -> None:
        generator = np.random.default_rng(seed)
        self.weights = {name: generator.multinomial(n, np.full(n, 1 / n), RESAMPLES) for name, n in sizes.items()}

    def _sums(self, name: str, histograms: Any) -> np.ndarray:
        """Return [RESAMPLES + 1, 2]: accepted tokens and blocks, of the sample itself first, then of each resample."""
        table = np.asarray(histograms, float)
        pair = np.stack((table @ np.arange(table.shape[-1]), table.sum(-1)), 1)
        return np.concatenate((pair.sum(0, keepdims=True), self.weights[name] @ pair))

    def taus(self, histograms: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Return [RESAMPLES + 1] acceptance lengths of each benchmark, of their unweighted `mean`, and of `all` blocks together."""
        sums = {name: self._sums(name, table) for name, table in histograms.items()}
        found = {name: _tau(pair) for name, pair in sums.items()}
        found["mean"] = np.mean(list(found.values()), axis=0)
        found["all"] = _tau(sum(sums.values()))  # type: ignore[arg-type]
        return found


def _tau(pair: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore", divide="ignore"):
        return (pair[:, 0] + pair[:, 1]) / pair[:, 1]


def interval(values: np.ndarray) -> Interval:
    """Return the figure (the first value) and the middle 95 % of the others."""
    rest = values[1:][np.isfinite(values[1:])]
    low, high = np.percentile(rest, [2.5, 97.5]) if len(rest) else (math.nan, math.nan)
    return Interval(float(values[0]), float(low), float(high))


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and sample standard deviation (n - 1); the deviation of one value is NaN."""
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else math.nan


def noise_floor(null_ratios: Sequence[float]) -> float:
    """Return the difference, relative, up to which two throughputs are a tie: the largest that no speculation showed against
    itself in any cell of the grid, each cell being measured as a speed-up is."""
    return max([LEAST_FLOOR, *(abs(ratio - 1) for ratio in null_ratios)])


def best(values: Mapping[str, float], floor: float) -> tuple[str | None, set[str]]:
    """Return the largest value's name and the names, itself among them, that it does not lead by more than `floor`.

    A system wins only where it leads every other by more than the floor: where the set holds it alone.
    """
    known = {name: value for name, value in values.items() if not math.isnan(value)}
    if not known:
        return None, set()
    top = max(known, key=lambda name: known[name])
    return top, {name for name, value in known.items() if known[top] <= value * (1 + floor)}
