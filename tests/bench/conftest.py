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
from vllm_lilicorr.config import (  # noqa: E402
    ConvConfig,
    DFlash2Config,
    DFlashConfig,
    DominoConfig,
    DraftConfig,
    DSparkConfig,
    HeadConfig,
    LiLiCorrConfig,
)
from vllm_lilicorr.model.checkpoint import save_draft  # noqa: E402
from vllm_lilicorr.model.draft import Draft  # noqa: E402
from vllm_lilicorr.target import load_tokenizer, tokenizer_hash  # noqa: E402

HEADS = {
    "lilicorr": LiLiCorrConfig(
        candidate_topk=4, hidden_size=64, num_layers=1, num_heads=4, mlp_ratio=2.0, factor_dim=64, vector_eps=1e-4,
        logit_scale=8.0,
    ),  # fmt: skip
    "dflash": DFlashConfig(),
    "dflash2": DFlash2Config(rank=16, top_k=4),
    "dspark": DSparkConfig(markov_rank=16, enable_confidence_head=True, confidence_head_with_markov=True),
    "domino": DominoConfig(gru_hidden_dim=16, emb_dim=16, pure_draft_prefix_len=1),
}
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


def draft_config(target: Path, head: HeadConfig) -> DraftConfig:
    """Return a one-layer drafter of SLOTS slots for a target of `pairs`."""
    values = json.loads((target / "config.json").read_text())
    return DraftConfig(
        hidden_size=values["hidden_size"], num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
        intermediate_size=64, vocab_size=values["vocab_size"], rms_norm_eps=1e-6, max_position_embeddings=512, rope_theta=1e4,
        attention_bias=False, block_size=SLOTS + (not head.shifted), num_target_layers=values["num_hidden_layers"],
        mask_token_id=300, target_layer_ids=(1, 3), head=head, conv=ConvConfig(2, 16) if head.needs_conv else None,
        target_name=target.name, tokenizer_hash=tokenizer_hash(load_tokenizer(target)),
    )  # fmt: skip


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
        save_draft(Draft(draft_config(target, HEADS[name])).eval(), root / name)
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
