"""Sampled drafts: what is emitted is distributed as the target's own samples, row by row and seed by seed."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pairs
import pytest
import torch
from engines import Run, run

from vllm_lilicorr.model.checkpoint import save_draft
from vllm_lilicorr.model.draft import Draft
from vllm_lilicorr.target import load_target

# The interpreted runner draws for minutes, and for longer where the other core is busy.
TIMEOUT = 2400
pytestmark = [pytest.mark.slow, pytest.mark.timeout(TIMEOUT)]

PROMPT = [0, 1, 2, 3, 1, 0, 2, 2]
ALPHA = 1e-4
THRESHOLD = 0.3
# With 15 degrees of freedom and a test at ALPHA, 1,536 draws find a deviation of w = 0.18 (Cohen's) 9 times in 10, and 6,144
# draws one of w = 0.09: w = sqrt(sum (p - p0)^2 / p0).
DRAWS = {"v1": 6144, "v2": 1536}
# The readable head under interpreted Triton: the walk kernel, interpreted too, would take most of the time (see test_engines.py).
ENVIRONMENT = {"v1": {}, "v2": {"LILICORR_PLAIN_HEAD": "1"}}


HEADS = {"lilicorr": pairs.lilicorr_head(2), "dspark": pairs.HEADS["dspark"][0]}


@pytest.fixture(scope="module")
def four_tokens(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return _four_tokens(tmp_path_factory, "lilicorr")


@pytest.fixture(scope="module")
def four_tokens_dspark(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return _four_tokens(tmp_path_factory, "dspark")


def _four_tokens(factory: pytest.TempPathFactory, head: str) -> tuple[Path, Path]:
    """A target of four tokens and an untrained drafter: it proposes (LiLiCorr's two candidates a slot, DSpark's any token)
    often not what the target wants."""
    root = factory.mktemp(head)
    target = pairs.make_target(root / "target", vocab=4, seed=3, sharpness=0.5)
    torch.manual_seed(4)
    draft = Draft(pairs.draft_config(target, HEADS[head], slots=3))
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4.0)
    save_draft(draft, root / "draft")
    return target, root / "draft"


def _expected(target: Path, tokens: int = 2) -> torch.Tensor:
    """Return P [4, .., 4] of the first `tokens` tokens behind PROMPT at temperature 1."""
    loaded = load_target(target)
    ids = torch.tensor([[*PROMPT, *behind] for behind in itertools.product(range(4), repeat=tokens)])
    logits = loaded.logits(loaded.forward(ids, torch.arange(ids.shape[1]).expand(len(ids), -1)).final)
    drawn = logits[:, -tokens - 1 : -1].log_softmax(-1).gather(-1, ids[:, -tokens:, None])
    return drawn.sum((1, 2)).exp().view([4] * tokens)


def _p_value(observed: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the chi-square test's p-value of counts [4, .., 4] against probabilities [4, .., 4]."""
    total = observed.sum()
    assert float(expected.min() * total) > 5, "a cell is too rare for the test"
    statistic = ((observed - expected * total) ** 2 / (expected * total)).sum()
    degrees = torch.tensor(observed.numel() - 1.0)
    return float(torch.special.gammaincc(degrees / 2, statistic / 2))


def _drawn(
    four_tokens: tuple[Path, Path],
    runner: str,
    release: str = "0.32",
    falsify: bool = False,
    tokens: int = 2,
    **speculative: Any,
) -> Run:
    count = DRAWS[runner]
    every = {"temperature": 1.0, "max_tokens": tokens, "ignore_eos": True, "detokenize": False}
    params = [{**every, "seed": 1000 + i} for i in range(count)]
    return run(
        *four_tokens, [{"prompts": [PROMPT] * count, "params": params}], runner=runner, release=release, falsify=falsify,
        env=ENVIRONMENT[runner],
        speculative={"draft_sample_method": "probabilistic", **speculative}, skip_tokenizer_init=True, max_model_len=32,
        max_num_seqs=128,
        max_num_batched_tokens=2048, enable_prefix_caching=False, timeout=TIMEOUT,
    )  # fmt: skip


def _counts(done: Run, tokens: int = 2) -> torch.Tensor:
    tally = Counter(map(tuple, done.tokens(0)))
    return torch.tensor([float(tally[drawn]) for drawn in itertools.product(range(4), repeat=tokens)]).view([4] * tokens)


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_emitted_tokens_are_distributed_as_the_targets(four_tokens: tuple[Path, Path], runner: str) -> None:
    done = _drawn(four_tokens, runner)
    p = _p_value(_counts(done), _expected(four_tokens[0]))
    print(f"{runner}: {DRAWS[runner]} draws, p = {p:.3f}, tau {done.acceptance_length():.2f}")
    assert p > ALPHA


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """DSpark's draws on the interpreted runner take seven minutes of one core: with --every-combination only."""
    if metafunc.definition.originalname == "test_so_are_dsparks_whose_proposal_is_over_the_whole_vocabulary":
        metafunc.parametrize("runner", ["v1", "v2"] if metafunc.config.getoption("--every-combination") else ["v1"])


def test_so_are_dsparks_whose_proposal_is_over_the_whole_vocabulary(four_tokens_dspark: tuple[Path, Path], runner: str) -> None:
    done = _drawn(four_tokens_dspark, runner)
    p = _p_value(_counts(done), _expected(four_tokens_dspark[0]))
    print(f"{runner}: {DRAWS[runner]} draws, p = {p:.3f}, tau {done.acceptance_length():.2f}")
    assert p > ALPHA


def test_so_are_those_of_blocks_that_a_confidence_threshold_ends(four_tokens: tuple[Path, Path]) -> None:
    """Three tokens: whether a block's second draft is verified depends on what was drawn before it."""
    done = _drawn(four_tokens, "v1", tokens=3, confidence_threshold=THRESHOLD)
    lengths = Counter(len(block["drafts"]) for block in done.trace)
    p = _p_value(_counts(done, 3), _expected(four_tokens[0], 3))
    print(f"v1: {DRAWS['v1']} draws, p = {p:.3f}, tau {done.acceptance_length():.2f}, blocks of each length {dict(lengths)}")
    assert min(lengths[1], lengths[2] + lengths[3]) > 500, "the threshold decides nothing"
    assert p > ALPHA


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_a_falsified_proposal_is_noticed(four_tokens: tuple[Path, Path], runner: str) -> None:
    done = _drawn(four_tokens, runner, falsify=True)
    p = _p_value(_counts(done), _expected(four_tokens[0]))
    print(f"{runner}: {DRAWS[runner]} draws, p = {p:.1e}")
    assert p < ALPHA


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_seeds_reproduce_and_greedy_rows_stay_greedy_in_a_mixed_batch(pair: tuple[Path, Path], runner: str) -> None:
    prompts = pairs.PROMPTS[:6]
    mixed = [{"temperature": 0 if i % 2 else 0.8, "seed": i, "max_tokens": 16, "ignore_eos": True} for i in range(6)]
    greedy = [{"temperature": 0, "max_tokens": 16, "ignore_eos": True}] * 6
    done = run(
        *pair, [{"prompts": prompts, "params": params} for params in (mixed, mixed, greedy)], runner=runner, max_num_seqs=6,
        env=ENVIRONMENT[runner],
        speculative={"draft_sample_method": "probabilistic"}, enable_prefix_caching=False,
    )  # fmt: skip
    assert done.tokens(0) == done.tokens(1)
    assert done.tokens(0)[1::2] == done.tokens(2)[1::2]
    assert done.tokens(0)[0::2] != done.tokens(2)[0::2], "nothing was sampled"
    assert done.acceptance_length() > 1.3


def test_a_seeded_prompt_can_be_prefilled_in_chunks(four_tokens: tuple[Path, Path]) -> None:
    """The tokens sampled behind an unfinished prompt are dropped, and the request's seed has not moved by them."""
    params = [{"temperature": 1.0, "seed": seed, "max_tokens": 8, "ignore_eos": True, "detokenize": False} for seed in range(4)]
    whole, chunks = (
        run(
            *four_tokens, [{"prompts": [PROMPT * 4] * 4, "params": params, "serial": True}], max_num_batched_tokens=budget,
            speculative={"draft_sample_method": "probabilistic"}, skip_tokenizer_init=True, max_model_len=64, max_num_seqs=2,
            enable_prefix_caching=False,
        )
        for budget in (64, 12)
    )  # fmt: skip
    assert chunks.tokens(0) == whole.tokens(0)
    assert len({tuple(tokens) for tokens in whole.tokens(0)}) == 4, "the seeds do not matter"
