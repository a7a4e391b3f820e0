"""The report's plots: few colours that colour-blind readers can tell apart, a marker of its own for each line, labels at the lines."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import _datasets, report
from ._results import Results
from .serve import NONE

# Okabe and Ito's palette without its yellow, which is too pale for lines on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"
GREY = "#777777"


def draw(results: Results, folder: Path) -> dict[str, list[str]]:
    """Write the plots that `results` has figures for; return {section: Markdown that shows them}.

    Without matplotlib there are none, which is said.
    """
    try:
        import matplotlib
    except ImportError:
        print("no plots: matplotlib is not installed (pip install 'vllm-lilicorr[bench]')", file=sys.stderr)
        return {}
    matplotlib.use("Agg")
    shown: dict[str, list[str]] = {}
    lines = report.positions(results)
    if len(lines) > report.MOST_COLUMNS:  # more than a plot can hold apart: of each drafter its own rule, which comes first
        first: dict[str, str] = {}
        lines = {column: shares for column, shares in lines.items() if first.setdefault(*column) == column[1]}
    if lines:
        _save(_positions(lines), folder / "acceptance_by_position.png")
        shown["acceptance"] = ["![Share of blocks accepted up to each position](acceptance_by_position.png)"]
    for grid, runs in report.grids(results).items():
        for temperature in dict.fromkeys(cell[0] for cell in runs):
            some = {cell: found for cell, found in runs.items() if cell[0] == temperature}
            suffix = f"{grid}-{temperature}"
            concurrencies = sorted({cell[2] for cell in some})
            if len(concurrencies) > 1:
                _save(_by_concurrency(some), folder / f"throughput_by_concurrency-{suffix}.png")
                shown.setdefault("serve", []).append(f"![Throughput by concurrency](throughput_by_concurrency-{suffix}.png)")
            least = {cell: found for cell, found in some.items() if cell[2] == concurrencies[0]}
            if len(least) > 1:
                _save(_speed_up(least, report.floor(runs)), folder / f"speedup_by_benchmark-{suffix}.png")
                shown.setdefault("serve", []).append(f"![Speed-up by benchmark](speedup_by_benchmark-{suffix}.png)")
    return shown


def _save(figure: Any, path: Path) -> None:
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    # No date and no version inside: the same results give the same file.
    figure.savefig(path, dpi=160, bbox_inches="tight", facecolor="white", metadata={"Software": None})
    plt.close(figure)


def _axes(width: float, height: float) -> tuple[Any, Any]:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(width, height))
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(colors="#333333", labelsize=9)
    axes.grid(axis="y", color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)
    return figure, axes


def spread(values: Sequence[float], gap: float) -> list[float]:
    """Return heights for labels of lines that end at `values`: in their order, at least `gap` apart, as near to them as may be."""
    order = sorted(range(len(values)), key=lambda index: values[index])
    groups: list[list[int]] = []
    centres: list[float] = []
    for index in order:
        groups.append([index])
        centres.append(values[index])
        # Groups that would overlap are merged and centred on the mean of their lines.
        while len(groups) > 1 and centres[-1] - centres[-2] < gap * (len(groups[-1]) + len(groups[-2])) / 2:
            merged = groups[-2] + groups[-1]
            groups[-2:], centres[-2:] = [merged], [sum(values[i] for i in merged) / len(merged)]
    heights = [0.0] * len(values)
    for group, centre in zip(groups, centres):
        for place, index in enumerate(group):
            heights[index] = centre + gap * (place - (len(group) - 1) / 2)
    return heights


def _label_ends(axes: Any, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Write each line's name to the right of the plot, as high as its end (x, y, text, colour)."""
    into = axes.transData + axes.transAxes.inverted()
    heights = spread([float(into.transform((x, y))[1]) for x, y, _, _ in ends], 0.055)
    for (_, _, text, colour), height in zip(ends, heights):
        axes.text(1.01, height, text, transform=axes.transAxes, va="center", fontsize=9, color=colour)


def _positions(lines: dict[tuple[str, str], list[float]]) -> Any:
    """Shares fall by about the same factor from slot to slot, so on a logarithmic axis the lines stay apart to their ends."""
    figure, axes = _axes(7.2, 4.2)
    axes.set_yscale("log")
    ends = []
    for number, ((name, rule), shares) in enumerate(lines.items()):
        shares = list(itertools.takewhile(lambda share: share > 0, shares))
        if not shares:
            continue
        colour = GREY if rule == report.COVERAGE else COLOURS[number % len(COLOURS)]
        style = {"linestyle": "--"} if rule == report.COVERAGE else {"marker": MARKERS[number % len(MARKERS)], "markersize": 4}
        axes.plot(range(1, len(shares) + 1), shares, color=colour, linewidth=1.6, **style)
        ends.append((float(len(shares)), shares[-1], f"{name}, {rule}", colour))
    low, high = axes.get_ylim()
    axes.set_ylim(low, min(high, 1.0))
    ticks = [share for share in (1, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001) if low <= share <= high]
    axes.set_yticks(ticks, [f"{100 * share:g} %" for share in ticks])
    axes.minorticks_off()
    axes.set_xticks(range(1, max(len(shares) for shares in lines.values()) + 1))
    axes.set_xlabel("Position in the draft", fontsize=9)
    axes.set_title("Blocks whose draft is accepted up to and including a position (T = 0, logarithmic)", fontsize=10, loc="left")
    _label_ends(axes, ends)
    return figure


def _speed_up(runs: report.Runs, band: float) -> Any:
    from matplotlib.patheffects import withStroke

    systems = report.systems_of(runs)
    height = 0.26
    rows = [(benchmark, cell) for (_, benchmark, _), cell in runs.items()]
    figure, axes = _axes(7.2, 1.0 + 0.28 * len(rows) * (len(systems) + 0.8))
    ticks, right = [], 1 + band
    for row, (_, cell) in enumerate(rows):
        top = -row * (len(systems) + 0.9) * height
        ticks.append(top - (len(systems) - 1) * height / 2)
        for place, system in enumerate(systems):
            ratio = report.speed_up(cell, system)
            if math.isnan(ratio):
                continue
            y = top - place * height
            axes.barh(y, ratio, 0.88 * height, color=COLOURS[place % len(COLOURS)])
            label = f"{ratio:.2f}x  {system}"
            right = max(right, ratio / max(0.3, 1 - 0.013 * (len(label) + 1)))  # a letter takes about that much of the axis
            axes.annotate(
                label, (ratio, y), (4, 0), textcoords="offset points", va="center", fontsize=8, color="#222222",
                path_effects=[withStroke(linewidth=2, foreground="white")],
            )  # fmt: skip
    axes.axvspan(1 - band, 1 + band, color="#BBBBBB", alpha=0.5, linewidth=0, zorder=0)
    axes.axvline(1.0, color="#333333", linewidth=0.9)
    axes.set_yticks(ticks, [_datasets.title(benchmark) for benchmark, _ in rows])
    axes.tick_params(axis="y", length=0)
    axes.grid(False)
    axes.grid(axis="x", color="#E5E5E5", linewidth=0.8)
    axes.set_xlim(0, right)
    ((temperature, _, concurrency), *_) = runs
    axes.set_title(
        f"Throughput relative to no speculation (T = {temperature[1:]}, concurrency {concurrency}; grey: the noise floor)",
        fontsize=10,
        loc="left",
    )
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    return figure


def _by_concurrency(runs: report.Runs) -> Any:
    figure, axes = _axes(7.2, 4.2)
    axes.set_xscale("log", base=2)
    names = [NONE, *report.systems_of(runs)]
    concurrencies = sorted({concurrency for _, _, concurrency in runs})
    ends = []
    for number, name in enumerate(names):
        points = []
        for concurrency in concurrencies:
            speeds = [report.throughput(cell, name) for (_, _, c), cell in runs.items() if c == concurrency]
            speeds = [speed for speed in speeds if not math.isnan(speed)]
            if speeds:
                points.append((concurrency, sum(speeds) / len(speeds)))
        if not points:
            continue
        colour = GREY if name == NONE else COLOURS[(number - 1) % len(COLOURS)]
        axes.plot(*zip(*points), color=colour, linewidth=1.6, marker=MARKERS[number % len(MARKERS)], markersize=5)
        ends.append((float(points[-1][0]), points[-1][1], "no speculation" if name == NONE else name, colour))
    axes.set_ylim(bottom=0)
    axes.set_xticks(concurrencies, [str(c) for c in concurrencies])
    axes.minorticks_off()
    axes.set_xlabel("Concurrent requests", fontsize=9)
    temperature = next(iter(runs))[0]
    axes.set_title(f"Output tokens per second (T = {temperature[1:]}, mean over benchmarks)", fontsize=10, loc="left")
    _label_ends(axes, ends)
    return figure
