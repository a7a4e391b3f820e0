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


def test_reading_what_is_not_there_is_a_sentence(tmp_path):
    with pytest.raises(UserError, match="there is no such file; run a benchmark"):
        Results.read(tmp_path)
