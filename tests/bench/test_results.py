"""The result file: what is there is not measured again, and nothing is ever half written."""

from __future__ import annotations

import json

import pytest

from vllm_lilicorr.bench import _results
from vllm_lilicorr.bench._results import Results
from vllm_lilicorr.errors import UserError


def test_a_part_is_found_again_with_its_settings_and_not_with_others(results):
    results().put("serve/a", {"seed": 1, "lengths": (1, 2)}, {"tokens": 3})
    again = results()
    assert again.get("serve/a", {"seed": 1, "lengths": (1, 2)}) == {"tokens": 3}
    assert again.get("serve/a", {"seed": 2, "lengths": (1, 2)}) is None
    assert again.get("serve/b", {"seed": 1}) is None
    assert list(again.under("serve/")) == [(["a"], {"seed": 1, "lengths": [1, 2]}, {"tokens": 3})]


def test_the_file_says_where_when_and_how(results):
    first, second = results(), None
    first.put("a", {}, 1)
    first.put("b", {}, 2)
    second = results()
    second.put("c", {}, 3)
    values = json.loads(second.path.read_text())
    assert values["machine"] == _results.machine() and values["machine"]["cores"] >= 1
    assert len(values["invocations"]) == 2
    run = values["invocations"][0]
    assert run["command"] == "python -m vllm_lilicorr.bench run" and run["versions"]["torch"] and run["date"].endswith("UTC")
    assert [values["parts"][key]["invocation"] for key in "abc"] == [0, 0, 1]


def test_a_commit_is_shortened_and_a_changed_tree_stays_marked():
    digits = "0123456789abcdef" * 3
    assert _results.short(digits[:40]) == digits[:12]
    assert _results.short(f"{digits[:40]} with uncommitted changes") == f"{digits[:12]} with uncommitted changes"
    assert _results.short(None) == "none"


def test_nothing_measured_leaves_no_trace(results):
    results().put("a", {}, 1)
    before = results().path.read_text()
    results()
    assert results().path.read_text() == before


def test_a_file_from_another_machine_is_not_added_to(results, monkeypatch):
    results().put("a", {}, 1)
    monkeypatch.setattr(_results, "machine", lambda: {"processor": "abacus", "cores": 1, "memory_gib": 1, "gpus": []})
    with pytest.raises(UserError, match="measured on another machine .* choose another --output"):
        results()


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 0}', '{"format": 1}'])
def test_what_is_no_result_file_is_not_overwritten(results, text):
    path = results().path
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(UserError, match="is no result file"):
        results()
    assert path.read_text() == text


def test_missing_benchmarks_are_kept_until_they_are_found(results, capsys):
    opened = results()
    opened.note_missing({"mbpp": "no file", "speed": "withheld"}, ["gsm8k"])
    opened.put("a", {}, 1)
    assert "missing: mbpp: no file" in capsys.readouterr().err
    again = results()
    assert again.missing == {"mbpp": "no file", "speed": "withheld"}
    again.note_missing({}, ["mbpp"])
    assert again.missing == {"speed": "withheld"}


def keys_under(opened: Results, prefix: str) -> set[str]:
    return {"/".join(steps) for steps, _, _ in opened.under(prefix)}


def test_what_other_settings_left_behind_is_not_compared_with_the_newest(results):
    opened = results()
    old, new = {"max_tokens": 16, "prompts": "p"}, {"max_tokens": 32, "prompts": "p"}
    for round_ in range(2):
        opened.put(f"serve/grid/T0/gsm8k/c1/none/round{round_}", {**old, "system": {"draft": None}}, {})
    opened.put("serve/other/T0/gsm8k/c1/none/round0", {**old, "system": {"draft": None}}, {})
    opened.put("acceptance/T1/gsm8k/a/point/seed1", {**old, "seed": 1}, {})
    opened.put("acceptance/T0/gsm8k/a", {**old, "draft": "a"}, {})
    opened.put("serve/grid/T0/gsm8k/c1/none/round0", {**new, "system": {"draft": None}}, {})
    opened.put("serve/grid/T0/gsm8k/c1/fast/round0", {**new, "system": {"draft": "x"}, "seed": 3}, {})
    for one in (opened, results()):
        assert keys_under(one, "serve/grid/") == {"T0/gsm8k/c1/none/round0", "T0/gsm8k/c1/fast/round0"}
        assert one.left_out("serve/grid") == 1
        assert len(keys_under(one, "serve/other/")) == len(keys_under(one, "acceptance/T0/")) == 1
        assert not one.left_out("serve/other") and not one.left_out("acceptance/T0") and not one.left_out("acceptance/T1")
        assert len(one.parts) == 6


def test_prompts_are_those_of_the_newest_part_benchmark_by_benchmark(results):
    opened = results()
    for benchmark, name, prompts in (
        ("gsm8k", "a", "twenty"), ("gsm8k", "b", "twenty"), ("mt-bench", "a", "five"), ("gsm8k", "b", "ten"),
        ("mt-bench", "b", "five"),
    ):  # fmt: skip
        opened.put(f"acceptance/T0/{benchmark}/{name}", {"prompts": prompts, "draft": name}, {})
    assert keys_under(opened, "acceptance/T0/") == {"mt-bench/a", "mt-bench/b", "gsm8k/b"}
    assert opened.left_out("acceptance/T0") == 1


def test_a_drafter_is_the_checkpoint_that_was_measured_last_under_its_name(results):
    opened = results()
    for benchmark, checkpoint in (("gsm8k", "old"), ("mt-bench", "old"), ("gsm8k", "new")):
        opened.put(f"acceptance/T0/{benchmark}/a", {"draft": "a", "checkpoint": checkpoint}, {})
        opened.put(f"acceptance/T0/{benchmark}/b", {"draft": "b", "checkpoint": "same"}, {})
    assert keys_under(opened, "acceptance/T0/") == {"gsm8k/a", "gsm8k/b", "mt-bench/b"}


def test_the_newest_commands_order_comes_first_and_is_kept(results):
    opened = results()
    opened.put("a", {}, 1)
    opened.note_order("acceptance", ["x", "y", "z"])
    opened.note_order("acceptance", ["y", "x"])
    assert results().ordered("acceptance", ["z", "unknown", "x", "y"]) == ["y", "x", "z", "unknown"]


def test_reading_what_is_not_there_is_a_sentence(tmp_path):
    with pytest.raises(UserError, match="there is no such file; run a benchmark"):
        Results.read(tmp_path)
