from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_lilicorr.trainer import corrected_log_probs as fused
from vllm_lilicorr.trainer.corrected_log_probs import corrected_log_probs


def naive(hidden, weight, extra, table, targets, final, log_counts):
    """The same with every logit in the graph."""
    counts = torch.zeros(len(weight), dtype=hidden.dtype) if log_counts is None else log_counts
    logits = hidden @ weight.t() + extra @ table.t()
    ours = (logits + counts).softmax(-1)
    target = logits.gather(1, targets[:, None])[:, 0] - (logits + counts).logsumexp(-1)
    if final is None:
        return target, torch.zeros_like(target), logits.argmax(-1)
    return target, (ours - (final @ weight.t() + counts).softmax(-1)).abs().sum(-1), logits.argmax(-1)


def problem(seed, rows, vocab, width=5, rank=3, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    targets = torch.randint(0, vocab, (rows,), generator=generator)
    return randn(rows, width), randn(vocab, width), randn(rows, rank), randn(vocab, rank), targets, randn(rows, width)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(0, 7),
    vocab=st.integers(1, 150),
    counts=st.booleans(),
    distance=st.booleans(),
    chunk=st.integers(1, 4),
)
def test_values_and_gradients_equal_the_materialised_graph(seed, rows, vocab, counts, distance, chunk):
    hidden, weight, extra, table, targets, final = problem(seed, rows, vocab)
    log_counts = torch.rand(vocab, dtype=torch.float64) * 3 if counts else None
    a, b = torch.randn(2, rows, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "chunk_rows", lambda *_: chunk)
        for operation in (corrected_log_probs, naive):
            leaves = [tensor.clone().requires_grad_() for tensor in (hidden, extra, table)]
            found = operation(leaves[0], weight, leaves[1], leaves[2], targets, final if distance else None, log_counts)
            target, l1, top = (found.target, found.l1, found.top) if operation is corrected_log_probs else found
            ((target * a).sum() + (l1 * b).sum()).backward()
            grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
            results.append((target, l1, top, *grads))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


def test_gradcheck_in_fp64(monkeypatch):
    monkeypatch.setattr(fused, "chunk_rows", lambda *_: 3)
    hidden, weight, extra, table, targets, final = problem(1, 5, 40)

    def outputs(*leaves):
        found = corrected_log_probs(leaves[0], weight, leaves[1], leaves[2], targets, final)
        return found.target, found.l1

    assert torch.autograd.gradcheck(outputs, [tensor.requires_grad_() for tensor in (hidden, extra, table)])


def test_the_distance_runs_from_zero_for_the_same_distribution_to_two():
    hidden, weight, extra, table, targets, _ = problem(2, 4, 30)
    same = corrected_log_probs(hidden, weight, torch.zeros_like(extra), table, targets, hidden)
    torch.testing.assert_close(same.l1, torch.zeros(4, dtype=torch.float64))
    one_hot = torch.eye(30, 5, dtype=torch.float64)
    far = corrected_log_probs(200 * one_hot[:1], one_hot, extra[:1] * 0, table, targets[:1], 200 * one_hot[1:2])
    torch.testing.assert_close(far.l1, torch.tensor([2.0], dtype=torch.float64))


def test_bf16_gradients_keep_their_direction_where_the_drafter_is_sure():
    hidden, weight, extra, table, targets, final = problem(3, 8, 200, width=64, rank=8, dtype=torch.bfloat16)
    hidden = (weight[:8].float() * 0.2).bfloat16()
    targets = torch.arange(8)
    grads = []
    for dtype in (torch.bfloat16, torch.float64):
        leaves = [tensor.detach().to(dtype, copy=True).requires_grad_() for tensor in (hidden, 0.1 * extra, table)]
        found = corrected_log_probs(leaves[0], weight.to(dtype), leaves[1], leaves[2], targets, final.to(dtype))
        assert found.target.detach().exp().min() > 0.8
        found.target.sum().backward()
        grads.append([leaf.grad.double() for leaf in leaves])
    for ours, exact in zip(*grads, strict=True):
        assert (ours - exact).norm() / exact.norm() < 0.05


def test_no_tensor_grows_with_rows_times_vocabulary(monkeypatch):
    """What outlives the forward pass: the inputs and a few numbers a row."""
    hidden, weight, extra, table, targets, final = problem(4, 64, 500)
    kept = []
    leaves = [tensor.requires_grad_() for tensor in (hidden, extra, table)]
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        corrected_log_probs(leaves[0], weight, leaves[1], leaves[2], targets, final)
    inputs = {tensor.data_ptr() for tensor in (hidden, weight, extra, table, targets, final)}
    assert kept and all(tensor.data_ptr() in inputs for tensor in kept)


def test_shapes_and_dtypes_that_do_not_fit_are_refused():
    hidden, weight, extra, table, targets, final = problem(0, 3, 10)
    with pytest.raises(ValueError, match=r"table must be \(10, 3\), got \(9, 3\)"):
        corrected_log_probs(hidden, weight, extra, table[:9], targets)
    with pytest.raises(ValueError, match=r"final must be"):
        corrected_log_probs(hidden, weight, extra, table, targets, final[:2])
    with pytest.raises(ValueError, match="one dtype"):
        corrected_log_probs(hidden, weight.float(), extra, table, targets)
