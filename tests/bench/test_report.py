"""Tables and plots from fixed results."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from vllm_lilicorr.bench import _paper, _plots, report
from vllm_lilicorr.bench.__main__ import main as bench
from vllm_lilicorr.bench._results import Results


def rows(text: str, first: str) -> list[list[str]]:
    """Return the cells of every table row that begins with `first`."""
    found = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith(f"| {first} |")]
    assert found, f"no row '{first}' in:\n{text}"
    return found


def greedy(results: Results, benchmark: str, name: str, **rules: list[list[int]]) -> None:
    result = {"answered": 2, "prompts": 2, "tokens": 10, "rules": rules}
    settings = {"target": "tiny", "dtype": "float32", "max_tokens": 10, "draft": name}
    results.put(f"acceptance/T0/{benchmark}/{name}", settings, result)


STEP = {
    "drafting": 2.0, "candidates": 0.5, "head and walk": 1.0, "walk": 0.25,
    "everything else": 8.0, "verification": 6.5, "steps": 1000,
}  # fmt: skip


def served(results: Results, where: str, system: str, *speeds: float, tau: float | None = None) -> None:
    """Put one result a round; `where` is grid/benchmark/concurrency."""
    grid, benchmark, concurrency = where.split("/")
    counted = {"drafts": 100, "accepted": round(100 * (tau - 1)), "tau": tau, "step_seconds": STEP} if tau else {
        "drafts": None, "accepted": None, "tau": None, "step_seconds": None
    }  # fmt: skip
    for round_, speed in enumerate(speeds):
        key = f"serve/{grid}/T0/{benchmark}/c{concurrency}/{system}/round{round_}"
        results.put(key, {"target": "tiny"}, {"tokens_per_second": speed, **counted})


@pytest.fixture
def full(results) -> Results:
    """Two drafters on two benchmarks, one sampled run, two grids, a cost."""
    found = results()
    for benchmark in ("mt-bench", "gsm8k"):
        greedy(
            found, benchmark, "lilicorr", coverage=[[0, 0, 4], [0, 0, 2]], argmax=[[2, 2, 0], [2, 0, 0]],
            greedy=[[1, 1, 2], [0, 2, 0]], exact=[[1, 2, 1], [1, 1, 0]],
        )  # fmt: skip
        greedy(found, benchmark, "dflash", argmax=[[3, 1, 0], [2, 0, 0]])
        for proposal in ("sampled", "point"):
            for seed, table in ((42, [[1, 1, 0]]), (43, [[0, 1, 1]])):
                result = {"answered": 1, "prompts": 1, "tokens": 5, "rules": {"sampled": table}}
                found.put(f"acceptance/T1/{benchmark}/lilicorr/{proposal}/seed{seed}", {}, result)
    for benchmark, fast, slow in (("gsm8k", 150.0, 120.0), ("mt-bench", 101.0, 110.0)):
        served(found, f"bench/{benchmark}/1", "none", 100, 50, 200)
        served(found, f"bench/{benchmark}/1", "lilicorr", fast, fast / 2, 3 * fast, tau=2.0)
        served(found, f"bench/{benchmark}/1", "control", slow, slow / 2, 2 * slow, tau=1.5)
        served(found, f"bench/{benchmark}/1", "none again", 100, 50, 204)
    for concurrency in (1, 2, 4):
        served(found, f"sweep/gsm8k/{concurrency}", "none", 100 * concurrency)
        served(found, f"sweep/gsm8k/{concurrency}", "lilicorr", 150 * concurrency, tau=2.0)
    settings = {"grid": "bench", "control": "control", "exclude": ["humaneval"]}
    found.put("cost/bench", settings, settings)
    return found


def test_acceptance_has_every_rule_with_intervals_and_the_bound_last(full):
    text = report.acceptance_tables(full)
    header = rows(text, "Benchmark")[0]
    rules = ("lilicorr, greedy", "lilicorr, exact", "lilicorr, argmax", "lilicorr, coverage", "dflash, argmax")
    assert header == ["Benchmark", *rules]
    gsm8k, average, whole = (rows(text, name)[0] for name in ("GSM8K", "Average", "All prompts"))
    assert re.fullmatch(r"2\.17 \(\d\.\d\d-\d\.\d\d\)", gsm8k[1]) and gsm8k[4].startswith("3.00 (3.00-3.00)")
    assert average[1][:4] == whole[1][:4] == "2.17"
    assert text.index("| GSM8K |") < text.index("| MT-Bench |")


def test_the_rules_table_has_the_papers_change_and_its_mean(full):
    table = report._rules_table(full)
    assert rows(table, "GSM8K")[0] == ["GSM8K", "**2.167**", "1.833", "-15.38 %"]
    assert rows(table, "Mean change")[0][-1] == "-15.38 %"


def test_sampled_runs_have_mean_and_deviation_over_seeds(full):
    table = report._sampled_tables(full)
    assert "T = 1" in table and "seeds 42, 43" in table
    assert rows(table, "GSM8K")[0] == ["GSM8K", "2.00 (0.71)", "2.00 (0.71)"]
    assert rows(table, "Average")[0][1:] == ["2.00", "2.00"]


def test_the_comparison_is_with_the_first_drafters_rule(full):
    table = report._comparison_table(full)
    assert "drafts of lilicorr under greedy" in table
    assert [row[0] for row in rows(table, "dflash, argmax")] == ["dflash, argmax"]
    assert rows(table, "dflash, argmax")[0][2].startswith("+85.7 %")


def test_positions_sum_to_the_accepted_drafts(full):
    shares = report.positions(full)
    assert shares["lilicorr", "greedy"] == pytest.approx([5 / 6, 2 / 6])
    assert rows(report._position_table(full), "lilicorr, greedy")[0][1:] == ["0.83", "0.33"]


def test_speed_ups_are_medians_of_ratios_within_a_round(full):
    runs = report.grids(full)["bench"]
    assert report.speed_up(runs["T0", "gsm8k", 1], "lilicorr") == pytest.approx(1.5)
    served(full, "drift/gsm8k/1", "none", 100, 50, 80)
    served(full, "drift/gsm8k/1", "lilicorr", 150, 80, 96, tau=2.0)
    drift = report.grids(full)["drift"]["T0", "gsm8k", 1]
    assert report.speed_up(drift, "lilicorr") == pytest.approx(1.5)  # of 1.5, 1.6 and 1.2; the medians' ratio is 1.2
    assert report.floor(runs) == 0.01


def test_differences_inside_the_noise_floor_are_ties(full):
    text = report.serve_tables(full)
    assert rows(text, "GSM8K")[0][2:4] == ["**1.50x**", "1.20x"]
    served(full, "noisy/gsm8k/1", "none", 100)
    served(full, "noisy/gsm8k/1", "none again", 107)
    served(full, "noisy/gsm8k/1", "a", 150, tau=2.0)
    served(full, "noisy/gsm8k/1", "b", 141, tau=2.0)
    served(full, "noisy/gsm8k/1", "c", 140, tau=2.0)
    noisy = report.serve_tables(full).partition("Grid `noisy`")[2]
    assert "Noise floor 7.0 %" in noisy
    assert rows(noisy, "GSM8K")[0][2:5] == ["**1.50x**", "*1.41x*", "1.40x"]
    assert "a is fastest in 0 of 1 cells, ties in 1 and trails in 0" in noisy
    assert "c is fastest in 0 of 1 cells, ties in 0 and trails in 1" in noisy


def test_a_system_slower_than_no_speculation_has_won_nothing(full):
    served(full, "slow/gsm8k/1", "none", 100)
    served(full, "slow/gsm8k/1", "lilicorr", 80, tau=1.1)
    slow = report.serve_tables(full).partition("Grid `slow`")[2]
    assert "lilicorr is fastest in 0 of 1 cells, ties in 0 and trails in 1" in slow
    assert rows(slow, "GSM8K")[0][2] == "0.80x"


def test_tau_and_throughput_stand_side_by_side_and_steps_are_split(full):
    text = report.serve_tables(full)
    assert rows(text, "GSM8K")[0][-2:] == ["2.00 / 150.0", "1.50 / 120.0"]
    assert rows(text, "lilicorr")[0] == ["lilicorr", "1", "0.5", "0.5", "0.8", "0.2", "6.5", "1.5", "10.0", "10.0 %", "15.0 %"]
    sweep = text.partition("Grid `sweep`")[2]
    lines = [row[1:] for row in rows(sweep, "GSM8K")]
    assert lines == [[str(c), f"{100 * c}.0", "**1.50x (2.00)**"] for c in (1, 2, 4)]


def test_the_heads_cost_is_the_difference_of_median_block_times(full):
    (control, found), = report.costs(full).values()
    assert control == "control"
    # Block times: 2.0 / 150 of gsm8k and 2.0 / 101 of mt-bench, median over three rounds whose machine ran at 1, 1/2 and 3 times.
    blocks = {"gsm8k": 2e3 / 150, "mt-bench": 2e3 / 101}
    control_block = (1.5e3 / 120 + 1.5e3 / 110) / 2
    assert found["lilicorr"]["head"] == pytest.approx(np.median(list(blocks.values())) - control_block)
    assert found["lilicorr"]["share"] == pytest.approx(found["lilicorr"]["head"] / found["lilicorr"]["block"])
    assert rows(report.cost_tables(full), "lilicorr")[0][1] == f"{found['lilicorr']['head']:.3f}"


def test_excluded_benchmarks_leave_the_median(full):
    runs = report.grids(full)["bench"]
    (benchmarks,) = {tuple(cost["benchmarks"]) for cost in report.head_costs(runs, "control", ["mt-bench"]).values()}
    assert benchmarks == ("gsm8k",)


def test_the_papers_figures_stand_beside_ours_with_what_differs(full):
    text = report.beside_the_paper(full)
    gsm8k = rows(text, "GSM8K")[0]
    assert gsm8k[1:5] == ["7.56", "6.34", "+19.2 %", "+19.4 %"] and gsm8k[5:] == ["2.17", "1.17", "+85.7 %"]
    sampled = rows(text, "GSM8K")[1]
    assert sampled[1:] == ["6.86", "6.49", "+5.7 %", "2.00", "2.00", "+0.0 %"]
    assert rows(text, "MBPP")[0][5:] == ["-", "-", "-"] and "by method" not in text
    assert "the target tiny in float32" in text and "2 prompts a benchmark" in text
    assert rows(text, "LiLiCorr + conv")[0] == ["LiLiCorr + conv", "0.436 ms, 4.7 %", "0.396 ms, 6.3 %", "-"]


@pytest.mark.parametrize("rows_", [_paper.GREEDY_8B, _paper.GREEDY_4B, _paper.SAMPLED_8B, _paper.POINT_8B])
def test_the_papers_averages_are_the_means_of_its_rows(rows_):
    """A slip in copying would show: every column's average is printed in the paper."""
    benchmarks = [row for name, row in rows_.items() if name != "average"]
    assert len(benchmarks) == 9
    for system in _paper.SYSTEMS:
        for place, tolerance in ((0, 0.0101), (1, 1.01)):
            mean = np.mean([row.systems[system][place] for row in benchmarks])
            assert mean == pytest.approx(rows_["average"].systems[system][place], abs=tolerance)


def test_reports_say_where_and_what_is_missing(full):
    full.note_missing({"mbpp": "no file"}, [])
    text = report.preamble(full)
    assert "cores" in text and "`python -m vllm_lilicorr.bench run`" in text and "MBPP (no file)" in text


def test_parts_of_other_prompts_are_left_out_and_counted(results):
    found = results()
    for benchmark, name, prompts in (("gsm8k", "a", 3), ("mt-bench", "a", 2), ("gsm8k", "b", 2), ("mt-bench", "b", 2)):
        result = {"answered": prompts, "prompts": prompts, "tokens": 10, "rules": {"argmax": [[1, 1]] * prompts}}
        found.put(f"acceptance/T0/{benchmark}/{name}", {"prompts": f"{prompts} of {benchmark}", "draft": name}, result)
    text = report.acceptance_tables(found)
    assert "| GSM8K |" not in text and rows(text, "MT-Bench")[0][1:] == ["1.50 (1.50-1.50)"] * 2
    assert "Left out of `acceptance/T0`: 1 part measured with other settings" in text


def test_drafters_without_a_benchmark_in_common_are_said_and_not_compared(results):
    found = results()
    greedy(found, "gsm8k", "a", argmax=[[1, 1]])
    greedy(found, "mt-bench", "b", argmax=[[1, 1]])
    text = report.acceptance_tables(found)
    assert "No benchmark was measured with each of a, b at T = 0" in text and "|" not in text
    assert rows(report.beside_the_paper(found), "GSM8K")[0][5:] == ["-", "-", "-"]


def test_the_first_drafter_is_the_newest_commands_first(full):
    assert "drafts of lilicorr under greedy" in report._comparison_table(full)
    full.note_order("acceptance", ["dflash", "lilicorr"])
    assert "drafts of dflash under argmax" in report._comparison_table(full)
    assert rows(report.beside_the_paper(full), "GSM8K")[0][5:] == ["2.17", "1.17", "+85.7 %"]  # LiLiCorr is told by its rules


METHODS = {
    "dflash2": ("DFlash2DraftModel", ("greedy", "exact", "exact-normalized", "argmax", "coverage")),
    "lilicorr": ("LiLiCorrDraftModel", ("greedy", "exact", "exact-normalized", "argmax", "coverage")),
    "domino": ("DominoDraftModel", ("greedy", "argmax")),
    "dspark": ("Qwen3DSparkModel", ("greedy", "argmax")),
    "dflash": ("DFlashDraftModel", ("argmax",)),
    "lilicorr+conv": ("LiLiCorrDraftModel", ("greedy", "exact", "exact-normalized", "argmax", "coverage")),
}


@pytest.fixture
def compared(results) -> Results:
    """The six drafters of a comparison; under its own rule, of 4 blocks drafter i accepts the one draft of i."""
    found = results()
    for place, (name, (architecture, rules)) in enumerate(METHODS.items()):
        tables = {rule: [[4 - place // (2 if number else 1), place // (2 if number else 1)]] for number, rule in enumerate(rules)}
        for benchmark in ("gsm8k", "mt-bench"):
            kind = {"architecture": architecture, "convolution": name in ("dflash2", "lilicorr+conv")}
            result = {**kind, "answered": 1, "prompts": 1, "tokens": 9, "rules": tables}
            found.put(f"acceptance/T0/{benchmark}/{name}", {"target": "tiny", "draft": name}, result)
    return found


def test_each_method_stands_beside_its_own_in_the_paper(compared):
    text = report.beside_the_paper(compared)
    table = text.partition("Acceptance length by method")[2].partition("\n\nAcceptance length of LiLiCorr")[0]
    assert [rows(table, system)[0][4] for system in _paper.SYSTEMS] == ["lilicorr", "dflash2", "domino", "dspark", "dflash"]
    assert rows(table, "DSpark")[0] == ["DSpark", "6.40", "+14.5 %", "+13.0 %", "dspark", "1.75", "-12.5 %"]
    assert rows(text, "GSM8K")[0][5:] == ["1.25", "2.00", "-37.5 %"], "LiLiCorr is told by its architecture, not by its lattice"
    assert rows(table, "LiLiCorr + conv")[0] == ["LiLiCorr + conv", "-", "-", "-", "lilicorr+conv", "2.25", "+12.5 %"]


def test_a_drafter_with_a_convolution_is_not_taken_for_the_papers_without(compared):
    compared.note_order("acceptance", list(reversed(METHODS)))
    drafters = report._drafters(compared)
    assert (drafters["LiLiCorr"], drafters["LiLiCorr + conv"], drafters["DFlash2"]) == ("lilicorr", "lilicorr+conv", "dflash2")
    for part in list(compared.parts.values()):
        if part["settings"]["draft"] == "dflash":
            part["result"]["convolution"] = True
    assert "DFlash" not in report._drafters(compared)


def test_many_drafters_have_a_table_of_own_rules_and_one_each(compared):
    text = report.acceptance_tables(compared)
    headers = rows(text, "Benchmark")[:6]
    own = [f"{name}, {rules[0]}" for name, (_, rules) in METHODS.items()]
    assert headers[0] == ["Benchmark", *own]
    several = {name: rules for name, (_, rules) in METHODS.items() if len(rules) > 1}
    assert headers[1:] == [["Benchmark", *(f"{name}, {rule}" for rule in rules)] for name, rules in several.items()]
    assert [cell[:4] for cell in rows(text, "GSM8K")[0][1:]] == ["1.00", "1.25", "1.50", "1.75", "2.00", "2.25"]


def test_a_plot_of_many_drafters_has_a_line_each(compared, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    drawn = []
    monkeypatch.setattr(_plots, "_positions", lambda lines: drawn.append(list(lines)))
    monkeypatch.setattr(_plots, "_save", lambda figure, path: pyplot.close("all"))
    _plots.draw(compared, compared.path.parent)
    assert drawn == [[(name, rules[0]) for name, (_, rules) in METHODS.items()]]


def test_many_systems_have_a_table_of_speed_ups_and_one_of_what_is_behind_them(results):
    found = results()
    names = ["lilicorr", "dflash2", "domino", "dspark", "dflash"]
    for benchmark in ("gsm8k", "mt-bench"):
        served(found, f"g/{benchmark}/1", "none", 100)
        for place, name in enumerate(names):
            served(found, f"g/{benchmark}/1", name, 150 - 10 * place, tau=2.0)
    text = report.serve_tables(found)
    assert rows(text, "Benchmark")[0] == ["Benchmark", "None (tokens/s)", *names]
    assert rows(text, "Benchmark")[1] == ["Benchmark", *(f"{name}: tau / tokens/s" for name in names)]
    speedups, behind = rows(text, "Average")
    assert speedups == ["Average", "100.0", "**1.50x**", "1.40x", "1.30x", "1.20x", "1.10x"]
    assert behind == ["Average", *(f"2.00 / {150 - 10 * place}.0" for place in range(5))]


def test_the_names_of_the_longest_bars_end_inside_the_plot(results):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    found = results()
    for benchmark in ("gsm8k", "mt-bench"):
        served(found, f"g/{benchmark}/1", "none", 100)
        served(found, f"g/{benchmark}/1", "lilicorr", 95, tau=1.1)
        served(found, f"g/{benchmark}/1", "lilicorr+conv, normalised", 140, tau=2.0)
    figure = _plots._speed_up(report.grids(found)["g"], 0.01)
    (axes,) = figure.axes
    figure.canvas.draw()
    ends = [text.get_window_extent().x1 for text in axes.texts]
    edge = axes.get_window_extent().x1
    pyplot.close(figure)
    assert len(ends) == 4 and max(ends) <= edge


def test_rounds_of_different_seeds_are_not_compared(results):
    found = results()
    for system, seed, speed in (("none", 7, 100.0), ("lilicorr", 42, 300.0)):
        result = {"tokens_per_second": speed, "drafts": None, "accepted": None, "tau": None, "step_seconds": None}
        found.put(f"serve/g/T1/gsm8k/c1/{system}/round0", {"seed": seed}, result)
    (cell,) = report.grids(found)["g"].values()
    assert np.isnan(report.speed_up(cell, "lilicorr"))
    report.serve_tables(found)


def test_a_run_may_end_anywhere_and_still_has_its_report(full, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.setattr(report._stats, "RESAMPLES", 5)
    monkeypatch.setattr(_plots, "_save", lambda figure, path: pyplot.close(figure))
    every = dict(full.parts)
    for count in range(0, len(every) + 1, 3):
        full.parts = dict(list(every.items())[:count])
        report.write(full, full.path.parent)


def test_an_empty_file_is_a_report_of_the_paper_alone(results):
    found = results()
    assert report.acceptance_tables(found) == report.serve_tables(found) == report.cost_tables(found) == ""
    assert "Nothing of ours has been measured yet" in report.beside_the_paper(found)


def test_the_command_writes_report_and_plots(full, capsys):
    pytest.importorskip("matplotlib")
    folder = full.path.parent
    assert bench(["report", str(folder)]) == 0
    text = (folder / "report.md").read_text()
    shown = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)
    assert sorted(shown) == [
        "acceptance_by_position.png", "speedup_by_benchmark-bench-T0.png", "throughput_by_concurrency-sweep-T0.png"
    ]  # fmt: skip
    for name in shown:
        assert (folder / name).read_bytes()[:4] == b"\x89PNG" and (folder / name).stat().st_size > 10_000
    before = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    bench(["report", str(folder)])
    assert before == {path.name: path.read_bytes() for path in Path(folder).iterdir()}
