"""What training computes through kernels, against what it computes without: the head's gradients, and the fused lm_head's."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from vllm_lilicorr.kernels import _triton
from vllm_lilicorr.model.heads import lilicorr
from vllm_lilicorr.trainer import token_log_probs as lm_head

from .conftest import DEVICE, DTYPES, MODE, TOLERANCE, error, in_double, make_head, randn, reseed

LAYERS = 2


@pytest.fixture
def attended(monkeypatch):
    """Return a list that grows at every call of the kernels' attention in the head."""
    calls = []
    original = lilicorr.lattice_attention
    monkeypatch.setattr(lilicorr, "lattice_attention", lambda *args: calls.append(args) or original(*args))
    return calls


class Case:
    """A head, and a batch of blocks: one without context, one shorter than the head's own number of slots."""

    def __init__(self, dtype: torch.dtype, seed: int, n: int = 2, slots: int = 4) -> None:
        reseed(seed)
        self.head = make_head(dtype)
        self.embeddings, self.hidden, self.anchor = (randn(*shape, dtype=dtype) for shape in ((n, slots, 4, 48), (n, slots, 48), (n, 48)))
        self.log_probs = randn(n, slots, 4).log_softmax(-1).sort(descending=True).values
        self.valid = torch.arange(n, device=DEVICE) > 0
        self.weights = randn(n, 4), randn(n, slots - 1, 4, 4)

    def gradients(self, head=None, forward=None, between=lambda: None) -> dict[str, torch.Tensor]:
        """Return the gradients of the head's parameters and inputs, the scores being weighted; `between` runs before the backward pass."""
        head = self.head if head is None else head
        head.zero_grad()
        wide = head.slot_embedding.dtype == torch.float64
        inputs = [(x.double() if wide else x).detach().clone().requires_grad_() for x in (self.log_probs, self.hidden, self.anchor)]
        scores = (forward or head)(self.embeddings, *inputs, self.valid)
        between()
        sum((weight * x).sum() for weight, x in zip(self.weights, scores, strict=True)).backward()
        found = {f"input {i}": x.grad for i, x in enumerate(inputs)} | {name: p.grad for name, p in head.named_parameters()}
        return {name: grad.clone() for name, grad in found.items()}


def difference(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the largest ||got - expected|| / ||expected||; a gradient that is zero but for rounding is measured against the others."""
    largest = max(x.norm().item() for x in expected.values())
    return max((got[k].double() - x.double()).norm().item() / max(x.norm().item(), 1e-3 * largest) for k, x in expected.items())


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_the_whole_head_are_those_of_exact_attention(dtype, attended, monkeypatch):
    case = Case(dtype, 20)
    got = case.gradients()
    assert len(attended) == (0 if MODE == "torch" else LAYERS)
    exact = case.gradients(in_double(case.head))
    monkeypatch.setattr(lilicorr, "has_kernels", lambda x: False)
    plain = case.gradients()
    assert len(attended) == (0 if MODE == "torch" else LAYERS)
    assert got.keys() == exact.keys() == plain.keys() and len(got) == 3 + len(list(case.head.parameters()))
    if dtype == torch.float32:
        assert difference(got, plain) <= TOLERANCE[dtype] and difference(got, exact) <= TOLERANCE[dtype]
    else:
        # To bfloat16 a GPU rounds and the interpreter truncates, whose errors are larger and do not cancel.
        factor = 8.0 if MODE == "interpreter" and dtype == torch.bfloat16 else 2.0
        assert difference(got, exact) <= max(factor * difference(plain, exact), 2 * TOLERANCE[dtype])


def test_activation_checkpointing_gives_the_same_bits(attended):
    case = Case(torch.float32, 21)
    expected = case.gradients()
    for layer in case.head.layers:
        layer.forward = lambda *args, run=layer.forward: checkpoint(run, *args, use_reentrant=False)
    got = case.gradients()
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    assert len(attended) == (0 if MODE == "torch" else 3 * LAYERS)


def test_the_backward_pass_needs_no_table_that_was_partitioned_away():
    """ZeRO's stage 3 takes a parameter's memory back after the forward pass of the module that holds it."""
    case = Case(torch.float32, 22)
    expected = case.gradients()
    tables = case.head.relative_slot_bias, case.head.same_slot_bias
    got = case.gradients(between=lambda: [table.data.fill_(torch.nan) for table in tables])
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_without_autograd_under_a_compiler_in_fp64_and_without_triton_attention_is_torchs(attended, monkeypatch):
    case = Case(torch.float32, 23)
    with torch.no_grad():
        case.head(case.embeddings, case.log_probs, case.hidden, case.anchor, case.valid)
    case.gradients(in_double(case.head))
    compiled = case.gradients(forward=torch.compile(case.head.forward, backend="eager"))
    monkeypatch.setattr(_triton, "HAS_TRITON", False)
    plain = case.gradients()
    assert not attended
    assert difference(compiled, plain) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [0, 1, 8])
def test_the_fused_lm_heads_values_and_gradients(dtype, k, monkeypatch):
    """Five rows in chunks of two, values that tie, targets among the candidates and not."""
    reseed(24)
    hidden, weight = randn(5, 16, dtype=dtype), randn(300, 16, dtype=dtype)
    weight[200:] = weight[100:200]
    targets = (hidden @ weight.t()).argmax(-1)
    targets[::2] = torch.tensor([7, 299, 60], device=DEVICE)
    weights = randn(5), randn(5, k)
    calls = []
    original = lm_head.topk_shard
    monkeypatch.setattr(lm_head, "topk_shard", lambda *args: calls.append(len(args[0])) or original(*args))
    monkeypatch.setattr(lm_head, "chunk_rows", lambda *_: 2)

    def compute(wide=False, **options):
        leaf = (hidden.double() if wide else hidden).clone().requires_grad_()
        found = lm_head.token_log_probs(leaf, weight.double() if wide else weight, targets, k, **options)
        ((found.target * weights[0]).sum() + (found.log_probs * weights[1]).sum()).backward()
        return found, leaf.grad

    got, grad = compute()
    with torch.no_grad():
        again = lm_head.token_log_probs(hidden, weight, targets, k)
    assert sum(calls) == (0 if MODE == "torch" or k == 0 else 2 * len(hidden)) and all(rows <= 2 for rows in calls)
    calls.clear()
    exact_grad = compute(wide=True)[1]
    compute(log_counts=torch.zeros(300, device=DEVICE))  # counts have no kernel
    monkeypatch.setattr(lm_head, "has_kernels", lambda x: False)
    plain, plain_grad = compute()
    assert not calls
    assert torch.equal(again.target, got.target) and torch.equal(again.ids, got.ids) and torch.equal(again.log_probs, got.log_probs)
    assert torch.equal(got.ids, plain.ids)
    torch.testing.assert_close(got.target, plain.target, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.log_probs, plain.log_probs, rtol=1e-5, atol=1e-5)
    assert error(grad, exact_grad) <= max(1.5 * error(plain_grad, exact_grad), TOLERANCE[torch.float32])
