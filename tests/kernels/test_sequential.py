"""The kernels of a slot of DSpark and Domino, and their loop over a block, against the readable heads in fp64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_lilicorr.config import DominoConfig, DSparkConfig
from vllm_lilicorr.kernels import corrected_argmax as argmax_module
from vllm_lilicorr.kernels import fused_linear as linear_module
from vllm_lilicorr.kernels import gru_cell as gru_module
from vllm_lilicorr.kernels.corrected_argmax import Best, Correction, corrected_argmax
from vllm_lilicorr.kernels.gru_cell import FEW_ROWS, gru_cell
from vllm_lilicorr.model.heads import BlockStates, TargetVocabulary, build_head
from vllm_lilicorr.serving import sequential
from vllm_lilicorr.serving.head import Step
from vllm_lilicorr.serving.sequential import DominoDrafting, DSparkDrafting

from .conftest import _CONFIG, BLOCKS, DEVICE, DTYPES, MODE, TOLERANCE, error, examples, poisoned, randn, reseed

DRAFTING = {"dspark": DSparkDrafting, "domino": DominoDrafting}


# --- one launch over the vocabulary -----------------------------------------------------------------------------------------


@examples()
@given(
    st.sampled_from([1, 2, 17, BLOCKS, 70]), st.sampled_from([5, 97, 4096, 9001]), st.sampled_from([8, 24, 100]),
    st.sampled_from(["given", "gathered", "nothing"]), st.booleans(), st.sampled_from(DTYPES), st.integers(0, 2**20),
)  # fmt: skip
def test_the_scores_are_the_sums_and_the_token_is_the_first_of_their_greatest(n, vocab, rank, kind, with_withheld, dtype, seed):
    reseed(seed)
    # Rows of a wider tensor, as a slot's are; what lies behind the vocabulary must not win.
    logits = torch.full((n, 2, vocab + 3), torch.inf, dtype=dtype, device=DEVICE)[:, 1, :vocab]
    logits.copy_(randn(n, vocab, scale=3.0))
    table, weight = randn(n if kind == "given" else 50, rank + 8, dtype=dtype)[:, :rank], randn(vocab, rank, dtype=dtype)
    ids = torch.randint(50, (n, 2), device=DEVICE)[:, 1] if kind == "gathered" else None
    correction = None if kind == "nothing" else Correction(table, weight, ids)
    withheld = torch.rand(n, device=DEVICE) < 0.3 if with_withheld else None
    tokens, scores, best = poisoned(n, 2, dtype=torch.int64)[:, 0], poisoned(n, vocab), Best.empty(n + 3, DEVICE)
    got = corrected_argmax(logits, correction, tokens, best, withheld=withheld, null_token=vocab - 2, scores=scores)

    free = torch.ones(n, dtype=torch.bool, device=DEVICE) if withheld is None else ~withheld
    expected = logits.double()
    if correction is not None:
        expected = expected + (table if ids is None else table[ids]).double() @ weight.double().t()
    assert error(scores[free], expected[free]) <= TOLERANCE[dtype]
    assert got is tokens and torch.equal(tokens, scores.argmax(-1))
    assert (tokens[~free] == vocab - 2).all() and (scores[~free].exp().sum(-1) == 1).all()
    # The workspace is as it was, and the scores are wanted by few.
    for buffer, empty in zip(best, Best.empty(n + 3, DEVICE), strict=True):
        assert torch.equal(buffer, empty)
    again = poisoned(n, dtype=torch.int64)
    assert torch.equal(corrected_argmax(logits, correction, again, best, withheld=withheld, null_token=vocab - 2), tokens)


def test_equal_scores_go_to_the_lower_id():
    logits = torch.zeros(3, 9000, device=DEVICE)
    logits[0, [70, 4100, 8999]] = 1.0
    logits[1] = -torch.inf
    logits[2, 5], logits[2, 6:] = -0.0, -1.0
    best = Best.empty(3, DEVICE)
    assert corrected_argmax(logits, None, poisoned(3, dtype=torch.int64), best).tolist() == [70, 0, 0]


def test_nan_counts_as_minus_infinity_and_stays_in_its_row():
    reseed(1)
    logits, x, weight = randn(4, 500), randn(4, 8), randn(500, 8)
    expected = (logits + x @ weight.t()).argmax(-1)
    x[1], logits[2, :499] = torch.nan, torch.nan
    scores = poisoned(4, 500)
    tokens = corrected_argmax(logits, Correction(x, weight), poisoned(4, dtype=torch.int64), Best.empty(4, DEVICE), scores=scores)
    assert tokens[[0, 3]].tolist() == expected[[0, 3]].tolist() and tokens[1] == 0 and tokens[2] == 499
    assert not scores.isnan().any()


# --- the GRU ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("few", [True, False])
@examples()
@given(
    st.sampled_from([1, 3, 17, 33]), st.sampled_from([(8, 24), (130, 48), (48, 300)]), st.booleans(), st.sampled_from(DTYPES),
    st.integers(0, 2**20),
)  # fmt: skip
def test_a_step_of_the_gru_is_torchs(few, n, widths, gathered, dtype, seed):
    reseed(seed)
    hidden, width = widths
    gru = torch.nn.GRU(hidden, width, bias=False, batch_first=True).to(DEVICE, dtype).requires_grad_(False)
    table, state = randn(50 if gathered else n, hidden + 8, dtype=dtype)[:, :hidden], randn(2, n, width, dtype=dtype)[1]
    ids = torch.randint(50, (n, 3), device=DEVICE)[:, 1] if gathered else None
    out = poisoned(n, width, dtype=dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gru_module, "FEW_ROWS", FEW_ROWS if few else 0)
        assert gru_cell(table, ids, state, gru.weight_ih_l0, gru.weight_hh_l0, out) is out
    x = table if ids is None else table[ids]
    expected = copy.deepcopy(gru).double()(x.double()[:, None], state.double()[None])[0][:, 0]
    assert error(out, expected) <= TOLERANCE[dtype]


# --- a block ----------------------------------------------------------------------------------------------------------------


class Served:
    """The served model as a drafting head sees it: a random head, a target's vocabulary, and a batch of blocks."""

    def __init__(self, name: str, n: int, slots: int, dtype: torch.dtype, *, vocab: int = 997, width: int = 24) -> None:
        head: DSparkConfig | DominoConfig = DSparkConfig(width, True, True)
        if name == "domino":
            head = DominoConfig(gru_hidden_dim=2 * width, emb_dim=width, pure_draft_prefix_len=1)
        self.config = replace(_CONFIG, vocab_size=vocab, block_size=slots, head=head)
        self.head = build_head(self.config).requires_grad_(False)
        for parameter in self.head.parameters():
            parameter.copy_(torch.randn_like(parameter) * (1.0 if name == "dspark" else 2.0) / parameter.shape[-1] ** 0.5)
        self.head = self.head.to(DEVICE, dtype)
        hidden = self.config.hidden_size
        self.embedding, self.lm_head = randn(vocab, hidden, dtype=dtype), randn(vocab, hidden, dtype=dtype, scale=0.2)
        self.block = BlockStates(
            randn(n, slots, hidden, dtype=dtype), randn(n, hidden, dtype=dtype), torch.ones(n, dtype=torch.bool, device=DEVICE),
            torch.randint(vocab, (n,), device=DEVICE),
        )  # fmt: skip
        self.drafting = DRAFTING[name](self, n + 2)

    def full_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.lm_head)

    def plain_embedding(self) -> torch.Tensor | None:
        return self.embedding

    def embed_candidates(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.embedding)

    def scored(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the readable head's fp64 scores [N, S, V] of each slot after `tokens` [N, S] in the slots before it."""
        head, block = copy.deepcopy(self.head).double(), BlockStates(*(t.double() if t.is_floating_point() else t for t in vars(self.block).values()))
        target = TargetVocabulary(self.embedding.double(), self.lm_head.double())
        rows = self.full_logits(self.block.slot_hidden).double().unbind(1)  # as rounded by the model
        state, scores = head.begin(block, target), []
        for slot, row in enumerate(rows):
            added = head.correction(state, slot, block)
            scores.append(row if added is None else row + added)
            state = head.read(state, tokens[:, slot], target)
        return torch.stack(scores, 1)


@examples()
@given(
    st.sampled_from(["dspark", "domino"]), st.integers(1, BLOCKS), st.integers(1, 5), st.sampled_from([97, 5003]), st.sampled_from([8, 40]),
    st.booleans(), st.sampled_from(DTYPES), st.integers(0, 2**20),
)  # fmt: skip
def test_a_block_is_drafted_as_the_readable_head_would(name, n, slots, vocab, width, sharded, dtype, seed):
    reseed(seed)
    served = Served(name, n, slots, dtype, vocab=vocab, width=width)
    if sharded:
        served.plain_embedding = lambda: None  # type: ignore[method-assign]  # rows come from the target's own layer
    seen: list[torch.Tensor] = []
    tokens = served.drafting.propose(served.block, "greedy", Step(observe=lambda row, slot: seen.append(row.clone()))).tokens
    expected, found = served.scored(tokens), torch.stack(seen, 1)
    assert error(found, expected) <= TOLERANCE[dtype]
    assert torch.equal(tokens, found.argmax(-1))
    # Without anyone looking the scores are not written, and the drafts are the same.
    assert torch.equal(served.drafting.propose(served.block, "greedy").tokens, tokens)
    plain = served.drafting.propose(served.block, "argmax").tokens
    assert torch.equal(plain, served.full_logits(served.block.slot_hidden).float().argmax(-1))


@pytest.mark.parametrize("name", DRAFTING)
def test_inert_blocks_write_nothing_and_withheld_ones_propose_one_token(name):
    reseed(2)
    served = Served(name, 4, 3, torch.float32)
    free = served.drafting.propose(served.block, "greedy").tokens
    out, rows = torch.full((6, 3), -7, device=DEVICE), torch.tensor([3, -1, 0, 2], device=DEVICE)
    withheld = torch.tensor([False, False, True, False], device=DEVICE)
    tokens = served.drafting.propose(served.block, "greedy", Step(withheld=withheld, null_token=96), rows=rows, tokens_out=out).tokens
    assert torch.equal(out[[0, 3]], free[[0, 3]]) and (out[2] == 96).all() and (out[[1, 4, 5]] == -7).all()
    assert torch.equal(tokens[[0, 1, 3]], free[[0, 1, 3]])


@pytest.mark.parametrize("name", DRAFTING)
def test_a_block_does_not_depend_on_its_neighbours_nor_on_what_the_workspace_holds(name):
    reseed(3)
    served = Served(name, 4, 4, torch.float32)
    before = served.drafting.propose(served.block, "greedy").tokens.clone()
    for buffer in ("_states", "_bottleneck"):
        if hasattr(served.drafting, buffer):
            getattr(served.drafting, buffer).fill_(torch.nan)
    served.block.slot_hidden[1] = torch.nan
    tokens = served.drafting.propose(served.block, "greedy").tokens
    assert torch.equal(tokens[[0, 2, 3]], before[[0, 2, 3]])
    assert ((tokens >= 0) & (tokens < 997)).all()


def test_draws_read_the_corrected_scores_and_correct_what_follows():
    reseed(4)
    served = Served("dspark", 4, 3, torch.float32, vocab=97)
    temperature, uniforms = torch.tensor([0.0, 0.5, 1.0, 2.0], device=DEVICE), torch.rand(4, 3, device=DEVICE)
    proposal = served.drafting.propose(served.block, "sampled", temperature=temperature, uniforms=uniforms)
    expected = served.scored(proposal.tokens)
    greedy = F.one_hot(expected.argmax(-1), 97).double()
    warm = (expected / temperature.clamp_min(1e-3).double()[:, None, None]).softmax(-1)
    probs = torch.where((temperature > 0)[:, None, None], warm, greedy)
    assert error(served.drafting.dense(proposal), probs) <= 1e-5
    assert (probs.gather(-1, proposal.tokens[..., None]) > 0).all()


# --- launches ---------------------------------------------------------------------------------------------------------------


class Launches(TorchDispatchMode):
    """Counts the operations that compute, and the kernels; what the interpreter does inside one is not counted."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.count, self.inside = 0, False
        for module, name in (
            (argmax_module, "_corrected_argmax_kernel"), (gru_module, "_gru_cell_kernel"), (gru_module, "_gru_gates_kernel"),
            (linear_module, "_fused_linear_kernel"),
        ):  # fmt: skip
            patch.setattr(module, name, self._counted(getattr(module, name)))

    def _counted(self, kernel: Any) -> Any:
        def launch(grid: tuple[int, ...]) -> Callable[..., Any]:
            def run(*args: Any, **options: Any) -> None:
                self.count += 1
                self.inside = True
                kernel[grid](*args, **options)
                self.inside = False

            return run

        return _Launcher(launch)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A view's result aliases its argument and is not written to; an empty tensor costs no launch.
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        self.count += not (view or self.inside or "empty" in func._schema.name)
        return func(*args, **(kwargs or {}))


class _Launcher:
    def __init__(self, launch: Callable[..., Any]) -> None:
        self.launch = launch

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return self.launch(grid)


@pytest.mark.skipif(MODE == "torch", reason="the torch twins launch no kernels")
@pytest.mark.parametrize(("name", "few", "launches"), [("dspark", True, 1), ("domino", True, 3), ("domino", False, 6)])
def test_a_slot_is_few_launches(name, few, launches, monkeypatch):
    reseed(5)
    monkeypatch.setattr(gru_module, "FEW_ROWS", FEW_ROWS if few else 0)
    counts = []
    for slots in (3, 4):
        served = Served(name, 2, slots, torch.bfloat16)
        with pytest.MonkeyPatch.context() as patch, Launches(patch) as counter:
            served.drafting.propose(served.block, "greedy", Step(withheld=torch.zeros(2, dtype=torch.bool, device=DEVICE)))
        counts.append(counter.count)
    print(f"{name}: {counts[0]} launches a block of 3 slots, {counts[1] - counts[0]} a further slot")
    assert counts[1] - counts[0] == launches


@pytest.mark.skipif(MODE != "cuda", reason="capturing a CUDA graph needs a GPU")
@pytest.mark.parametrize("name", DRAFTING)
def test_a_captured_graph_replays_with_changed_inputs(name):
    reseed(6)
    served = Served(name, 3, 5, torch.bfloat16)
    rows, out = torch.tensor([2, -1, 0], device=DEVICE), torch.full((3, 5), -7, device=DEVICE)
    step = Step(withheld=torch.zeros(3, dtype=torch.bool, device=DEVICE), null_token=96)

    def draft() -> torch.Tensor:
        return served.drafting.propose(served.block, "greedy", step, rows=rows, tokens_out=out).tokens

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        draft()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = draft()
    for turn in range(20):
        served.block.slot_hidden.normal_()
        served.block.anchor_ids.random_(0, 997)
        step.withheld.copy_(torch.arange(3, device=DEVICE) == turn % 5)
        graph.replay()
        replayed = captured.clone()
        assert torch.equal(replayed, draft()) and (out[1] == -7).all()


def test_what_does_not_fit_is_refused():
    logits, tokens, best = torch.zeros(2, 40, device=DEVICE), torch.zeros(2, dtype=torch.int64, device=DEVICE), Best.empty(2, DEVICE)
    x, weight = torch.zeros(2, 8, device=DEVICE), torch.zeros(40, 8, device=DEVICE)
    with pytest.raises(ValueError, match=r"correction.weight must have shape \[40, any\], got \[39, 8\]"):
        corrected_argmax(logits, Correction(x, weight[:39]), tokens, best)
    with pytest.raises(ValueError, match=r"correction.x must have shape \[2, 8\], got \[1, 8\]"):
        corrected_argmax(logits, Correction(x[:1], weight), tokens, best)
    with pytest.raises(ValueError, match="made for 1 rows, and there are 2"):
        corrected_argmax(logits, None, tokens, Best.empty(1, DEVICE))
    with pytest.raises(ValueError, match=r"null_token must lie in 0\.\.39, got 40"):
        corrected_argmax(logits, None, tokens, best, null_token=40)
    with pytest.raises(ValueError, match="logits must be contiguous in its last dimension"):
        corrected_argmax(logits.t(), None, tokens.repeat(20), Best.empty(40, DEVICE))
    with pytest.raises(ValueError, match=r"of_input must have shape \[24, 8\], got \[40, 8\]"):
        gru_cell(x, None, x, weight, weight[:24], torch.zeros_like(x))
    with pytest.raises(ValueError, match="out must not be state"):
        gru_cell(x, None, x, weight[:24], weight[:24], x)


def test_the_graph_pool_is_asked_for_scores_only_where_they_are_read(monkeypatch):
    reseed(7)
    served, given = Served("dspark", 2, 2, torch.float32), []
    original = sequential.corrected_argmax
    monkeypatch.setattr(sequential, "corrected_argmax", lambda *args, **options: given.append(options["scores"]) or original(*args, **options))
    served.drafting.propose(served.block, "greedy")
    assert given == [None, None]
