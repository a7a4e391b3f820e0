"""Prompts by name: files, aliases, categories, and what is said of those that are not to be had."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_lilicorr.bench import _datasets
from vllm_lilicorr.errors import UserError


def write(folder: Path, name: str, *rows: dict) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def hub(monkeypatch: pytest.MonkeyPatch, rows: list | Exception) -> list[tuple]:
    calls = []

    def load_dataset(*args, **kwargs):
        calls.append((*args, kwargs))
        if isinstance(rows, Exception):
            raise rows
        return rows

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return calls


def test_a_folder_gives_its_files_in_the_papers_order_under_the_papers_names(tmp_path):
    for name in ("zebra", "mt-bench", "aime25", "gsm8k"):
        write(tmp_path, name, {"turns": [name]})
    found, missing = _datasets.load(None, tmp_path, None)
    assert [one.name for one in found] == ["gsm8k", "aime2025", "mt-bench", "zebra"] and not missing
    assert found[1].conversations[0].turns == ("aime25",)
    assert _datasets.title("aime2025") == "AIME 2025" and _datasets.title("zebra") == "zebra"


def test_a_missing_benchmark_is_named_and_the_rest_is_there(tmp_path):
    write(tmp_path, "gsm8k", {"turns": ["a"]}, {"turns": ["b"]})
    found, missing = _datasets.load(["gsm8k", "mbpp"], tmp_path, 1)
    assert [(one.name, len(one.conversations)) for one in found] == [("gsm8k", 1)]
    assert missing == {"mbpp": f"{tmp_path} has no mbpp.jsonl"}


def test_a_category_takes_its_rows_and_an_unknown_one_names_those_that_are(tmp_path):
    rows = ({"turns": [text], "category": kind} for text, kind in (("a", "qa"), ("b", "maths"), ("c", "qa")))
    write(tmp_path, "speed", *rows)
    found, missing = _datasets.load(["speed:qa", "speed:poems"], tmp_path, None)
    assert [c.turns for c in found[0].conversations] == [("a",), ("c",)]
    assert missing == {"speed:poems": "has no row of category 'poems'; it has maths, qa"}
    assert _datasets.title("speed:qa") == "SPEED (qa)"


def test_bad_requests_are_sentences(tmp_path):
    write(tmp_path, "gsm8k", {"turns": []})
    with pytest.raises(UserError, match="gsm8k.jsonl, line 1: turns must be a non-empty list.*mend or remove the row"):
        _datasets.load(["gsm8k"], tmp_path, None)
    with pytest.raises(UserError, match="gsm9k: is no known benchmark; did you mean 'gsm8k'"):
        _datasets.load(["gsm9k"], tmp_path, None)
    with pytest.raises(UserError, match="speed:a/b: must be NAME or NAME:CATEGORY without '/'"):
        _datasets.load(["speed:a/b"], tmp_path, None)
    with pytest.raises(UserError, match="is no folder"):
        _datasets.load(None, tmp_path / "absent", None)
    with pytest.raises(UserError, match="mbpp: .* has no mbpp.jsonl"):
        _datasets.load(["mbpp"], tmp_path, None)


def test_hub_rows_become_conversations(monkeypatch):
    calls = hub(monkeypatch, [{"question": "How many?"}, {"question": "And now?"}])
    (found,), missing = _datasets.load(["gsm8k"], None, 1)
    assert not missing and calls == [("openai/gsm8k", "main", {"split": "test"})]
    assert found.conversations[0].turns[0].startswith("How many?\nPlease reason step by step") and len(found.conversations) == 1


def test_what_the_hub_withholds_or_refuses_is_missing_with_the_reason(monkeypatch, tmp_path):
    hub(monkeypatch, [{"turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"], "category": "qa"}])
    with pytest.raises(UserError, match="nvidia/SPEED-Bench, row 0 is withheld.*--prompts-dir"):
        _datasets.load(["speed"], None, None)
    hub(monkeypatch, ConnectionError("no route to host\nsecond line"))
    with pytest.raises(UserError, match=r"mbpp: google-research-datasets/mbpp cannot be loaded \(no route to host\)"):
        _datasets.load(["mbpp"], None, None)
    hub(monkeypatch, [{"text": "renamed"}])
    with pytest.raises(UserError, match="has no column 'prompt' any more"):
        _datasets.load(["mbpp"], None, None)


def test_the_fingerprint_names_the_text(tmp_path):
    write(tmp_path, "a", {"turns": ["x"]})
    write(tmp_path, "b", {"turns": ["x"]})
    write(tmp_path, "c", {"turns": ["y"]})
    a, b, c = (_datasets.load([name], tmp_path, None)[0][0].fingerprint for name in "abc")
    assert a == b != c
