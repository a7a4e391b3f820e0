"""Tiny drafters and targets for the core's tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from vllm_lilicorr.config import (
    ConvConfig,
    DFlash2Config,
    DFlashConfig,
    DominoConfig,
    DraftConfig,
    DSparkConfig,
    HeadConfig,
    LiLiCorrConfig,
)
from vllm_lilicorr.model import Draft
from vllm_lilicorr.target import Target

LILICORR = LiLiCorrConfig(
    candidate_topk=4,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    mlp_ratio=2.0,
    factor_dim=24,
    vector_eps=1e-4,
    logit_scale=8.0,
)


HEADS = {
    "lilicorr": LILICORR,
    "dflash": DFlashConfig(),
    "dflash2": DFlash2Config(rank=12, top_k=4),
    "dspark": DSparkConfig(markov_rank=12, enable_confidence_head=True, confidence_head_with_markov=True),
    "domino": DominoConfig(gru_hidden_dim=20, emb_dim=12, pure_draft_prefix_len=1),
}


def make_config(head: str | HeadConfig = "lilicorr", **changes: Any) -> DraftConfig:
    config = DraftConfig(
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        intermediate_size=64,
        vocab_size=97,
        rms_norm_eps=1e-6,
        max_position_embeddings=256,
        rope_theta=1e4,
        attention_bias=False,
        block_size=6,
        num_target_layers=4,
        mask_token_id=96,
        target_layer_ids=(0, 2),
        head=HEADS[head] if isinstance(head, str) else head,
        conv=ConvConfig(kernel_size=2, group_size=16) if head == "dflash2" else None,
    )
    return replace(config, **changes)


def make_draft(config: DraftConfig | None = None, seed: int = 0, spread: float = 0.2) -> Draft:
    """A drafter with random weights, every table included, so that nothing hides behind a zero."""
    draft = Draft(config or make_config())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            noise = spread * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + noise if name.endswith("norm.weight") else noise)
    return draft.eval()


def make_target(config: DraftConfig, seed: int = 0, max_positions: int = 256, logit_spread: float = 1.0) -> Target:
    """A random Llama the drafter fits, tapped where its configuration says."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=64,
            num_hidden_layers=config.num_target_layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=max_positions,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(std=0.2)
        model.lm_head.weight.normal_(std=logit_spread / config.hidden_size**0.5)
    return Target(model, config.target_layer_ids)


@pytest.fixture
def config() -> Callable[..., DraftConfig]:
    return make_config


@pytest.fixture
def draft() -> Callable[..., Draft]:
    return make_draft


@pytest.fixture
def target() -> Callable[..., Target]:
    return make_target
