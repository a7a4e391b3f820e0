"""Top-K and log-probabilities against the reference's, and every way an input can be awkward."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_lilicorr.kernels import topk_logprobs as module
from vllm_lilicorr.kernels.topk_logprobs import NO_ID, merge_topk, topk_logprobs, topk_shard
from vllm_lilicorr.model.lattice import top_candidates

from .conftest import DEVICE, DTYPES, MODE, PER_DTYPE, examples, poisoned, randn, reseed

LARGEST = 20_000 if MODE == "interpreter" else 262_144
KS = st.sampled_from([1, 2, 4, 8, 16])


@pytest.fixture(autouse=True)
def gpu_tiles(monkeypatch):
    """The interpreter too splits rows as a GPU does."""
    monkeypatch.setattr(module, "_GROUPS", 128)


def check(logits: torch.Tensor, k: int, vocab_size: int | None = None) -> None:
    n, columns = logits.shape
    out = poisoned(n, k, dtype=torch.int64), poisoned(n, k)
    ids, log_probs = topk_logprobs(logits, k, vocab_size, out)
    assert ids is out[0] and log_probs is out[1]
    reference_ids, reference = top_candidates(logits[:, :vocab_size].double(), k)
    assert torch.equal(ids, reference_ids)
    torch.testing.assert_close(log_probs, reference.float(), rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@examples(PER_DTYPE)
@given(n=st.integers(1, 6), vocab=st.integers(17, LARGEST), k=KS, scale=st.sampled_from([0.1, 3.0, 30.0]), seed=st.integers(0, 2**20))
def test_ids_and_log_probabilities_are_the_references(n, vocab, k, dtype, scale, seed):
    reseed(seed)
    check(randn(n, vocab, dtype=dtype, scale=scale), k)


@pytest.mark.parametrize(
    ("vocab", "k", "dtype"),
    [
        (17, 16, torch.float16),
        (49_152, 2, torch.float16),
        (151_936, 8, torch.bfloat16),
        (262_143, 4, torch.float16),
        (262_144, 1, torch.bfloat16),
        (262_144, 16, torch.float32),
    ],
)
def test_the_smallest_and_real_vocabularies(vocab, k, dtype):
    reseed(vocab)
    check(randn(1 if MODE == "interpreter" else 15, vocab, dtype=dtype, scale=3.0), k)


@pytest.mark.parametrize("vocab", [49_152, 151_936])
def test_the_rows_of_one_block_fill_a_gpu(vocab, monkeypatch):
    class Launch:
        def __getitem__(self, grid):
            programs.append(math.prod(grid))
            return lambda *args, **options: None

    programs = []
    monkeypatch.setattr(module, "_split_kernel", Launch())
    module._splits_triton(torch.empty(15, vocab, device="meta"), 8, vocab, 0)
    assert programs[0] >= 132  # the multiprocessors of an H200


@examples()
@given(st.integers(1, 4), st.integers(17, 9000), KS, st.integers(1, 4), st.integers(0, 2**20))
def test_ties_go_to_the_lower_id(n, vocab, k, values, seed):
    """With so few distinct values nearly every choice is a tie, within a run of columns, across runs and across splits."""
    reseed(seed)
    check(torch.randint(-values, values, (n, vocab), device=DEVICE).float(), k)


def test_negative_zero_ties_with_zero():
    logits = torch.full((1, 40), -1.0, device=DEVICE)
    logits[0, 7], logits[0, 21] = 0.0, -0.0
    logits[0, 3] = -0.0
    assert topk_logprobs(logits, 4)[0].tolist() == [[3, 7, 21, 0]]


@pytest.mark.parametrize("filler", [float("nan"), float("inf"), 1e30])
def test_padding_columns_are_ignored(filler):
    reseed(1)
    logits = randn(3, 4200)
    logits[:, 4097:] = filler
    check(logits, 8, vocab_size=4097)


@pytest.mark.parametrize("k", [1, 8, 16])
def test_minus_infinity_columns(k):
    reseed(2)
    logits = randn(3, 5000)
    logits[0, torch.randperm(5000)[:-3]] = -torch.inf  # fewer finite columns than k: the lowest of the rest fill up
    logits[1, :4096] = -torch.inf
    logits[2] = -torch.inf
    ids, log_probs = topk_logprobs(logits, k)
    assert torch.equal(ids, top_candidates(logits.double(), k)[0])
    assert ids[2].tolist() == list(range(k))
    finite = logits.gather(1, ids).isfinite()
    assert (log_probs[finite].exp() <= 1 + 1e-6).all() and (log_probs[:2][~finite[:2]] == -torch.inf).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_hot_and_huge_rows(dtype):
    reseed(3)
    huge = torch.finfo(dtype).max
    logits = torch.full((4, 6000), -huge, dtype=dtype, device=DEVICE)
    logits[0, 4500] = huge
    logits[1, 5999] = 0.0
    logits[2] = randn(6000, dtype=dtype, scale=1e3)
    check(logits[:3], 8)
    # One step beyond what the reference can tell, in fp64 too: log V is lost beside a logit this large.
    logits[3] = huge
    torch.testing.assert_close(topk_logprobs(logits, 8)[1][3], torch.full((8,), -math.log(6000), device=DEVICE))


def test_nan_counts_as_minus_infinity_and_stays_in_its_row():
    reseed(4)
    logits = randn(3, 5000)
    clean = logits.clone()
    logits[1, ::3] = torch.nan
    clean[1, ::3] = -torch.inf
    logits[2] = torch.nan
    ids, log_probs = topk_logprobs(logits, 8)
    expected_ids, expected = topk_logprobs(clean[:2], 8)
    assert torch.equal(ids[:2], expected_ids) and torch.equal(log_probs[:2], expected)
    assert ids[2].tolist() == list(range(8))


def test_rows_may_be_strided_and_many(monkeypatch):
    reseed(5)
    monkeypatch.setattr(module, "_MAX_ROWS", 2)
    check(randn(5, 2, 700)[:, 1], 4)


def test_the_same_input_gives_the_same_bits():
    reseed(6)
    logits = randn(4, 9000, dtype=torch.bfloat16)
    first = [x.clone() for x in topk_logprobs(logits, 8)]
    assert all(torch.equal(a, b) for a, b in zip(first, topk_logprobs(logits, 8), strict=True))


@examples()
@given(st.integers(1, 4), st.lists(st.integers(3, 5000), min_size=1, max_size=4), KS, st.sampled_from([0.0, 3.0]), st.integers(0, 2**20))
def test_merged_shards_are_the_whole(n, sizes, k, scale, seed):
    """In any order of the shards; some hold fewer columns than k, all are padded at the end, and at scale 0 all is ties."""
    reseed(seed)
    if sum(sizes) < k:
        sizes = [*sizes, k]
    logits = randn(n, sum(sizes), scale=scale)
    start, shards = 0, []
    for size in sizes:
        padded = torch.cat((logits[:, start : start + size], torch.full((n, 5), 1e9, device=DEVICE)), 1)
        shards.append(topk_shard(padded, k, vocab_start=start, vocab_size=size))
        start += size
    assert all(((ids == NO_ID).sum(1) == max(k - size, 0)).all() for (ids, _, _), size in zip(shards, sizes, strict=True))
    order = torch.randperm(len(shards)).tolist()
    ids, values, lse = (torch.stack([shards[i][part] for i in order]) for part in range(3))
    out = poisoned(n, k, dtype=torch.int64), poisoned(n, k)
    merge_topk(ids, values, lse, out)
    reference_ids, reference = top_candidates(logits.double(), k)
    assert torch.equal(out[0], reference_ids)
    torch.testing.assert_close(out[1].double(), reference, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("shape", "k", "vocab", "message"),
    [
        ((2, 30), 3, None, "k must be 1, 2, 4, 8 or 16, got 3"),
        ((2, 5), 8, None, "k must not exceed the vocabulary of 5"),
        ((2, 30), 8, 31, "vocab_size must lie in 1..30"),
        ((60,), 8, None, "logits must have shape"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(shape, k, vocab, message):
    with pytest.raises(ValueError, match=message):
        topk_logprobs(torch.zeros(shape, device=DEVICE), k, vocab)
