"""One configuration file for a whole grid: its keys are the benchmarks' own options."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_lilicorr.bench import _datasets, _paper, acceptance, cost, run, serve
from vllm_lilicorr.bench.__main__ import main as bench
from vllm_lilicorr.bench._results import Results
from vllm_lilicorr.errors import UserError

CONFIGS = Path(__file__).parents[2] / "configs/bench"

GOOD = """
output: out
common: {target: t, prompts-dir: p, num-prompts: 3}
acceptance:
  - {draft: [a=x, b=y], temperature: [0], num-prompts: 5}
  - {draft: [a=x], temperature: [1]}
serve: {systems: [a=x], together: true, ignore-eos: false, name: grid}
cost: {grid: grid, exclude: []}
"""

RESULT = {"answered": 1, "prompts": 1, "tokens": 3, "rules": {"greedy": [[1, 1]]}}


def config(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "bench.yaml"
    path.write_text(text)
    return path


def test_sections_are_command_lines(tmp_path):
    output, sections = run.read(config(tmp_path, GOOD))
    assert output == Path("out") and [name for name, _ in sections] == ["acceptance", "acceptance", "serve", "cost"]
    first, second, served, costed = (arguments for _, arguments in sections)
    assert first.draft == ["a=x", "b=y"] and first.num_prompts == 5 and second.num_prompts == 3 and first.temperature == [0.0]
    assert served.together and not served.ignore_eos and served.prompts_dir == Path("p") and served.output == Path("out")
    assert costed.grid == "grid" and costed.exclude == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("temperature: [1]", "temprature: [1]"), r"acceptance\[1\].temprature is no option .* did you mean 'temperature'"),
        (("together: true", "repeats: many"), "serve: repeats: invalid int value: 'many'"),
        (("serve:", "server:"), "server is no known section; did you mean 'serve'"),
        (("systems: [a=x], ", ""), "serve: the following arguments are required: --systems"),
        (("num-prompts: 3", "num-prompt: 3"), "common.num-prompt is an option of none of the sections"),
        (("output: out", ""), "output is missing"),
        (("serve: {", "serve: ["), "is not valid YAML"),
        (("cost: {", "cost: {grid: other, "), r"is not valid YAML \(line 8, .*the key 'grid' stands twice"),
        (("grid: grid", "output: there"), "cost.output is no option"),
    ],
)
def test_mistakes_name_file_section_and_key(tmp_path, change, sentence):
    path = config(tmp_path, GOOD.replace(*change))
    with pytest.raises(UserError, match=sentence) as raised:
        run.read(path)
    assert str(raised.value).startswith(str(path))


def test_everything_runs_in_turn_and_the_report_is_written(tmp_path, monkeypatch, capsys):
    ran = []
    for name, module in (("acceptance", acceptance), ("serve", serve), ("cost", cost)):
        monkeypatch.setattr(module, "measure", lambda arguments, results, name=name: ran.append(name))
    bench(["run", "--config", str(config(tmp_path, GOOD)), "--output", str(tmp_path / "out")])
    assert ran == ["acceptance", "acceptance", "serve", "cost"]
    assert (tmp_path / "out/report.md").read_text().startswith("# Benchmark results")
    bench(["run", "--config", str(config(tmp_path, GOOD)), "--output", str(tmp_path / "out"), "--only", "cost"])
    assert ran[4:] == ["cost"]


def test_a_section_without_prompts_is_named_and_the_others_run(tmp_path, monkeypatch, capsys):
    ran = []

    def no_prompts(arguments, results):
        raise _datasets.NoPrompts({"speed-1k": "is withheld"})

    monkeypatch.setattr(acceptance, "measure", lambda arguments, results: results.put("acceptance/T0/gsm8k/a", {}, RESULT))
    monkeypatch.setattr(serve, "measure", no_prompts)
    monkeypatch.setattr(cost, "measure", lambda arguments, results: ran.append("cost"))
    command = ["run", "--config", str(config(tmp_path, GOOD)), "--output", str(tmp_path / "out")]
    assert bench(command) == 0 and ran == ["cost"]
    assert "missing: speed-1k: is withheld" in capsys.readouterr().err
    assert "Not measured: SPEED 1K (is withheld)." in (tmp_path / "out/report.md").read_text()
    assert Results.read(tmp_path / "out").missing == {"speed-1k": "is withheld"}
    with pytest.raises(UserError, match="speed-1k: is withheld"):
        bench([*command, "--only", "serve"])


def test_the_report_is_written_of_what_there_is_when_a_section_fails(tmp_path, monkeypatch):
    def fail(arguments, results):
        raise UserError("no server")

    monkeypatch.setattr(acceptance, "measure", lambda arguments, results: results.put("acceptance/T0/gsm8k/a", {}, RESULT))
    monkeypatch.setattr(serve, "measure", fail)
    with pytest.raises(UserError, match="no server"):
        bench(["run", "--config", str(config(tmp_path, GOOD)), "--output", str(tmp_path / "out")])
    assert "| GSM8K | 1.50 (1.50-1.50) |" in (tmp_path / "out/report.md").read_text()


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.yaml")))
def test_the_configurations_that_come_with_the_project_are_sound(name):
    _, sections = run.read(CONFIGS / f"{name}.yaml")
    assert {section for section, _ in sections} == {"acceptance", "serve", "cost"}
    grids = {}
    for section, arguments in sections:
        if section == "serve":
            grids[arguments.name] = [serve.parse_system(text).name for text in arguments.systems]
        if section == "acceptance":
            acceptance.named(arguments.draft)
        if section == "cost":
            assert arguments.control in grids[arguments.grid]
    assert len(grids) == sum(section == "serve" for section, _ in sections), "every grid has a name of its own"


@pytest.mark.parametrize("name", ["paper", "paper-4b"])
def test_the_papers_configuration_has_its_whole_grid(name):
    _, sections = run.read(CONFIGS / f"{name}.yaml")
    systems = {system.lower() for system in _paper.SYSTEMS}
    arms = systems | {_paper.CONVOLVED.lower().replace(" ", "")}
    greedy, sampled = (arguments for section, arguments in sections if section == "acceptance")
    assert set(acceptance.named(greedy.draft)) == set(acceptance.named(sampled.draft)) == arms
    assert (greedy.temperature, sampled.temperature, sampled.seeds) == ([0.0], [1.0], [42, 43, 44])
    assert sampled.proposals == ["sampled", "point"]
    served = {arguments.name: arguments for section, arguments in sections if section == "serve"}
    names = {grid: {serve.parse_system(text).name for text in found.systems} for grid, found in served.items()}
    assert names["greedy"] >= arms | {"exact", "control"} and names["concurrency"] == systems
    assert names["sampled"] == systems | {f"{system}-point" for system in ("lilicorr", "dflash2", "dspark")}
    assert (served["sampled"].temperature, served["sampled"].seeds) == ([1.0], [42, 43, 44])
    assert served["concurrency"].concurrency == [1, 2, 4, 8, 16, 32] and len(served["concurrency"].datasets) == 6
    nine = [arguments for section, arguments in sections if section != "cost" and getattr(arguments, "name", "") != "concurrency"]
    assert all(arguments.datasets is None and arguments.num_prompts is None for arguments in nine), "whole benchmarks, all nine"
    assert set(_datasets.BENCHMARKS) == _paper.GREEDY_8B.keys() - {"average"}
    (cost_,) = (arguments for section, arguments in sections if section == "cost")
    assert (cost_.grid, cost_.exclude) == ("greedy", ["humaneval"])


def test_the_papers_two_targets_are_measured_alike():
    first, second = (run.read(CONFIGS / f"{name}.yaml")[1] for name in ("paper", "paper-4b"))
    assert len(first) == len(second)
    for (section, ours), (other, theirs) in zip(first, second):
        renamed = repr(vars(ours)).replace("8b", "4b").replace("8B", "4B").replace("bench/paper", "bench/paper-4b")
        assert (section, renamed) == (other, repr(vars(theirs)))
