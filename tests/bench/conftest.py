"""A tiny target with a chat template, and drafters that are right by chance often enough: the target knows few tokens."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[1] / "serving"))  # pairs.py

import pairs  # noqa: E402

from vllm_lilicorr.bench._results import Results  # noqa: E402
from vllm_lilicorr.model.checkpoint import save_draft  # noqa: E402
from vllm_lilicorr.model.draft import Draft  # noqa: E402

HEADS = ("lilicorr", "dflash", "dflash2", "dspark", "domino")
KNOWN = torch.arange(97, 103)
SLOTS = 4


@dataclass(frozen=True)
class Tiny:
    target: Path
    lilicorr: Path
    dflash: Path
    dflash2: Path
    dspark: Path
    domino: Path
    prompts: Path


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    root = tmp_path_factory.mktemp("tiny")
    target = pairs.make_target(root / "target")
    weights = load_file(target / "model.safetensors")
    silent = torch.ones(len(weights["lm_head.weight"]), dtype=torch.bool).scatter_(0, KNOWN, False)
    weights["lm_head.weight"][silent] = 0
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    for seed, name in enumerate(HEADS):
        torch.manual_seed(seed)
        save_draft(Draft(pairs.draft_config(target, name, slots=SLOTS)).eval(), root / name)
    prompts = root / "prompts"
    prompts.mkdir()
    rows = [{"turns": ["one and one"]}, {"turns": ["two", "and then?"]}, {"turns": ["a longer question than those"]}]
    (prompts / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (prompts / "mt-bench.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:0:-1]))
    return Tiny(target, **{name: root / name for name in HEADS}, prompts=prompts)


@pytest.fixture
def results(tmp_path: Path) -> Callable[[], Results]:
    """Return a function that opens the result file of one run after another in the same folder."""
    return lambda: Results(tmp_path / "out", ["python", "-m", "vllm_lilicorr.bench", "run"])
