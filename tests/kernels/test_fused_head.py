"""The serving head, from logits to tokens, against the readable head in fp64 and the reference's walk."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_lilicorr.kernels.score_and_walk import RULES
from vllm_lilicorr.model import fused as module
from vllm_lilicorr.model.fused import FusedLiLiCorrHead
from vllm_lilicorr.model.lattice import top_candidates, walk

from .conftest import BLOCKS, DEVICE, DTYPES, MODE, PER_DTYPE, TOLERANCE, error, examples, in_double, make_head, randn, reseed

VOCAB = 997


def poison(fused: FusedLiLiCorrHead) -> None:
    """Overwrite every buffer of the head, so that reading what a call did not write shows."""
    for value in vars(fused).values():
        for tensor in value if isinstance(value, tuple) else (value,):
            if isinstance(tensor, torch.Tensor) and tensor.data_ptr() in BUFFERS[id(fused)]:
                tensor.fill_(-(2**40) if tensor.dtype == torch.int64 else float("nan"))


BUFFERS: dict[int, set[int]] = {}


def build(head, **options) -> FusedLiLiCorrHead:
    fused = FusedLiLiCorrHead(head, **options)
    names = [name for name in vars(fused) if name.startswith("_")]
    tensors = [t for name in names for t in (getattr(fused, name) if name == "_walked" else (getattr(fused, name),))]
    BUFFERS[id(fused)] = {t.data_ptr() for t in tensors if isinstance(t, torch.Tensor)} - {fused._walked.arrivals.data_ptr()}
    return fused


class Inputs:
    """One batch: padded logits, slot states, anchors (some absent and NaN), the embedding table."""

    def __init__(self, head, n: int, slots: int, dtype: torch.dtype) -> None:
        hidden = head.pass_hidden_proj.in_features
        self.logits = randn(n * slots, VOCAB + 3, dtype=dtype, scale=3.0)
        self.logits[:, VOCAB:] = torch.inf
        self.embedding = randn(VOCAB + 3, hidden, dtype=dtype)
        self.slot_hidden, self.anchor_hidden = randn(n, slots, hidden, dtype=dtype), randn(n, hidden, dtype=dtype)
        self.anchor_valid = torch.rand(n, device=DEVICE) < 0.7
        self.anchor_hidden[~self.anchor_valid] = torch.nan

    def propose(self, fused: FusedLiLiCorrHead, **options):
        fused.candidates(self.logits, vocab_size=VOCAB)
        return fused.propose(self.slot_hidden, self.anchor_hidden, self.anchor_valid, embedding=self.embedding, **options)

    def reference(self, head):
        """Return ids, log-probabilities, start and pair of the readable head in fp64."""
        n, slots, _ = self.slot_hidden.shape
        logits = self.logits[:, :VOCAB].double().view(n, slots, -1)
        ids, log_probs = top_candidates(logits, head.config.candidate_topk)
        with torch.no_grad():
            scores = in_double(head)(
                self.embedding.double()[ids], log_probs, self.slot_hidden.double(), self.anchor_hidden.double(), self.anchor_valid
            )
        return ids, log_probs, *scores


def check(head, fused, n, slots, dtype) -> None:
    check_on(head, fused, Inputs(head, n, slots, dtype), dtype)


def check_on(head, fused, inputs, dtype) -> None:
    n = len(inputs.slot_hidden)
    ids, log_probs, start, pair = inputs.reference(head)
    poison(fused)
    got = inputs.propose(fused)
    assert torch.equal(got.ids, ids)
    torch.testing.assert_close(got.log_probs, log_probs.float(), rtol=1e-5, atol=1e-5)
    scores = fused._walked.pair_scores[:n]
    expected = torch.cat((start[:, None, None].expand(-1, 1, start.shape[1], -1), pair), 1)
    assert error(scores, expected, least=fused.sigma / 4) <= TOLERANCE[dtype]
    path = walk(start, pair, "greedy")
    off = (scores.double() - expected).abs().amax((1, 2, 3))
    certain = path.margin.amin(1) > 2 * off  # no score moved by `off` can change a decision
    assert torch.equal(got.index[certain], path.index[certain])
    assert torch.equal(got.tokens, got.ids.gather(-1, got.index[..., None])[..., 0])


@pytest.mark.parametrize("dtype", DTYPES)
@examples(PER_DTYPE)
@given(
    n=st.integers(1, BLOCKS), block_size=st.integers(2, 16), topk=st.sampled_from([1, 2, 4, 8, 16]),
    widths=st.sampled_from([(48, 32), (32, 64), (48, 48)]), heads=st.sampled_from([1, 2, 4]), layers=st.integers(0, 2), seed=st.integers(0, 2**20),
)  # fmt: skip
def test_scores_and_greedy_paths_are_the_references(n, block_size, topk, widths, heads, layers, dtype, seed):
    reseed(seed)
    hidden, width = widths
    head = make_head(
        dtype, hidden=hidden, block_size=block_size, candidate_topk=topk, hidden_size=width, num_heads=heads, num_layers=layers, factor_dim=24
    )
    slots = block_size - 1 if MODE != "interpreter" else min(block_size - 1, max(32 // topk, 1))
    products = "fused" if seed % 2 else "library"
    check(head, build(head, max_blocks=n, num_slots=slots, products=products), n, slots, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("topk", "slots"), [(1, 15), (2, 1), (4, 7), (8, 1), (16, 2)])
def test_every_number_of_candidates(topk, slots, dtype):
    reseed(12)
    head = make_head(dtype, block_size=slots + 1, candidate_topk=topk, num_layers=1, num_heads=2)
    check(head, build(head, max_blocks=2), 2, slots, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sixty_four_blocks(dtype):
    """Of fifteen slots; interpreted, where every slot of every block is a program, of one."""
    reseed(13)
    head = make_head(dtype, block_size=16, candidate_topk=2, num_layers=1, num_heads=1)
    slots = 1 if MODE == "interpreter" else 15
    check(head, build(head, max_blocks=64, num_slots=slots), 64, slots, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("products", ["library", "fused"])
def test_awkward_logits_and_states(products, dtype):
    """A slot whose logits all tie, a one-hot one, one with K finite logits, a huge one, one without a state; and an anchor of zeros."""
    reseed(14)
    head = make_head(dtype, num_layers=1)
    inputs = Inputs(head, 2, 5, dtype)
    logits = inputs.logits.view(2, 5, -1)[..., :VOCAB]
    logits[:, 0] = 1.5
    logits[:, 1] = 0
    logits[:, 1, 77] = 40
    logits[:, 2, 4:] = -torch.inf
    logits[:, 3] *= 1e3
    inputs.slot_hidden[:, 4] = 0
    inputs.anchor_hidden[0], inputs.anchor_valid[0] = 0, True
    check_on(head, build(head, max_blocks=2, products=products), inputs, dtype)


def test_fused_products_are_used_where_asked_and_few(monkeypatch):
    reseed(10)
    head = make_head(torch.bfloat16)
    calls = []
    original = module.fused_linear
    monkeypatch.setattr(module, "fused_linear", lambda *args, **options: calls.append(args) or original(*args, **options))
    fused = build(head, max_blocks=2, products="fused")
    check(head, fused, 2, 5, torch.bfloat16)
    assert len(calls) == (9 if fused.kernels else 0)  # four a layer, and the anchor fusion
    monkeypatch.setattr(module, "FUSED_ROWS", 39)
    check(head, fused, 2, 5, torch.bfloat16)
    assert len(calls) == (9 if fused.kernels else 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_blocks_go_in_chunks(dtype, monkeypatch):
    reseed(1)
    monkeypatch.setattr(module, "_CHUNK", 2)
    head = make_head(dtype, num_layers=1, num_heads=1)
    check(head, build(head, max_blocks=8), 5, 5, dtype)


def test_a_draft_length_shares_the_weights_of_another():
    reseed(2)
    head = make_head()
    fused = build(head, max_blocks=2)
    short = fused.for_slots(2)
    assert short.positions is fused.positions and short.layers is fused.layers
    inputs = Inputs(head, 2, 2, torch.float32)
    _, _, start, pair = inputs.reference(head)
    assert torch.equal(inputs.propose(short).index, walk(start, pair, "greedy").index)
    check(head, fused, 2, 5, torch.float32)  # which still has its own buffers
    with pytest.raises(ValueError, match=r"num_slots must lie in 1\.\.5"):
        fused.for_slots(6)


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_with_state_rows_and_without(rule, monkeypatch):
    """In chunks too: state rows, draws and tables must not be counted from a chunk's start."""
    reseed(3)
    monkeypatch.setattr(module, "_CHUNK", 2)
    head = make_head(block_size=4, candidate_topk=2, num_layers=1, num_heads=1)
    n, slots, topk = 5, 3, 2
    fused, inputs = build(head, max_blocks=n), Inputs(head, n, slots, torch.float32)
    _, _, start, pair = inputs.reference(head)
    temperature, uniforms = torch.rand(n, device=DEVICE) + 0.2, torch.rand(n, slots, device=DEVICE)
    temperature[3] = 0
    sampled = {"temperature": temperature.double(), "uniforms": uniforms.double()} if rule == "sampled" else {}
    expected = walk(start, pair, rule, **sampled).index
    options = {"temperature": temperature, "uniforms": uniforms} if rule == "sampled" else {}
    plain = inputs.propose(fused, rule=rule, **options)
    assert torch.equal(plain.index, expected)
    dense = plain.dense(VOCAB)
    torch.testing.assert_close(dense.sum(-1), torch.ones(n, slots, device=DEVICE))
    assert torch.equal(dense.gather(-1, plain.ids), plain.probs)

    rows = torch.tensor([6, 0, -1, 3, 1], device=DEVICE)
    by_state = torch.zeros(8, device=DEVICE)
    by_state[rows[rows >= 0]] = temperature[rows >= 0]
    table = torch.full((8, slots, VOCAB), -torch.inf, device=DEVICE)
    cached, tokens = torch.zeros(8, slots, topk, dtype=torch.int64, device=DEVICE), torch.full((n, slots), -9, device=DEVICE)
    if rule == "sampled":
        options["temperature"] = by_state
    inputs.propose(fused, rule=rule, rows=rows, tokens_out=tokens, draft_logits=table, cached_ids=cached, **options)
    live = rows >= 0
    assert torch.equal(tokens[live], inputs_tokens(inputs, head, expected)[live]) and (tokens[2] == -9).all()
    assert ((table > -torch.inf).sum(-1)[rows[live]] >= 1).all() and (table[[2, 4, 5, 7]] == -torch.inf).all()

    # Without state rows, block n is state n: temperatures, seeds and tables by block.
    seeds, positions = torch.arange(n, device=DEVICE) * 12345, torch.arange(n * slots, device=DEVICE).view(n, slots)
    identity = torch.arange(n, device=DEVICE)
    results = []
    for state in (None, identity):
        table.fill_(-torch.inf)
        got = inputs.propose(
            fused, rule=rule, rows=state, temperature=temperature, seeds=seeds, positions=positions, draft_logits=table[:n], cached_ids=cached[:n]
        )
        results.append((got.tokens.clone(), table.clone()))
        cached.zero_()
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


def inputs_tokens(inputs, head, index):
    return inputs.reference(head)[0].gather(-1, index[..., None])[..., 0]


@pytest.mark.parametrize("widths", [(48, 32), (32, 32)])
def test_gathered_embeddings_and_sharded_vocabularies_change_nothing(widths):
    reseed(4)
    hidden, width = widths
    head = make_head(hidden=hidden, hidden_size=width)
    fused, inputs = build(head, max_blocks=3), Inputs(head, 3, 5, torch.float32)
    plain = inputs.propose(fused)
    expected = plain.tokens.clone(), plain.scores.clone(), plain.ids.clone()

    poison(fused)
    shards = []
    for start, stop in ((0, 400), (400, VOCAB)):
        shard = torch.cat((inputs.logits[:, start:stop], torch.full((15, 2), 1e9, device=DEVICE)), 1)
        shards.append(fused.shard_candidates(shard, vocab_start=start, vocab_size=stop - start))
    ids, _ = fused.merge_candidates(torch.stack(shards[::-1]), vocab_size=VOCAB)
    assert torch.equal(ids, expected[2])
    got = fused.propose(inputs.slot_hidden, inputs.anchor_hidden, inputs.anchor_valid, token_embeddings=inputs.embedding[ids])
    assert torch.equal(got.tokens, expected[0])
    assert error(got.scores, expected[1]) <= 1e-5


@pytest.mark.parametrize("widths", [(48, 32), (32, 32)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_embedding_projected_once_gives_the_references_scores(widths, dtype):
    reseed(11)
    hidden, width = widths
    head = make_head(dtype, hidden=hidden, hidden_size=width, num_heads=1)
    fused, inputs = build(head, max_blocks=2), Inputs(head, 2, 5, dtype)
    fused.project_embedding(inputs.embedding)
    _, _, start, pair = inputs.reference(head)
    if hidden != width:
        inputs.embedding.fill_(torch.nan)  # not read any more
    poison(fused)
    inputs.propose(fused)
    scores = fused._walked.pair_scores[:2]
    assert error(scores, torch.cat((start[:, None, None].expand(-1, 1, start.shape[1], -1), pair), 1)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("callable_head", [False, True])
def test_candidates_from_hidden_states(callable_head, monkeypatch):
    reseed(5)
    monkeypatch.setattr(module, "_CHUNK", 2)
    head, hidden = make_head(), randn(3, 5, 48)
    weight = randn(VOCAB + 3, 48)
    fused = build(head, max_blocks=3)
    ids, log_probs = fused.candidates_from_hidden(hidden, (lambda rows: rows @ weight.t()) if callable_head else weight, vocab_size=VOCAB)
    expected_ids, expected = top_candidates((hidden.double() @ weight.double().t())[..., :VOCAB], 4)
    assert torch.equal(ids, expected_ids) and torch.allclose(log_probs.double(), expected, rtol=1e-5, atol=1e-4)


def test_a_block_does_not_depend_on_its_neighbours():
    reseed(6)
    head = make_head(num_heads=1)
    fused, inputs = build(head, max_blocks=4), Inputs(head, 4, 5, torch.float32)
    whole = inputs.propose(fused)
    scores, tokens = whole.scores.clone(), whole.tokens.clone()
    inputs.slot_hidden[1], inputs.logits[5:10] = torch.nan, torch.nan  # a broken neighbour
    got = inputs.propose(fused)
    assert torch.equal(got.tokens[[0, 2, 3]], tokens[[0, 2, 3]]) and error(got.scores[[0, 2, 3]], scores[[0, 2, 3]]) <= 1e-5
    assert ((got.ids >= 0) & (got.ids < VOCAB)).all() and got.probs.isfinite().all()


@pytest.mark.parametrize("products", ["library", "fused"])
def test_the_same_inputs_give_the_same_bits(products):
    reseed(7)
    head = make_head(torch.bfloat16)
    fused, inputs = build(head, max_blocks=3, products=products), Inputs(head, 3, 5, torch.bfloat16)
    first = inputs.propose(fused).scores.clone()
    for _ in range(100 if MODE == "cuda" else 1):
        poison(fused)
        assert torch.equal(first, inputs.propose(fused).scores)


def test_the_weights_are_copied():
    reseed(8)
    head = make_head()
    fused, inputs = build(head, max_blocks=1), Inputs(head, 1, 5, torch.float32)
    before = inputs.propose(fused).scores.clone()
    for parameter in head.parameters():
        parameter.data.zero_()
    assert torch.equal(before, inputs.propose(fused).scores)


def test_what_does_not_fit_is_refused():
    head = make_head()
    fused, inputs = build(head, max_blocks=2), Inputs(head, 3, 5, torch.float32)
    with pytest.raises(ValueError, match=r"logits holds 3 blocks; this head was built for 1\.\.2"):
        fused.candidates(inputs.logits)
    with pytest.raises(ValueError, match="multiple of 5 rows"):
        fused.candidates(inputs.logits[:7])
    fused.candidates(inputs.logits[:10])
    arguments = inputs.slot_hidden[:2], inputs.anchor_hidden[:2], inputs.anchor_valid[:2]
    with pytest.raises(ValueError, match="either embedding .* or token_embeddings"):
        fused.propose(*arguments)
    with pytest.raises(ValueError, match="embedding has 900 rows, but candidates come from 1000 tokens"):
        fused.propose(*arguments, embedding=inputs.embedding[:900])
    with pytest.raises(ValueError, match="draft_logits and cached_ids go together"):
        fused.propose(*arguments, embedding=inputs.embedding, draft_logits=torch.zeros(2, 5, VOCAB, device=DEVICE))
    with pytest.raises(ValueError, match=r"num_slots must lie in 1\.\.5"):
        build(head, max_blocks=2, num_slots=6)
    with pytest.raises(ValueError, match="products must be 'library' or 'fused', got 'cublas'"):
        build(head, max_blocks=2, products="cublas")
    with pytest.raises(ValueError, match="not torch.float64"):
        build(head.double(), max_blocks=2)


@pytest.mark.skipif(MODE != "cuda", reason="capturing a CUDA graph needs a GPU")
@pytest.mark.parametrize("products", ["library", "fused"])
@pytest.mark.parametrize("rule", RULES)
def test_a_captured_graph_replays_with_changed_inputs(rule, products):
    reseed(9)
    head = make_head(torch.bfloat16)
    n, slots, states = 3, 5, 4
    fused, inputs = build(head, max_blocks=n, products=products), Inputs(head, n, slots, torch.bfloat16)
    rows = torch.tensor([2, -1, 0], device=DEVICE)
    options = dict(
        rule=rule, rows=rows, temperature=torch.rand(states, device=DEVICE), seeds=torch.arange(states, device=DEVICE),
        positions=torch.zeros(n, slots, dtype=torch.int64, device=DEVICE), tokens_out=torch.zeros(n, slots, dtype=torch.int64, device=DEVICE),
        draft_logits=torch.full((states, slots, VOCAB), -torch.inf, device=DEVICE),
        cached_ids=torch.zeros(states, slots, 4, dtype=torch.int64, device=DEVICE),
    )  # fmt: skip
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        inputs.propose(fused, **options)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = inputs.propose(fused, **options)
    for step in range(5):
        changed = Inputs(head, n, slots, torch.bfloat16)
        for name, value in vars(changed).items():
            getattr(inputs, name).copy_(value)
        options["positions"].random_()
        rows.copy_(torch.randperm(states, device=DEVICE)[:n])
        rows[step % n] = -1
        graph.replay()
        live = rows >= 0
        replayed = captured.tokens[live].clone(), captured.scores[live].clone(), options["draft_logits"].clone()
        options["draft_logits"].fill_(-torch.inf)
        options["cached_ids"].zero_()
        eager = inputs.propose(fused, **options)
        assert torch.equal(eager.tokens[live], replayed[0]) and torch.equal(eager.scores[live], replayed[1])
        assert torch.equal(options["draft_logits"][rows[live]], replayed[2][rows[live]])
