"""Markdown tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ._stats import Interval, best

MISSING = "-"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, the first column to the left and the others to the right."""
    align = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (list(header), align, *map(list, rows)))


def number(value: float | None, digits: int = 2) -> str:
    return MISSING if value is None or math.isnan(value) else f"{value:.{digits}f}"


def with_interval(value: Interval) -> str:
    """Return "1.83 (1.75-1.91)"."""
    return f"{number(value.value)} ({number(value.low)}-{number(value.high)})"


def percent(ratio: float, digits: int = 1) -> str:
    """Return a ratio as a signed difference: 1.052 is "+5.2 %"."""
    return MISSING if math.isnan(ratio) else f"{100 * (ratio - 1):+.{digits}f} %"


def percent_interval(value: Interval) -> str:
    """Return "+5.2 % (+4.9 to +8.5)" of a ratio."""
    bounds = " to ".join(f"{100 * (bound - 1):+.1f}" for bound in (value.low, value.high))
    return f"{percent(value.value)} ({bounds})"


def mean_deviation(mean: float, deviation: float) -> str:
    """Return "6.86 (0.04)", the form of the paper's Table 10."""
    return number(mean) if math.isnan(deviation) else f"{mean:.2f} ({deviation:.2f})"


def marked(values: Mapping[str, float], texts: Mapping[str, str], floor: float) -> dict[str, str]:
    """Return the texts with the largest value's in bold and those within the tie band of it in italics."""
    top, ties = best(values, floor)
    return {
        name: f"**{text}**" if name == top else f"*{text}*" if name in ties else text for name, text in texts.items()
    }
