"""The kernel tests run in three ways, and are the same tests in each:

    pytest tests/kernels                        the torch twins, on the CPU; and, in a child process, the next line
    TRITON_INTERPRET=1 pytest tests/kernels     the Triton kernels, interpreted on CPU tensors
    pytest tests/kernels   (with a GPU)         the Triton kernels, compiled, on CUDA tensors

Shapes are the same in every run, inputs are not: a failing test prints the seed, and LILICORR_TEST_SEED=<seed> repeats its run.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

from vllm_lilicorr.config import DraftConfig, LiLiCorrConfig
from vllm_lilicorr.kernels._triton import INTERPRETED
from vllm_lilicorr.model.heads.lilicorr import LiLiCorrHead

MODE = "cuda" if torch.cuda.is_available() else "interpreter" if INTERPRETED else "torch"
DEVICE = "cuda" if MODE == "cuda" else "cpu"
if MODE == "interpreter":
    sys.path.insert(0, str(Path(__file__).parents[1] / "serving"))  # interpreted.py
    from interpreted import quicken

    quicken()
EXAMPLES = {"cuda": 12, "torch": 25, "interpreter": 5}[MODE]  # a new shape is a new kernel to compile, or many programs to interpret
PER_DTYPE = {"cuda": 5, "torch": 9, "interpreter": 3}[MODE]  # of a property that is run in each dtype
BLOCKS = 4 if MODE == "interpreter" else 64  # concurrent blocks of a property's largest example
SEED = int(os.environ.setdefault("LILICORR_TEST_SEED", str(random.SystemRandom().randrange(2**31))))

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""Largest accepted ||got - reference|| / ||reference||."""

_CONFIG = DraftConfig(
    hidden_size=48,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    intermediate_size=64,
    vocab_size=997,
    rms_norm_eps=1e-6,
    max_position_embeddings=512,
    rope_theta=1e6,
    attention_bias=False,
    block_size=6,
    num_target_layers=8,
    mask_token_id=996,
    target_layer_ids=(1, 4),
    head=LiLiCorrConfig(
        candidate_topk=4, hidden_size=32, num_layers=2, num_heads=4, mlp_ratio=2.0, factor_dim=24, vector_eps=1e-4, logit_scale=8.0
    ),
    conv=None,
    target_name=None,
    tokenizer_hash=None,
)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Generator[None, None, None]:
    """Have torch fill what is allocated without a value, inside the code under test too (NaN, or the greatest integer)."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        report.sections.append(("Inputs", f"kernels ran as {MODE}; repeat with LILICORR_TEST_SEED={SEED}"))
    return report


def examples(count: int = EXAMPLES) -> hypothesis.settings:
    """Return the settings of a property: `count` examples, however long the first takes to compile."""
    slow = [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large]
    return hypothesis.settings(max_examples=count, deadline=None, derandomize=True, suppress_health_check=slow)


def reseed(seed: int) -> None:
    """Start torch's generators at (this run's seed, `seed`)."""
    torch.manual_seed(SEED * 2**31 + seed)


def randn(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device=DEVICE) * scale).to(dtype)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return an output buffer in which an element that nothing writes shows."""
    fill = -(2**40) if dtype == torch.int64 else float("nan")
    return torch.full(shape, fill, dtype=dtype, device=DEVICE)


def error(got: torch.Tensor, reference: torch.Tensor, least: float = 0.0) -> float:
    """Return ||got - reference|| / ||reference||; NaN anywhere in `got` makes it NaN, which is below no tolerance.

    least: the root mean square that the reference is taken to have where it has a smaller one. Scores are cosines, and few of
    them can all be near zero by chance; their error is that of the vectors, whose length is one.
    """
    reference = reference.double()
    norm = reference.norm().clamp_min(max(least * reference.numel() ** 0.5, 1e-300))
    return ((got.double() - reference).norm() / norm).item()


def make_head(dtype: torch.dtype = torch.float32, *, hidden: int = 48, block_size: int = 6, **head: Any) -> LiLiCorrHead:
    """Return a head none of whose weights is zero or one: every term of the score is at work."""
    config = replace(_CONFIG, hidden_size=hidden, block_size=block_size, head=replace(_CONFIG.head, **head))
    module = LiLiCorrHead(config)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            fan_in = parameter.shape[-1] if parameter.ndim == 2 else 1
            parameter.copy_(torch.randn_like(parameter) * (0.7 / fan_in**0.5 if parameter.ndim == 2 else 0.3))
            if "norm" in name and name.endswith("weight"):
                parameter += 1
        for table in (module.relative_slot_bias, module.same_slot_bias):
            table.copy_(torch.randn_like(table))
    return module.to(DEVICE, dtype)


def in_double(module: LiLiCorrHead) -> LiLiCorrHead:
    """Return the same weights in fp64: the reference."""
    import copy

    return copy.deepcopy(module).double()
