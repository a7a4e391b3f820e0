"""Tables in the paper's shape and plots from a result file: DIR/results.json becomes DIR/report.md and its PNG files."""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..io import write_file_atomically
from . import _datasets, _paper, _stats
from ._results import FILE, Results, describe, short
from ._tables import marked, mean_deviation, number, percent, percent_interval, table, with_interval
from .acceptance import COVERAGE
from .serve import AGAIN, NONE

MOST_COLUMNS = 8
"""A table of acceptance with more columns is split: each drafter's own rule, then the rules of each drafter. One of throughput:
speed-ups, then what is behind them."""

Histograms = dict[str, list[list[int]]]
"""{benchmark: [prompts][S + 1]}."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help=f"where {FILE} is")


def main(args: argparse.Namespace) -> int:
    results = Results.read(args.folder)
    write(results, args.folder)
    print(f"{args.folder}: report.md and its plots are written")
    return 0


def write(results: Results, folder: Path) -> None:
    """Write report.md and the plots into `folder`."""
    from . import _plots

    plots = _plots.draw(results, folder)
    parts = [
        "# Benchmark results",
        preamble(results),
        acceptance_tables(results),
        *plots.get("acceptance", []),
        serve_tables(results),
        *plots.get("serve", []),
        cost_tables(results),
        beside_the_paper(results),
    ]
    write_file_atomically(folder / "report.md", "\n\n".join(part for part in parts if part) + "\n")


def preamble(results: Results) -> str:
    """Return where, when and how everything was measured."""
    rows = []
    for run in results.invocations:
        versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
        rows.append([run["date"], f"`{run['command']}`", short(run["commit"]), versions])
    # One line a command and commit: a run that was interrupted and resumed has several.
    unique = [next(group) for _, group in itertools.groupby(rows, key=lambda row: row[1:])]
    lines = [
        f"Measured on: {describe(results.machine)}.",
        "Written by `python -m vllm_lilicorr.bench report`; everything here, histograms a prompt included, is in `results.json`.",
        table(["Date", "Command", "Commit", "Versions"], unique),
    ]
    if results.missing:
        lines.append("Not measured: " + "; ".join(f"{_datasets.title(name)} ({why})" for name, why in results.missing.items()) + ".")
    return "\n\n".join(lines)


# Acceptance.


def greedy_histograms(results: Results) -> dict[str, dict[str, Histograms]]:
    """Return {drafter: {rule: histograms}} at temperature 0, in the order of `--draft`, only of benchmarks that every drafter was
    measured on; nothing where there is none."""
    found: dict[str, dict[str, Histograms]] = {}
    for (benchmark, name), _, result in results.under("acceptance/T0/"):
        for rule, histograms in result["rules"].items():
            found.setdefault(name, {}).setdefault(rule, {})[benchmark] = histograms
    common = set.intersection(*(set(h) for rules in found.values() for h in rules.values())) if found else set()
    order = _ordered(common)
    drafters = results.ordered("acceptance", found) if order else []
    return {name: {rule: {b: h[b] for b in order} for rule, h in found[name].items()} for name in drafters}


def _ordered(names: Any) -> list[str]:
    """Return benchmarks in the paper's order, others after them."""
    known = list(_datasets.SOURCES)
    return sorted(names, key=lambda name: (known.index(base) if (base := name.partition(":")[0]) in known else len(known), name))


def acceptance_tables(results: Results) -> str:
    parts = [_greedy_table(results), _comparison_table(results), _rules_table(results), _sampled_tables(results), _position_table(results)]
    parts += [_left_out(results, f"acceptance/{t}") for t in sorted({key.split("/")[1] for key in results.parts if key.startswith("acceptance/")})]
    text = "\n\n".join(part for part in parts if part)
    return f"## Acceptance length\n\n{text}" if text else ""


def _left_out(results: Results, grid: str) -> str:
    count = results.left_out(grid)
    return (
        f"Left out of `{grid}`: {count} part{'s' * (count != 1)} measured with other settings, prompts or checkpoints than the newest."
        if count
        else ""
    )


def _columns(found: dict[str, dict[str, Histograms]]) -> list[tuple[str, str]]:
    """Return (drafter, rule) with each drafter's own rule first and the coverage bound last."""
    columns = []
    for name, rules in found.items():
        ordered = sorted(rules, key=lambda rule: (rule == COVERAGE, rule == "argmax"))
        columns += [(name, rule) for rule in ordered]
    return columns


def _resampled(found: dict[str, dict[str, Histograms]]) -> dict[tuple[str, str], dict[str, np.ndarray]]:
    first = next(iter(next(iter(found.values())).values()))
    bootstrap = _stats.Resampled({benchmark: len(table) for benchmark, table in first.items()})
    return {(name, rule): bootstrap.taus(histograms) for name, rules in found.items() for rule, histograms in rules.items()}


def _label(benchmark: str) -> str:
    return {"mean": "Average", "all": "All prompts"}.get(benchmark, _datasets.title(benchmark))


def _greedy_table(results: Results) -> str:
    found = greedy_histograms(results)
    if not found:
        alone = results.ordered("acceptance", dict.fromkeys(name for (_, name), _, _ in results.under("acceptance/T0/")))
        return f"No benchmark was measured with each of {', '.join(alone)} at T = 0: there is nothing to compare." if alone else ""
    taus, columns = _resampled(found), _columns(found)
    benchmarks = list(taus[columns[0]])
    groups = [columns]
    if len(columns) > MOST_COLUMNS:
        by_drafter = [[column for column in columns if column[0] == name] for name in found]
        groups = [[own for own, *_ in by_drafter], *(group for group in by_drafter if len(group) > 1)]
    tables = [
        table(
            ["Benchmark", *(f"{name}, {rule}" for name, rule in group)],
            [[_label(b), *(with_interval(_stats.interval(taus[column][b])) for column in group)] for b in benchmarks],
        )
        for group in groups
    ]
    answered = {benchmark: result["answered"] for (benchmark, _), _, result in results.under("acceptance/T0/")}
    return (
        "Greedy target (T = 0): block-weighted acceptance length tau with its 95 % bootstrap interval over prompts "
        f"({', '.join(f'{_datasets.title(b)} {answered[b]}' for b in benchmarks if b in answered)}). Average is the unweighted mean of the "
        "benchmarks, All prompts sums their blocks. Coverage is the bound for any rule over the same candidates.\n\n"
        + "\n\n".join(tables)
    )


def _comparison_table(results: Results) -> str:
    """The first drafter's own rule against everything else, prompt by prompt."""
    found = greedy_histograms(results)
    columns = [column for column in _columns(found) if column[1] != COVERAGE]
    if len(columns) < 2:
        return ""
    taus, reference = _resampled(found), columns[0]
    rows = []
    for other in columns[1:]:
        ratio = {b: _stats.interval(taus[reference][b] / taus[other][b]) for b in ("mean", "all")}
        rows.append([f"{other[0]}, {other[1]}", percent_interval(ratio["mean"]), percent_interval(ratio["all"])])
    return (
        f"How much longer the drafts of {reference[0]} under {reference[1]} are accepted (paired bootstrap of the ratio):\n\n"
        + table(["Against", "Average", "All prompts"], rows)
    )


def _rules_table(results: Results) -> str:
    """The paper's Table 16."""
    parts = []
    for name, rules in greedy_histograms(results).items():
        if not {"greedy", "exact"} <= rules.keys():
            continue
        rows, changes = [], []
        for benchmark in rules["greedy"]:
            pair = {rule: _stats.tau(np.asarray(rules[rule][benchmark])) for rule in ("greedy", "exact")}
            change = pair["exact"] / pair["greedy"]
            changes.append(change)
            texts = marked(pair, {rule: number(value, 3) for rule, value in pair.items()}, 0.0)
            rows.append([_datasets.title(benchmark), texts["greedy"], texts["exact"], percent(change, 2)])
        rows.append(["Mean change", "", "", percent(statistics.mean(changes), 2)])
        parts.append(f"Decode rules of {name} (T = 0), the change from greedy to exact:\n\n" + table(["Benchmark", "Greedy", "Exact", "Change"], rows))
    return "\n\n".join(parts)


def sampled_taus(results: Results) -> dict[str, dict[tuple[str, str], dict[str, dict[str, float]]]]:
    """Return {temperature: {(drafter, proposal): {benchmark: {seed: tau}}}} above temperature 0."""
    found: dict[str, dict[tuple[str, str], dict[str, dict[str, float]]]] = {}
    for steps, _, result in results.under("acceptance/T"):
        if len(steps) == 5:
            temperature, benchmark, name, proposal, seed = steps
            (histograms,) = result["rules"].values()
            runs = found.setdefault(temperature, {}).setdefault((name, proposal), {})
            runs.setdefault(benchmark, {})[seed] = _stats.tau(np.asarray(histograms))
    return found


def _sampled_tables(results: Results) -> str:
    parts = []
    for temperature, columns in sampled_taus(results).items():
        drafters = results.ordered("acceptance", dict.fromkeys(name for name, _ in columns))
        names = sorted(columns, key=lambda column: drafters.index(column[0]))
        benchmarks = _ordered(set.union(*(set(runs) for runs in columns.values())))
        rows = []
        for benchmark in benchmarks:
            cells = [list(columns[column].get(benchmark, {}).values()) for column in names]
            rows.append([_datasets.title(benchmark), *(mean_deviation(*_stats.mean_and_deviation(cell)) if cell else "-" for cell in cells)])
        means = []
        for column in names:
            whole = [statistics.mean(runs.values()) for runs in columns[column].values()]
            means.append(number(statistics.mean(whole)) if len(whole) == len(benchmarks) else "-")
        rows.append(["Average", *means])
        seeds = sorted({seed.removeprefix("seed") for runs in columns.values() for one in runs.values() for seed in one})
        parts.append(
            f"Sampling target (T = {temperature}): tau, mean over seeds {', '.join(seeds)} with the sample standard deviation in "
            "parentheses. Point proposals are the drafter's own path without drawing (the paper's argmax proposals).\n\n"
            + table(["Benchmark", *(f"{name}, {proposal}" for name, proposal in names)], rows)
        )
    return "\n\n".join(parts)


def _position_table(results: Results) -> str:
    lines = positions(results)
    if not lines:
        return ""
    slots = max(len(values) for values in lines.values())
    rows = [[f"{name}, {rule}", *(number(value) for value in values)] for (name, rule), values in lines.items()]
    return (
        "Acceptance by position (T = 0, all prompts): the share of blocks whose draft is accepted up to and including a slot.\n\n"
        + table(["Drafter, rule", *(str(slot + 1) for slot in range(slots))], [[*row, *["-"] * (slots + 1 - len(row))] for row in rows])
    )


def positions(results: Results) -> dict[tuple[str, str], list[float]]:
    """Return {(drafter, rule): share of blocks accepted up to and including each slot}, all benchmarks together."""
    found = greedy_histograms(results)
    return {
        (name, rule): _stats.by_position(np.concatenate([np.asarray(h) for h in found[name][rule].values()]))
        for name, rule in _columns(found)
    }


# Throughput.

Runs = dict[tuple[str, str, int], dict[str, dict[str, dict[str, Any]]]]
"""{(temperature, benchmark, concurrency): {system: {round: result}}}."""


def grids(results: Results) -> dict[str, Runs]:
    """Return the runs of every grid of `bench serve` by its name, systems in the order of `--systems`.

    A round above temperature 0 is named with its seed: only runs of one seed are compared.
    """
    found: dict[str, Runs] = {}
    for (grid, temperature, benchmark, concurrency, system, round_), settings, result in results.under("serve/"):
        cell = found.setdefault(grid, {}).setdefault((temperature, benchmark, int(concurrency[1:])), {})
        seed = settings.get("seed")
        cell.setdefault(system, {})[round_ if seed is None else f"{round_}, seed {seed}"] = result
    for grid, runs in found.items():
        order = _ordered({benchmark for _, benchmark, _ in runs})
        cells = sorted(runs, key=lambda cell: (cell[0], order.index(cell[1]), cell[2]))
        found[grid] = {cell: {s: runs[cell][s] for s in results.ordered(f"serve/{grid}", runs[cell])} for cell in cells}
    return found


def speed_up(cell: dict[str, dict[str, dict[str, Any]]], system: str) -> float:
    """Return the median over rounds of a system's throughput relative to no speculation in the same round; NaN without one."""
    both = cell.get(system, {}).keys() & cell.get(NONE, {}).keys()
    ratios = [cell[system][r]["tokens_per_second"] / cell[NONE][r]["tokens_per_second"] for r in sorted(both)]
    return statistics.median(ratios) if ratios else math.nan


def throughput(cell: dict[str, dict[str, dict[str, Any]]], system: str) -> float:
    """Return the median tokens/s over rounds."""
    values = [result["tokens_per_second"] for result in cell.get(system, {}).values()]
    return statistics.median(values) if values else math.nan


def served_tau(cell: dict[str, dict[str, dict[str, Any]]], system: str) -> float:
    """Return the acceptance length of all rounds together, as vLLM counted it; NaN where nothing was drafted."""
    runs = [result for result in cell.get(system, {}).values() if result["drafts"]]
    drafts = sum(result["drafts"] for result in runs)
    return (sum(result["accepted"] for result in runs) + drafts) / drafts if drafts else math.nan


def floor(runs: Runs) -> float:
    """Return the grid's noise floor: see `_stats.noise_floor`."""
    null = [speed_up(cell, AGAIN) for cell in runs.values()]
    return _stats.noise_floor([ratio for ratio in null if not math.isnan(ratio)])


def systems_of(runs: Runs) -> list[str]:
    names = dict.fromkeys(system for cell in runs.values() for system in cell)
    return [name for name in names if name not in (NONE, AGAIN)]


def serve_tables(results: Results) -> str:
    parts = []
    for grid, runs in grids(results).items():
        systems, band = systems_of(runs), floor(runs)
        rounds = {len(found) for cell in runs.values() for found in cell.values()}
        null = sum(not math.isnan(speed_up(cell, AGAIN)) for cell in runs.values())
        parts.append(
            f"### Grid `{grid}`\n\nMedians over {_span(rounds)} round{'s' * (max(rounds) > 1)}. Noise floor "
            f"{100 * band:.1f} %: no speculation against itself in {null} cell{'s' * (null != 1)}, at least {100 * _stats.LEAST_FLOOR:.0f} % as in the paper. "
            "Bold is the fastest, italics are ties with it.\n\n" + _verdict(runs, systems, band)
        )
        parts.append(_left_out(results, f"serve/{grid}"))
        for temperature in dict.fromkeys(cell[0] for cell in runs):
            some = {cell: found for cell, found in runs.items() if cell[0] == temperature}
            least = min(cell[2] for cell in some)
            first = {cell: found for cell, found in some.items() if cell[2] == least}
            if len(first) > 1 or len(some) == 1:
                parts.append(_speed_table(temperature, first, systems, band, least))
            if len({cell[2] for cell in some}) > 1:
                parts.append(_concurrency_table(temperature, some, systems, band))
        parts.append(_step_table(runs))
    return "## Throughput\n\n" + "\n\n".join(part for part in parts if part) if parts else ""


def _span(numbers: Collection[int]) -> str:
    """Return "3", or "2 to 3" where the smallest and the largest differ."""
    return " to ".join(map(str, sorted({min(numbers), max(numbers)})))


def _verdict(runs: Runs, systems: Sequence[str], band: float) -> str:
    lines = []
    for system in systems:
        wins = ties = losses = 0
        for cell in runs.values():
            # No speculation takes part: a system that is slower than that has won nothing.
            values = {name: speed_up(cell, name) for name in systems} | {NONE: 1.0}
            if math.isnan(values[system]):
                continue
            top, level = _stats.best(values, band)
            wins += level == {system}
            ties += system in level and len(level) > 1
            losses += system not in level
        lines.append(f"{system} is fastest in {wins} of {wins + ties + losses} cells, ties in {ties} and trails in {losses}")
    return "; ".join(lines) + "." if lines else ""


def _speed_table(temperature: str, runs: Runs, systems: Sequence[str], band: float, concurrency: int) -> str:
    """The paper's Tables 1 and 5: speed-up over no speculation, then acceptance length / tokens per second; two tables of many systems."""
    rows, whole = [], {system: [speed_up(cell, system) for cell in runs.values()] for system in systems}
    for (_, benchmark, _), cell in runs.items():
        ratios = {system: speed_up(cell, system) for system in systems}
        faster = marked({**ratios, NONE: 1.0}, {system: f"{number(ratio)}x" for system, ratio in ratios.items()}, band)
        both = [f"{number(served_tau(cell, system))} / {number(throughput(cell, system), 1)}" for system in systems]
        rows.append([_datasets.title(benchmark), number(throughput(cell, NONE), 1), *(faster[system] for system in systems), *both])
    plain = [throughput(cell, NONE) for cell in runs.values()]
    means = {system: statistics.mean(values) for system, values in whole.items()}
    average = marked({**means, NONE: 1.0}, {system: f"{number(value)}x" for system, value in means.items()}, band)
    taus = [statistics.mean(served_tau(cell, system) for cell in runs.values()) for system in systems]
    speeds = [statistics.mean(throughput(cell, system) for cell in runs.values()) for system in systems]
    both = [f"{number(tau)} / {number(speed, 1)}" for tau, speed in zip(taus, speeds)]
    rows.append(["Average", number(statistics.mean(plain), 1), *(average[system] for system in systems), *both])
    header, count = ["Benchmark", "None (tokens/s)", *systems, *(f"{system}: tau / tokens/s" for system in systems)], len(systems)
    tables = [table(header, rows)]
    if 2 * count > MOST_COLUMNS:
        tables = [table(header[: 2 + count], [row[: 2 + count] for row in rows])]
        tables.append(table([header[0], *header[2 + count :]], [[row[0], *row[2 + count :]] for row in rows]))
    return (
        f"{temperature[0]} = {temperature[1:]}, concurrency {concurrency}: speed-up over no speculation, and tau / tokens per second "
        "behind it.\n\n" + "\n\n".join(tables)
    )


def _concurrency_table(temperature: str, runs: Runs, systems: Sequence[str], band: float) -> str:
    """The paper's Table 2."""
    rows = []
    for (_, benchmark, concurrency), cell in runs.items():
        ratios = {system: speed_up(cell, system) for system in systems}
        texts = {system: f"{number(ratio)}x ({number(served_tau(cell, system))})" for system, ratio in ratios.items()}
        faster = marked({**ratios, NONE: 1.0}, texts, band)
        rows.append([_datasets.title(benchmark), str(concurrency), number(throughput(cell, NONE), 1), *(faster[s] for s in systems)])
    return (
        f"{temperature[0]} = {temperature[1:]}: speed-up (and tau) by concurrency.\n\n"
        + table(["Benchmark", "Concurrency", "None (tokens/s)", *systems], rows)
    )


def _step_table(runs: Runs) -> str:
    """Where the time of a decode step goes, on a CPU, at each concurrency."""
    sums: dict[tuple[str, int], dict[str, float]] = {}
    for (_, _, concurrency), cell in runs.items():
        for system, rounds in cell.items():
            for result in rounds.values():
                for part, value in (result["step_seconds"] or {}).items():
                    entry = sums.setdefault((system, concurrency), {})
                    entry[part] = entry.get(part, 0.0) + value
    rows = []
    for (system, concurrency), parts in sorted(sums.items(), key=lambda item: (item[0][1], item[0][0])):
        ms = {part: 1e3 * seconds / parts["steps"] for part, seconds in parts.items() if part != "steps"}
        candidates, scored = ms.get("candidates", 0.0), ms.get("head and walk", 0.0)
        walk, verification = ms.get("walk", math.nan), ms.get("verification", math.nan)  # earlier versions did not tell them apart
        outside, whole = ms["everything else"], ms["drafting"] + ms["everything else"]
        head, rest = scored - (0.0 if math.isnan(walk) else walk), outside - (0.0 if math.isnan(verification) else verification)
        split = (ms["drafting"] - candidates - scored, candidates, head, walk, verification, rest, whole)
        shares = (f"{100 * part / whole:.1f} %" for part in (scored, candidates + scored))
        rows.append([system, str(concurrency), *(number(value, 1) for value in split), *shares])
    if not rows:
        return ""
    return (
        "Where a decode step's time goes (ms, all benchmarks together): the drafter's backbone; the candidates (output head, top-K, "
        "log-probabilities); the head; the walk, with the scores of pairs, which are one call; the verification, which is the target's "
        "pass, its logits and the rejection sampler; the rest, which is the scheduler and the server.\n\n"
        + table(
            ["System", "Concurrency", "Drafter", "Candidates", "Head", "Walk", "Verification", "Rest", "Step", "Head and walk", "and candidates"],
            rows,
        )
    )


# Cost.


def block_ms(cell: dict[str, dict[str, dict[str, Any]]], system: str) -> float:
    """Return the wall time of one verified block, in ms: tau / throughput at concurrency one, the median over rounds."""
    values = [1e3 * r["tau"] / r["tokens_per_second"] for r in cell.get(system, {}).values() if r["tau"]]
    return statistics.median(values) if values else math.nan


def head_costs(runs: Runs, control: str, exclude: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return {system: block, head (ms), share, benchmarks {name: ms}} by subtraction (paper, Appendix A)."""
    cells = {benchmark: cell for (t, benchmark, c), cell in runs.items() if t == "T0" and c == 1 and benchmark.partition(":")[0] not in exclude}
    times = {system: {b: block_ms(cell, system) for b, cell in cells.items()} for system in systems_of(runs)}
    times = {system: {b: ms for b, ms in found.items() if not math.isnan(ms)} for system, found in times.items()}
    base = times.get(control, {})
    found = {}
    for system, mine in times.items():
        common = mine.keys() & base.keys()
        if not common:
            continue
        block = statistics.median(mine[b] for b in common)
        head = block - statistics.median(base[b] for b in common)
        found[system] = {"block": block, "head": head, "share": head / block, "benchmarks": {b: mine[b] - base[b] for b in common}}
    return found


def costs(results: Results) -> dict[str, tuple[str, dict[str, dict[str, Any]]]]:
    """Return {grid: (control, head costs)} of every subtraction asked for."""
    every = grids(results)
    return {
        grid: (settings["control"], head_costs(every[grid], settings["control"], settings["exclude"]))
        for (grid,), settings, _ in results.under("cost/")
        if grid in every
    }


def cost_tables(results: Results) -> str:
    parts = []
    for grid, (control, found) in costs(results).items():
        rows = []
        for system, cost in found.items():
            if system == control:
                continue
            spread = f"{number(min(cost['benchmarks'].values()), 3)} to {number(max(cost['benchmarks'].values()), 3)}"
            rows.append([system, number(cost["head"], 3), f"{100 * cost['share']:.1f} %", number(cost["block"], 2), spread])
        if rows:
            parts.append(
                f"By subtraction, grid `{grid}`: the median block time over the benchmarks minus the control's (`{control}`, "
                f"{number(found[control]['block'], 2)} ms), as in the paper's Table 3.\n\n"
                + table(["System", "Head (ms)", "Share of block", "Block (ms)", "Head by benchmark (ms)"], rows)
            )
    for (geometry, dtype), _, result in results.under("stages/"):
        lines = [[line["what"], number(line["median"], 1), number(line["floor"], 1), str(line["launches"])] for line in result["lines"]]
        parts.append(
            f"By stage, `bench head --geometry {geometry} --dtype {dtype} --blocks 1` on {result['device']}: the median time of each "
            "operation, and what this machine's bandwidth and arithmetic would allow, in microseconds.\n\n"
            + table(["Operation", "Median", "Floor", "Launches"], lines)
        )
    return "## Cost of the head\n\n" + "\n\n".join(parts) if parts else ""


# Beside the paper.


def beside_the_paper(results: Results) -> str:
    """Return the paper's figures beside ours, and in what the two differ."""
    parts = [f"Published figures of {_paper.SOURCE}; ours are those of the tables above. {_paper.SETUP} {_differences(results)}"]
    ours = greedy_histograms(results)
    drafters = _drafters(results)
    method, plain = drafters.get("LiLiCorr"), drafters.get("DFlash")
    rows = []
    for benchmark in [*_paper.GREEDY_8B]:
        big, small = _paper.GREEDY_8B[benchmark].systems, _paper.GREEDY_4B[benchmark].systems
        cells = [number(big["LiLiCorr"][0]), number(big["DFlash"][0]), percent(big["LiLiCorr"][0] / big["DFlash"][0]),
                 percent(small["LiLiCorr"][0] / small["DFlash"][0])]  # fmt: skip
        mine, base = _our_tau(ours, method, benchmark), _our_tau(ours, plain, benchmark)
        rows.append([_label("mean") if benchmark == "average" else _datasets.title(benchmark), *cells, number(mine), number(base), percent(mine / base)])
    parts.append(
        "Acceptance length, T = 0. Ours are missing where a benchmark was not measured, and the averages are over different benchmarks.\n\n"
        + table(["Benchmark", "LiLiCorr, 8B", "DFlash, 8B", "Gain, 8B", "Gain, 4B", f"Ours: {method or 'LiLiCorr'}", f"Ours: {plain or 'DFlash'}", "Our gain"], rows)
    )
    parts.append(_methods_beside(ours, drafters))
    parts.append(_sampled_beside(results, method))
    parts.append(_speed_beside(results))
    greedy_exact = ours.get(method or "", {})
    if {"greedy", "exact"} <= greedy_exact.keys():
        rows = []
        for benchmark, (greedy, exact) in _paper.RULES_8B.items():
            tables = [greedy_exact[rule].get(benchmark) for rule in ("greedy", "exact")]
            both = [math.nan if histograms is None else _stats.tau(np.asarray(histograms)) for histograms in tables]
            rows.append([_datasets.title(benchmark), percent(exact / greedy, 2), percent(both[1] / both[0], 2)])
        parts.append("Change of tau from the greedy walk to the exact path, T = 0 (the paper's Table 16).\n\n" + table(["Benchmark", "Paper, 8B", "Ours"], rows))
    rows = [[name, f"{big[0]:.3f} ms, {big[1]} %", f"{small[0]:.3f} ms, {small[1]} %", "-"] for name, (big, small) in _paper.COST.items()]
    for control, found in costs(results).values():
        rows += [[f"ours: {name}", "-", "-", f"{cost['head']:.3f} ms, {100 * cost['share']:.1f} %"] for name, cost in found.items() if name != control]
    parts.append("Per-block cost of the head and its share of the block (the paper's Table 3).\n\n" + table(["System", "Paper, 8B", "Paper, 4B", "Ours"], rows))
    return "## Beside the paper\n\n" + "\n\n".join(part for part in parts if part)


def _drafters(results: Results) -> dict[str, str]:
    """Return {method as the paper calls it: our first drafter of that kind}, of those measured at temperature 0."""
    recorded = {name: result for (_, name), _, result in results.under("acceptance/T0/")}
    found: dict[str, str] = {}
    for name, rules in greedy_histograms(results).items():
        architecture, convolved = recorded[name].get("architecture"), recorded[name].get("convolution", False)
        system = dict(zip(_paper.ARCHITECTURES, _paper.SYSTEMS)).get(architecture or "")
        if convolved and system != "DFlash2":  # which always has one; with one, the others are not the paper's plain systems
            system = _paper.CONVOLVED if system == "LiLiCorr" else None
        if architecture is None:  # a result of an earlier version, which had two kinds of drafter
            system = "LiLiCorr" if {"greedy", "exact"} <= rules.keys() else "DFlash" if set(rules) == {"argmax"} else None
        if system is not None:
            found.setdefault(system, name)
    return found


def _methods_beside(ours: dict[str, dict[str, Histograms]], drafters: dict[str, str]) -> str:
    """Every method's acceptance length relative to the plain drafter's, where one of ours is neither it nor LiLiCorr."""
    if not drafters.keys() - {"LiLiCorr", "DFlash"}:
        return ""
    rows = []
    published = [source["average"].systems for source in (_paper.GREEDY_8B, _paper.GREEDY_4B)]
    base = _our_tau(ours, drafters.get("DFlash"), "average")
    for system in (*_paper.SYSTEMS, *({_paper.CONVOLVED} & drafters.keys())):
        mine = _our_tau(ours, drafters.get(system), "average")
        figures = ["-"] * 3
        if system in _paper.SYSTEMS:
            gains = [percent(taus[system][0] / taus["DFlash"][0]) for taus in published]
            figures = [number(published[0][system][0]), *gains]
        rows.append([system, *figures, drafters.get(system, "-"), number(mine), percent(mine / base)])
    unpublished = f" Of {_paper.CONVOLVED} it has the cost alone." if _paper.CONVOLVED in drafters else ""
    return (
        "Acceptance length by method, T = 0, the average over benchmarks, and its gain over the plain drafter (from the paper's Tables 5 "
        f"and 6).{unpublished}\n\n" + table(["Method", "Paper, 8B", "Gain, 8B", "Gain, 4B", "Ours", "Ours: tau", "Our gain"], rows)
    )


def _our_tau(ours: dict[str, dict[str, Histograms]], name: str | None, benchmark: str) -> float:
    if name is None:
        return math.nan
    histograms = ours[name][next(rule for _, rule in _columns({name: ours[name]}))]
    if benchmark == "average":
        return statistics.mean(_stats.tau(np.asarray(h)) for h in histograms.values()) if histograms else math.nan
    return _stats.tau(np.asarray(histograms[benchmark])) if benchmark in histograms else math.nan


def _sampled_beside(results: Results, method: str | None) -> str:
    """Acceptance lengths at T = 1 of the sampled and the point proposal, and by how much drawing helps."""
    ours = sampled_taus(results).get("1", {})
    rows = []
    for benchmark in _paper.SAMPLED_8B:
        published = [source[benchmark].systems["LiLiCorr"][0] for source in (_paper.SAMPLED_8B, _paper.POINT_8B)]
        mine = []
        for proposal in ("sampled", "point"):
            runs = ours.get((method or "", proposal), {})
            chosen = list(runs.values()) if benchmark == "average" else [runs[benchmark]] if benchmark in runs else []
            mine.append(statistics.mean(statistics.mean(seeds.values()) for seeds in chosen) if chosen else math.nan)
        cells = [cell for pair in (published, mine) for cell in (number(pair[0]), number(pair[1]), percent(pair[0] / pair[1]))]
        rows.append([_label("mean") if benchmark == "average" else _datasets.title(benchmark), *cells])
    header = [f"{whose}: {what}" for whose in ("Paper, 8B", "Ours") for what in ("sampled", "point", "gain")]
    return "Acceptance length of LiLiCorr, T = 1, sampled and point proposals (the paper's Tables 5 and 7).\n\n" + table(["Benchmark", *header], rows)


def _speed_beside(results: Results) -> str:
    """The paper's speed-ups at concurrency one, T = 0, beside those of the first grid that has it."""
    grid = next((name for name, runs in grids(results).items() if any(cell[0] == "T0" and cell[2] == 1 for cell in runs)), None)
    runs = grids(results)[grid] if grid else {}
    systems = systems_of(runs)
    rows = []
    for benchmark, row in _paper.GREEDY_8B.items():
        if benchmark == "average":
            continue
        small = _paper.GREEDY_4B[benchmark]
        cell = runs.get(("T0", benchmark, 1), {})
        published = [f"{number(source.systems[name][1] / source.plain)}x" for source in (row, small) for name in ("LiLiCorr", "DFlash")]
        mine = [speed_up(cell, system) for system in systems]
        rows.append([_datasets.title(benchmark), *published, *("-" if math.isnan(ratio) else f"{ratio:.2f}x" for ratio in mine)])
    return (
        "Speed-up over no speculation, T = 0, concurrency one (the paper's from its throughputs, Tables 5 and 6).\n\n"
        + table(["Benchmark", "LiLiCorr, 8B", "DFlash, 8B", "LiLiCorr, 4B", "DFlash, 4B", *(f"Ours: {system}" for system in systems)], rows)
    )


def _differences(results: Results) -> str:
    """Return what of ours is unlike the paper, read from the settings of what was measured."""
    settings: list[dict[str, Any]] = [part["settings"] for part in results.comparable().values() if "target" in part["settings"]]
    if not settings:
        return "Nothing of ours has been measured yet."

    def named(key: str) -> str:
        return ", ".join(dict.fromkeys(str(entry[key]) for entry in settings if key in entry))

    prompts = [len(h) for rules in greedy_histograms(results).values() for table_ in rules.values() for h in table_.values()]
    slots = {len(h[0]) for rules in greedy_histograms(results).values() for table_ in rules.values() for h in table_.values() if h}
    sizes = f"{_span(prompts)} prompts a benchmark, " if prompts else ""
    blocks = f"blocks of {', '.join(map(str, sorted(slots)))} tokens, " if slots else ""
    return (
        f"Ours: the target {named('target')} in {named('dtype')} with vLLM and plain transformers on {describe(results.machine)}, "
        f"{blocks}{sizes}at most {named('max_tokens')} tokens an answer, drafters {named('draft') or 'as named'} (their training is in "
        "their model cards). Compare ratios, not absolute figures: the target's size, the data and the hardware all differ."
    )
