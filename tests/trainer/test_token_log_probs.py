from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vllm_lilicorr.model.lattice import top_candidates
from vllm_lilicorr.trainer import token_log_probs as fused
from vllm_lilicorr.trainer.token_log_probs import token_log_probs


def naive(hidden, weight, targets, k, log_counts=None):
    logits = hidden @ weight.t()
    normaliser = (logits if log_counts is None else logits + log_counts).logsumexp(-1)
    ids = top_candidates(logits.detach(), k)[0] if k else torch.empty(len(hidden), 0, dtype=torch.long)
    return logits.gather(1, targets[:, None])[:, 0] - normaliser, ids, logits.gather(1, ids) - normaliser[:, None]


def problem(seed, rows, width, vocab, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(vocab, width, generator=generator, dtype=torch.float64).to(dtype)
    return hidden, weight, torch.randint(0, vocab, (rows,), generator=generator)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(0, 9),
    width=st.integers(1, 6),
    vocab=st.integers(1, 300),
    k=st.sampled_from([0, 1, 2, 8]),
    counts=st.booleans(),
    chunk=st.integers(1, 4),
)
def test_values_and_gradients_equal_the_materialised_graph(seed, rows, width, vocab, k, counts, chunk):
    hidden, weight, targets = problem(seed, rows, width, vocab)
    k = min(k, vocab)
    log_counts = torch.rand(vocab, dtype=torch.float64) if counts else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "chunk_rows", lambda *_: chunk)
        ours = hidden.clone().requires_grad_()
        result = token_log_probs(ours, weight, targets, k, log_counts)
        theirs = hidden.clone().requires_grad_()
        target, ids, log_probs = naive(theirs, weight, targets, k, log_counts)
        assert torch.equal(result.ids, ids)
        torch.testing.assert_close(result.target, target, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(result.log_probs, log_probs, rtol=1e-10, atol=1e-10)
        a, b = torch.randn(rows, dtype=torch.float64), torch.randn(rows, k, dtype=torch.float64)
        ((result.target * a).sum() + (result.log_probs * b).sum()).backward()
        ((target * a).sum() + (log_probs * b).sum()).backward()
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("k", [0, 4])
def test_gradcheck_in_fp64(k, monkeypatch):
    monkeypatch.setattr(fused, "chunk_rows", lambda *_: 3)
    hidden, weight, targets = problem(1, 7, 5, 90)
    targets[:3] = (hidden @ weight.t()).argmax(-1)[:3]  # some targets are candidates too

    def outputs(x):
        result = token_log_probs(x, weight, targets, k)
        return (result.target, result.log_probs) if k else result.target

    assert torch.autograd.gradcheck(outputs, hidden.requires_grad_())


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), vocab=st.integers(8, 400), k=st.sampled_from([1, 4, 8]))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_logits_go_to_the_lower_id(dtype, seed, vocab, k):
    generator = torch.Generator().manual_seed(seed)
    # Few distinct values, both zeros among them: most of the order is decided by ties.
    values = torch.randint(-2, 3, (4, vocab), generator=generator) * torch.tensor(1.0)
    values[values == 0] *= torch.where(torch.rand(int((values == 0).sum()), generator=generator) < 0.5, -1.0, 1.0)
    hidden = torch.eye(4, dtype=dtype)
    result = token_log_probs(hidden, values.t().to(dtype).contiguous(), torch.zeros(4, dtype=torch.long), k)
    ids, log_probs = top_candidates(values.to(dtype), k)
    assert torch.equal(result.ids, ids)
    torch.testing.assert_close(result.log_probs, log_probs)


def test_bf16_gradient_of_a_sure_token_keeps_its_direction():
    """p near 1: W_v - E nearly cancels; rounding probabilities to bf16 inside E would leave noise."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(200, 64, generator=generator).bfloat16()
    hidden = (weight[:8].float() * 0.2).bfloat16()
    exact = hidden.double().requires_grad_()
    probabilities = (exact @ weight.double().t()).log_softmax(-1).gather(1, torch.arange(8)[:, None])
    assert probabilities.exp().min() > 0.9
    probabilities.sum().backward()
    ours = hidden.clone().requires_grad_()
    token_log_probs(ours, weight, torch.arange(8), 4).target.sum().backward()
    error = (ours.grad.double() - exact.grad).norm(dim=-1) / exact.grad.norm(dim=-1)
    assert error.max() < 0.15


class LargestResult(TorchDispatchMode):
    """Remembers how many values the largest result of any operation has."""

    values = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        for tensor in tree_leaves(result):
            if torch.is_tensor(tensor):
                self.values = max(self.values, tensor.untyped_storage().nbytes() // tensor.itemsize)
        return result


@pytest.mark.parametrize("counts", [False, True])
def test_no_tensor_is_larger_than_one_chunk_of_logits(counts, monkeypatch):
    rows, width, vocab, chunk = 60, 4, 800, 8
    monkeypatch.setattr(fused, "chunk_rows", lambda *_: chunk)
    hidden, weight, targets = problem(0, rows, width, vocab, torch.float32)
    log_counts = torch.rand(vocab) if counts else None
    hidden.requires_grad_()
    with LargestResult() as largest:
        result = token_log_probs(hidden, weight, targets, 2, log_counts)
        (result.target.sum() + result.log_probs.sum()).backward()
    assert largest.values == chunk * vocab


def test_shapes_and_dtypes_that_do_not_fit_are_refused():
    hidden, weight, targets = problem(0, 3, 4, 10)
    with pytest.raises(ValueError, match=r"expected hidden \[R, H\]"):
        token_log_probs(hidden, weight[:, :3], targets, 2)
    with pytest.raises(ValueError, match="one dtype"):
        token_log_probs(hidden, weight.float(), targets, 2)
    with pytest.raises(ValueError, match="k must lie"):
        token_log_probs(hidden, weight, targets, 11)
