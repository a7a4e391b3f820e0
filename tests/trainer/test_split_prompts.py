"""What is held out never comes back as something to train on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_lilicorr.errors import UserError
from vllm_lilicorr.trainer import split_prompts


def write(folder: Path, name: str, texts: list[str]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.jsonl").write_text("\n".join(json.dumps({"turns": [text]}, ensure_ascii=False) for text in texts) + "\n")


def turns(path: Path) -> list[str]:
    return [json.loads(line)["turns"][0] for line in path.read_text().split("\n") if line]


def test_the_last_rows_of_every_file_are_held_out_and_the_rest_shuffled_the_same_way_twice(tmp_path: Path) -> None:
    write(tmp_path / "benchmarks", "a", [f"a{i}" for i in range(30)])
    write(tmp_path / "benchmarks", "b", ["b0", "b1\u2028with a separator that JSON allows", "a3"])
    write(tmp_path / "ours", "c", ["c0", "a29", "c0"])
    command = ["--prompts", f"{tmp_path}/benchmarks", "--also", f"{tmp_path}/ours", "--held-out", "2"]
    for out in ("one", "two"):
        assert split_prompts.main([*command, "--out", f"{tmp_path}/{out}"]) == 0
    assert turns(tmp_path / "one/heldout/a.jsonl") == ["a28", "a29"]
    assert turns(tmp_path / "one/heldout/b.jsonl") == ["b1\u2028with a separator that JSON allows", "a3"]
    train = turns(tmp_path / "one/train.jsonl")
    # a3 is held out of b, a29 of a, and c0 stands once.
    assert sorted(train) == sorted([f"a{i}" for i in range(28) if i != 3] + ["b0", "c0"])
    assert train != sorted(train)
    assert (tmp_path / "one/train.jsonl").read_bytes() == (tmp_path / "two/train.jsonl").read_bytes()


def test_what_cannot_be_split_is_said_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no"):
        split_prompts.main(["--prompts", str(tmp_path), "--out", f"{tmp_path}/out"])
    (tmp_path / "a.jsonl").write_text('{"turns": ["x"]}\n{"turns": [')
    with pytest.raises(UserError, match=r"a\.jsonl, line 2: is not JSON"):
        split_prompts.main(["--prompts", str(tmp_path), "--out", f"{tmp_path}/out"])
