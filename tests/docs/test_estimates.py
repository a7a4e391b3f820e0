"""The estimates in docs/training-qwen3-8b.md follow from the configuration, and their tables add up."""

from __future__ import annotations

import re

import pytest

from vllm_lilicorr.check import describe
from vllm_lilicorr.trainer.config import TrainConfig

from .commands import ROOT

PAGE = (ROOT / "docs/training-qwen3-8b.md").read_text(encoding="utf-8")
QWEN3_8B = {
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
}
LAYER = 4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 12288


@pytest.fixture(scope="module")
def config() -> TrainConfig:
    return TrainConfig.load(ROOT / "configs/qwen3-8b.yaml")


def test_parameter_counts_are_the_models(config: TrainConfig) -> None:
    counts = describe(config.draft_config(QWEN3_8B, "Qwen/Qwen3-8B", "0" * 64))["parameters"]
    for part in ("backbone", "head"):
        assert f"{counts[part]:,}" in PAGE
    assert f"{counts['total'] / 1e9:.3f} B" in PAGE
    assert f"{LAYER / 1e6:.1f} M" in PAGE


def test_steps_are_the_configurations(config: TrainConfig) -> None:
    assert f"{1_397_048 // config.run.batch_size * config.run.epochs:,} steps" in PAGE
    assert (config.data.max_length, config.data.anchors, config.draft.block_size) == (3120, 512, 16)


def test_columns_add_up() -> None:
    tables = [table for table in re.findall(r"(?:^\|.*\n)+", PAGE, re.MULTILINE) if "**sum**" in table]
    assert len(tables) == 2
    for table in tables:
        rows = [[cell.strip(" *") for cell in line.strip("|\n").split("|")] for line in table.splitlines()[2:]]
        *parts, total = rows
        for column in range(2, len(total)):
            # The sum is rounded to a whole number, and every part to a tenth.
            assert abs(sum(float(row[column]) for row in parts) - float(total[column])) <= 0.5 + 0.05 * len(parts)


def test_operations_of_a_conversation_are_what_the_formulas_give() -> None:
    tokens, blocks, slots, size = 3120, 512, 15, 16
    vocabulary = 151_936 * 4096
    parts = [
        2 * 36 * LAYER * tokens + 4 * 4096 * tokens**2 / 2 * 36,
        3 * 2 * 5 * LAYER * blocks * size,
        3 * (4 * 4096 * blocks * size * (tokens / 2 + size) * 5 + 2 * tokens * (5 * 4096**2 + 5 * 2 * 4096 * 1024)),
        2 * 2 * vocabulary * blocks * slots,
        3 * 6.6e9 * blocks,
    ]
    table = PAGE.split("## Time of one conversation")[1].split("**sum**")[0]
    shown = [float(match) for match in re.findall(r"\| ([\d.]+) \|$", table, re.MULTILINE)]
    assert shown == [round(part / 1e12, 1) for part in parts]
