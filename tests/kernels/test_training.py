"""What training computes through kernels, against what it computes without: the readable head's gradients."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from vllm_lilicorr.kernels import _triton
from vllm_lilicorr.model.heads import lilicorr

from .conftest import DEVICE, DTYPES, MODE, TOLERANCE, in_double, make_head, randn, reseed

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
        factor = 8.0 if MODE == "interpreter" and dtype == torch.bfloat16 else 1.5
        assert difference(got, exact) <= max(factor * difference(plain, exact), TOLERANCE[dtype])


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
