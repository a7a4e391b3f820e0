"""The recipes' scripts, with a stand-in for the trainer: which arms they train, on which cores, and what a second start does."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from vllm_lilicorr.bench import run as bench_run
from vllm_lilicorr.trainer.config import TrainConfig

ROOT = Path(__file__).resolve().parents[2]
STUB = """#!/usr/bin/env bash
echo "$(taskset -cp $$ | sed 's/.*: //') $*" >> calls
out=$(printf '%s\\n' "$@" | sed -n 's/^run.output=//p')
case "$*" in
    *--print-config) set -- "${@:1:$#-1}"; echo "# hash: $*" ;;
    *main.py*fails*) exit 3 ;;
    *main.py*) mkdir -p "$out/export"; echo "# hash: $*" > "$out/config.yaml" ;;
esac
"""
CORES = {0, 1}
pytestmark = pytest.mark.skipif(not os.sched_getaffinity(0) >= CORES, reason="the recipes pin to cores 0 and 1")


@pytest.fixture
def recipe(tmp_path):
    """Return a function that runs a recipe in a folder of its own: (status, trainings as (core, words), words of other calls)."""
    shutil.copytree(ROOT / "trainer/recipes", tmp_path / "trainer/recipes")
    (tmp_path / "data/corpus/states").mkdir(parents=True)
    (tmp_path / "data/corpus/states/states.json").touch()
    for arm in ("lilicorr", "dflash"):
        (tmp_path / "runs/comparison" / arm / "export").mkdir(parents=True)
        (tmp_path / "runs/comparison" / arm / "config.yaml").touch()
    stub = tmp_path / "python"
    stub.write_text(STUB)
    stub.chmod(0o755)

    def start(name: str, steps: int = 5) -> tuple[int, list[tuple[str, list[str]]], list[list[str]]]:
        calls = tmp_path / "calls"
        calls.unlink(missing_ok=True)
        variables = os.environ | {"PYTHON": str(stub), "DATA": "data", "STEPS": str(steps)}
        done = subprocess.run(["bash", tmp_path / "trainer/recipes" / name], env=variables, cwd=tmp_path, timeout=60)
        lines = [line.split(" ", 1) for line in calls.read_text().splitlines()] if calls.exists() else []
        made = [(core, shlex.split(words)) for core, words in lines if "--print-config" not in words]
        return (
            done.returncode,
            [one for one in made if "trainer/main.py" in one[1]],
            [w for _, w in made if "trainer/main.py" not in w],
        )

    return start


def overrides(words: list[str]) -> list[str]:
    return words[words.index("--config") + 2 :]


def test_the_comparison_trains_every_arm_alike_and_goes_on_where_it_stopped(recipe, tmp_path):
    status, trained, then = recipe("comparison.sh")
    assert status == 0 and {core for core, _ in trained} <= {"0", "1"} and [words[2] for words in then] == ["run"]
    configs = {}
    for _, words in trained:
        config = TrainConfig.load(ROOT / "configs/smollm2-135m.yaml", overrides(words))
        configs[Path(config.run.output).name] = config
        assert (config.run.max_steps, config.run.seed, config.data.path) == (5, 0, "data/corpus")
    assert set(configs) == {"dflash", "dflash2", "domino", "dspark", "lilicorr", "lilicorr+conv"}
    assert {name: config.draft.head for name, config in configs.items()} == {name: name.partition("+")[0] for name in configs}
    assert {config.objective.head_anchors for config in configs.values()} == {None}, "every head's losses take every anchor"
    shifted = {name for name, config in configs.items() if config.draft.block_size == 7}
    assert shifted == {"domino", "dspark"} and configs["lilicorr+conv"].draft.conv and configs["lilicorr"].draft.conv is None

    (tmp_path / "runs/comparison/dspark/export").rmdir()
    status, trained, then = recipe("comparison.sh")
    assert status == 0 and len(then) == 1
    assert [TrainConfig.load(ROOT / "configs/smollm2-135m.yaml", overrides(w)).draft.head for _, w in trained] == ["dspark"]
    assert len(recipe("comparison.sh", steps=6)[1]) == 6, "what was trained otherwise is not taken for finished"


def test_the_drafters_that_the_comparison_measures_are_those_it_trains(recipe):
    trained = {overrides(words)[4].removeprefix("run.output=") for _, words in recipe("comparison.sh")[1]}
    _, sections = bench_run.read(ROOT / "configs/bench/comparison.yaml")
    for _, arguments in sections:
        for drafts in (getattr(arguments, "draft", None), getattr(arguments, "systems", None)):
            assert drafts is None or {text.partition("=")[2] for text in drafts} == {f"{run}/export" for run in trained}


def test_an_arm_that_fails_stops_no_other_and_nothing_is_measured(recipe, tmp_path):
    script = tmp_path / "trainer/recipes/comparison.sh"
    script.write_text(script.read_text().replace("dspark draft.head=dspark", "dspark draft.head=fails"))
    status, trained, then = recipe("comparison.sh")
    assert status == 1 and len(trained) == 6 and not then


def test_every_ablation_differs_from_the_recipe_and_is_measured_beside_it(recipe):
    status, trained, then = recipe("ablations.sh")
    assert status == 0
    configs = [TrainConfig.load(ROOT / "configs/smollm2-135m.yaml", overrides(words)) for _, words in trained]
    shared = {"target.path", "data.path", "run.precision", "run.max_steps"}
    alike = [word for word in overrides(trained[0][1]) if word.partition("=")[0] in shared]
    plain = TrainConfig.load(ROOT / "configs/smollm2-135m.yaml", alike)
    assert len({config.hash() for config in [plain, *configs]}) == 10 == len(configs) + 1
    measured = then[0][then[0].index("--draft") + 1 : then[0].index("--prompts-dir")]
    assert measured[0] == "recipe=runs/comparison/lilicorr/export"
    names = [Path(config.run.output).name for config in configs]
    assert sorted(measured[1:]) == sorted(f"{n}=runs/ablations/{n}/export" for n in names)


def test_the_drafters_second_pass_begins_with_the_firsts_weights(recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("PROMPTS", "prompts")
    monkeypatch.setenv("RUNS", "runs/drafter")
    monkeypatch.setenv("ASSETS", "drafter")
    _, once, _ = recipe("smollm2-135m.sh")
    shutil.rmtree(tmp_path / "runs/drafter")
    monkeypatch.setenv("MORE", "7")
    status, trained, then = recipe("smollm2-135m.sh")
    assert status == 0
    configs = [TrainConfig.load(ROOT / "configs/smollm2-135m.yaml", overrides(words)) for _, words in trained]
    first, second = configs[:2], configs[2:]
    assert {config.hash() for config in first} == {
        TrainConfig.load(ROOT / "configs/smollm2-135m.yaml", overrides(words)).hash() for _, words in once
    }
    assert {(c.run.max_steps, c.run.seed, c.run.warm_start) for c in first} == {(5, 0, None)}
    assert {(c.run.max_steps, c.run.seed) for c in second} == {(7, 1)}
    assert {c.draft.head: c.run.warm_start for c in second} == {c.draft.head: f"{c.run.output}/export" for c in first}
    card = then[-1]
    assert card[card.index("--run") + 1] == "runs/drafter/lilicorr-more" and "MORE=7" in card[card.index("--made-by") :]


def test_a_checkpoint_that_both_arms_begin_with_is_that_of_their_first_pass_alone(recipe, monkeypatch):
    given = {"PROMPTS": "prompts", "RUNS": "runs/drafter", "ASSETS": "drafter", "MORE": "7", "FROM": "some/checkpoint"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    status, trained, then = recipe("smollm2-135m.sh")
    assert status == 0 and "FROM=some/checkpoint" in " ".join(then[-1])
    configs = [TrainConfig.load(ROOT / "configs/smollm2-135m.yaml", overrides(words)) for _, words in trained]
    assert [config.run.warm_start for config in configs[:2]] == ["some/checkpoint"] * 2
    assert {config.run.warm_start for config in configs[2:]} == {"runs/drafter/lilicorr/export", "runs/drafter/dflash/export"}
