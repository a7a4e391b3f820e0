"""What drafts behind the runners, method by method, without an engine: the drafts are the readable head's own."""

from __future__ import annotations

import contextlib
import math
from types import SimpleNamespace
from typing import Any

import pairs
import pytest
import torch
from torch import Tensor

from vllm_lilicorr.config import DraftConfig
from vllm_lilicorr.model import BlockStates, TargetVocabulary
from vllm_lilicorr.model.backbone import GroupedConv
from vllm_lilicorr.model.heads import build_head
from vllm_lilicorr.near_tie import Comparison
from vllm_lilicorr.serving import sequential
from vllm_lilicorr.serving.conv import RowConv
from vllm_lilicorr.serving.head import DraftingHead, Step
from vllm_lilicorr.serving.methods import METHODS
from vllm_lilicorr.serving.sequential import draw_uniform

HIDDEN, VOCAB, BLOCKS, SLOTS = 48, 97, 5, 6
HEADS = [name for name in pairs.HEADS if name not in ("dflash", "lilicorr-conv")]
RULES = [(name, rule) for name in HEADS for rule in METHODS[type(pairs.HEADS[name][0])].path_rules]
SAMPLED = [name for name in HEADS if METHODS[type(pairs.HEADS[name][0])].sampled]
LATTICES = [name for name in HEADS if "exact" in METHODS[type(pairs.HEADS[name][0])].path_rules]


class Served:
    """The served model of one rank: a target's vocabulary and a random head."""

    tp_size, shard_size, head_dtype = 1, VOCAB, None
    config = SimpleNamespace(vocab_size=VOCAB)

    def __init__(self, name: str) -> None:
        head, conv = pairs.HEADS[name]
        self.draft = DraftConfig(
            hidden_size=HIDDEN, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
            intermediate_size=32, vocab_size=VOCAB, rms_norm_eps=1e-6, max_position_embeddings=64, rope_theta=1e4,
            attention_bias=False, block_size=8, num_target_layers=4, mask_token_id=96, target_layer_ids=(1,), head=head,
            conv=conv,
        )  # fmt: skip
        torch.manual_seed(0)
        self.head = build_head(self.draft).requires_grad_(False).eval()
        for parameter in self.head.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape))
        self.vocabulary = TargetVocabulary(torch.randn(VOCAB, HIDDEN), 0.4 * torch.randn(VOCAB, HIDDEN))
        self.block = BlockStates(
            torch.randn(BLOCKS, SLOTS, HIDDEN), torch.randn(BLOCKS, HIDDEN), torch.arange(BLOCKS) > 0,
            torch.randint(0, VOCAB, (BLOCKS,)),
        )  # fmt: skip

    def drafting(self, max_blocks: int = 8) -> DraftingHead:
        return METHODS[type(self.draft.head)].build(self, max_blocks)

    def shard_logits(self, hidden: Tensor) -> Tensor:
        return self.vocabulary.logits(hidden)

    full_logits = shard_logits

    def plain_embedding(self) -> Tensor:
        return self.vocabulary.embedding

    def embed_candidates(self, ids: Tensor) -> Tensor:
        return self.vocabulary.embed(ids)

    def reference(self, rule: str) -> Any:
        return self.head.propose(self.block, self.vocabulary, rule)


@pytest.fixture(params=["fused", "plain"])
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("LILICORR_PLAIN_HEAD", "1" if request.param == "plain" else "0")
    return request.param


@pytest.mark.parametrize(("name", "rule"), RULES)
def test_drafts_are_the_readable_heads(name: str, rule: str, layout: str) -> None:
    served = Served(name)
    expected, found = served.reference(rule), served.drafting().propose(served.block, rule)
    tally = Comparison()
    for block in range(BLOCKS):
        margins = [float(expected.margin[block])] * SLOTS
        tally.add(f"block {block}", expected.tokens[block].tolist(), found.tokens[block].tolist(), margins)
    tally.check()
    assert tally.compared > SLOTS * (BLOCKS - 2)


class FirstOfTwoRanks(Served):
    """Half a vocabulary, padded; what the second rank would send is computed where it is gathered."""

    tp_size, shard_start, shard_size = 2, 0, 50
    sent: torch.Size | None = None

    def shard_logits(self, hidden: Tensor) -> Tensor:
        self.hidden = hidden
        return torch.nn.functional.pad(self.vocabulary.logits(hidden)[:, :50], (0, 3), value=torch.inf)

    def gather_shards(self, packed: Tensor) -> Tensor:
        self.sent = packed.shape
        head, rest = self.drafting()._head(SLOTS, "argmax"), self.vocabulary.logits(self.hidden)[:, 50:].contiguous()
        return torch.stack((packed, head.shard_candidates(rest, vocab_start=50, vocab_size=VOCAB - 50)))

    def plain_embedding(self) -> None:  # type: ignore[override]
        return None


@pytest.mark.parametrize("name", LATTICES)
def test_ranks_send_their_candidates_alone_and_draft_what_one_rank_does(name: str, layout: str) -> None:
    whole, first = Served(name).drafting(), FirstOfTwoRanks(name)
    one, two = (drafting.propose(first.block, "greedy") for drafting in (whole, first.drafting()))
    assert torch.equal(one.ids, two.ids) and torch.equal(one.tokens, two.tokens)
    torch.testing.assert_close(one.log_probs, two.log_probs)
    if layout == "fused":
        assert first.sent == (BLOCKS * SLOTS, 2 * one.ids.shape[-1] + 2), "K ids, K logits and a log-partition in two numbers"


@pytest.mark.slow
def test_what_the_ranks_sent_lies_rank_by_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_lilicorr.serving import model

    ranks = torch.randn(3, 4, 5)
    monkeypatch.setattr(model, "tensor_model_parallel_all_gather", lambda packed, dim: torch.cat(tuple(ranks), dim))
    assert torch.equal(model.ServedDraft.gather_shards(ranks[0]), ranks)


@pytest.mark.parametrize("name", HEADS)
def test_a_correlating_head_drafts_otherwise_than_argmax(name: str) -> None:
    served = Served(name)
    drafting = served.drafting()
    greedy = drafting.propose(served.block, "greedy").tokens.clone()
    assert not torch.equal(greedy, drafting.propose(served.block, "argmax").tokens)


@pytest.mark.parametrize("name", SAMPLED)
def test_sampled_drafts_come_with_the_distribution_they_were_drawn_from(name: str, layout: str) -> None:
    served = Served(name)
    temperature = torch.tensor([0.0, 0.5, 1.0, 2.0, 0.0])
    torch.manual_seed(1)
    drafting = served.drafting()
    proposal = drafting.propose(served.block, "sampled", temperature=temperature, uniforms=torch.rand(BLOCKS, SLOTS))
    probs = drafting.dense(proposal)
    torch.testing.assert_close(probs.sum(-1), torch.ones(BLOCKS, SLOTS))
    taken = probs.gather(-1, proposal.tokens[..., None])[..., 0]
    assert bool((taken > 0).all())
    greedy = temperature == 0
    assert bool((taken[greedy] == 1).all())
    assert torch.equal(proposal.tokens[greedy], served.reference("greedy").tokens[greedy])
    # The first slot's distribution does not depend on what was drawn: the reference's, at the same temperature.
    expected = served.head.propose(served.block, served.vocabulary, "sampled", temperature, torch.Generator().manual_seed(0))
    dense = torch.zeros(BLOCKS, SLOTS, VOCAB).scatter_(-1, expected.candidate_ids, expected.probs)
    torch.testing.assert_close(probs[:, 0], dense[:, 0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", SAMPLED)
def test_a_second_step_leaves_nothing_of_the_first_in_the_distribution(name: str) -> None:
    served = Served(name)
    drafting, one = served.drafting(), torch.ones(BLOCKS)
    for seed in (0, 1):
        torch.manual_seed(seed)
        block = BlockStates(torch.randn(BLOCKS, SLOTS, HIDDEN), *(getattr(served.block, f) for f in FIELDS))
        probs = drafting.dense(drafting.propose(block, "sampled", temperature=one, uniforms=torch.rand(BLOCKS, SLOTS)))
        torch.testing.assert_close(probs.sum(-1), torch.ones(BLOCKS, SLOTS))


FIELDS = ("anchor_hidden", "anchor_valid", "anchor_ids")


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("rule", ["greedy", "argmax"])
def test_a_withheld_block_proposes_the_mask_token_alone(name: str, rule: str, layout: str) -> None:
    served = Served(name)
    withheld = torch.tensor([False, True, False, False, True])
    free = served.drafting().propose(served.block, rule).tokens.clone()
    tokens = served.drafting().propose(served.block, rule, Step(withheld=withheld, null_token=96)).tokens
    assert bool((tokens[withheld] == 96).all())
    assert torch.equal(tokens[~withheld], free[~withheld])


@pytest.mark.parametrize("name", SAMPLED)
def test_a_withheld_blocks_distribution_is_the_mask_tokens(name: str, layout: str) -> None:
    served, one = Served(name), torch.ones(BLOCKS)
    drafting = served.drafting()
    step = Step(withheld=torch.arange(BLOCKS) == 2, null_token=96)
    proposal = drafting.propose(served.block, "sampled", step, temperature=one, uniforms=torch.rand(BLOCKS, SLOTS))
    assert proposal.tokens[2].tolist() == [96] * SLOTS
    probs = drafting.dense(proposal)
    torch.testing.assert_close(probs[2], torch.eye(VOCAB)[96].expand(SLOTS, -1))
    torch.testing.assert_close(probs.sum(-1), torch.ones(BLOCKS, SLOTS))
    free = served.drafting()
    unheld = free.propose(served.block, "sampled", temperature=one, uniforms=torch.zeros(BLOCKS, SLOTS))
    torch.testing.assert_close(probs[[0, 1, 3, 4], 0], free.dense(unheld)[[0, 1, 3, 4], 0])


def test_what_a_withheld_block_is_drawn_from_is_the_mask_token_at_any_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    # On V2 these logits, before temperature, are what the verifier's table is filled with.
    seen: list[Tensor] = []
    monkeypatch.setattr(sequential, "sampler", lambda *_: lambda row, slot: (seen.append(row.clone()) or row.argmax(-1), None))
    served = Served("dspark")
    withheld = torch.tensor([False, True, False, False, True])
    for step in (Step(), Step(withheld=withheld, null_token=96)):
        tokens = served.drafting().propose(served.block, "sampled", step).tokens
    free, held = torch.stack(seen, 1).split(SLOTS, 1)
    torch.testing.assert_close((held[withheld] / 0.01).softmax(-1), torch.eye(VOCAB)[96].expand(2, SLOTS, -1))
    assert bool((tokens[withheld] == 96).all()) and torch.equal(held[~withheld], free[~withheld])


@pytest.mark.parametrize("name", LATTICES)
@pytest.mark.parametrize("by_state", [False, True])
def test_blocks_drafted_in_chunks_are_those_drafted_at_once(name: str, by_state: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    served, made = Served(name), []
    torch.manual_seed(2)
    rows = torch.randperm(8)[:BLOCKS] if by_state else None
    options = {"rows": rows, "temperature": torch.rand(8), "seeds": torch.arange(8) * 7}
    options["positions"] = torch.randint(99, (BLOCKS, SLOTS))
    for chunk in (32, 2):
        for module in ("model.fused", "serving.dflash2"):
            monkeypatch.setattr(f"vllm_lilicorr.{module}._CHUNK", chunk)
        table, out = torch.full((8, SLOTS, VOCAB), -torch.inf), torch.full((8, SLOTS), -7)
        drafting = served.drafting()
        found = drafting.propose(served.block, "sampled", draft_logits=table, tokens_out=out, **options)
        made.append((found.ids.clone(), found.tokens.clone(), found.scores.clone(), found.probs.clone(), table, out))
        held = drafting._heads[SLOTS]
        if name == "dflash2":
            assert len(held._anchors) == min(8, chunk) and len(held._vectors) == min(8, chunk) * SLOTS * held.topk
    for one, two in zip(*made, strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("name", LATTICES)
def test_a_further_draft_length_shares_the_weights_of_the_first(name: str, layout: str) -> None:
    served = Served(name)
    drafting = served.drafting()
    drafting.propose(served.block, "greedy")
    short = BlockStates(served.block.slot_hidden[:, :3], *(getattr(served.block, f) for f in FIELDS))
    tokens = drafting.propose(short, "greedy").tokens.clone()
    assert torch.equal(tokens, served.drafting().propose(short, "greedy").tokens)
    first, second = (drafting._heads[slots] for slots in (SLOTS, 3))
    if name == "lilicorr" and layout == "fused":
        assert second.layers is first.layers
    else:
        assert second.head is first.head


def test_a_cpu_server_projects_the_embedding_at_load_and_every_draft_length_gathers_from_it() -> None:
    served = Served("lilicorr")
    served.embed_candidates = None  # type: ignore[assignment]  # not asked for any more
    drafting = served.drafting()
    drafting.lay_out(SLOTS, "greedy")
    table = drafting._heads[SLOTS]._projected
    token_proj = served.head.token_proj
    torch.testing.assert_close(table, served.vocabulary.embedding @ token_proj.weight.t(), atol=1e-5, rtol=1e-5)
    drafting.lay_out(3, "greedy")
    assert drafting._heads[3]._projected is table
    served.vocabulary.embedding.fill_(torch.nan)  # not read any more
    assert bool(drafting.propose(served.block, "greedy").scores.isfinite().all())


def test_scores_do_not_depend_on_whether_the_embedding_is_projected(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served("lilicorr")
    at_load = served.drafting()
    projected = at_load.propose(served.block, "greedy")
    # Sharded, quantised: the candidates' rows are looked up by the target's own layer.
    monkeypatch.setattr(served, "plain_embedding", lambda: None)
    drafting = served.drafting()
    looked_up = drafting.propose(served.block, "greedy")
    assert at_load._heads[SLOTS]._projected is not None and drafting._heads[SLOTS]._projected is None
    torch.testing.assert_close(projected.scores, looked_up.scores, atol=1e-5, rtol=1e-5)
    assert torch.equal(projected.tokens, looked_up.tokens)


def test_nothing_is_projected_for_argmax_which_scores_nothing() -> None:
    served = Served("lilicorr")
    drafting = served.drafting()
    drafting.lay_out(SLOTS, "argmax")
    assert drafting._heads[SLOTS]._projected is None
    assert torch.equal(drafting.propose(served.block, "argmax").tokens, served.reference("argmax").tokens)
    assert drafting._heads[SLOTS]._projected is None


@pytest.mark.slow
def test_on_a_cpu_the_v1_proposer_lays_its_head_out_before_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_lilicorr.serving import v1

    monkeypatch.setattr(v1.DFlashProposer, "load_model", lambda *_: None)
    monkeypatch.setattr(v1, "repair_cpu_sampling", lambda: None)
    served, proposer = Served("lilicorr"), object.__new__(v1.DraftProposer)
    shared = SimpleNamespace(embed_tokens=None)  # the layer that vLLM shares with the target
    vars(served).update(
        model=shared, check_vocabulary=lambda target: None, lay_out_products=lambda: None, set_block_width=lambda width: None
    )
    vars(proposer).update(
        device=torch.device("cpu"), model=served, max_batch_size=8, num_speculative_tokens=SLOTS, runner=None, _width=0,
        rule="greedy",
    )
    proposer.load_model(torch.nn.Module())
    assert proposer.drafting._heads[SLOTS]._projected is not None


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["greedy", "argmax"])
@pytest.mark.parametrize("name", LATTICES)
def test_a_block_ends_where_its_next_draft_is_less_likely_than_the_threshold(name: str, rule: str) -> None:
    from vllm_lilicorr.serving import v1

    served, proposer = Served(name), object.__new__(v1.DraftProposer)
    proposal = served.drafting().propose(served.block, rule)
    vars(proposer).update(num_speculative_tokens=SLOTS, threshold=0.1, _proposal=proposal, _fits=None)
    expected = []
    for scores, log_probs in zip(proposal.scores.tolist(), proposal.log_probs.tolist(), strict=True):
        likely, length = 1.0, 0
        for z, candidates in zip(scores, log_probs, strict=True):
            likely *= max(math.exp(one) for one in z) / sum(math.exp(one) for one in z) * sum(math.exp(one) for one in candidates)
            if length and likely < 0.1:
                break
            length += 1
        expected.append(length)
    assert proposer._lengths(BLOCKS) == expected
    assert 1 <= min(expected) < SLOTS and len(set(expected)) > 1, expected
    proposer._fits = torch.arange(BLOCKS) != 2
    assert proposer._lengths(BLOCKS) == [0 if i == 2 else length for i, length in enumerate(expected)]
    proposer.threshold = 0.0
    assert proposer._lengths(BLOCKS) == [0 if i == 2 else SLOTS for i in range(BLOCKS)]
    proposer._fits = None
    assert proposer._lengths(BLOCKS) is None


@pytest.mark.slow
def test_only_a_plain_embedding_of_one_rank_is_gathered_from_here() -> None:
    from vllm.model_executor.layers import vocab_parallel_embedding as layers

    from vllm_lilicorr.serving.model import ServedDraft

    class Embedding(layers.VocabParallelEmbedding):
        def __init__(self, method: Any) -> None:
            torch.nn.Module.__init__(self)
            self.quant_method, self.weight = method, torch.nn.Parameter(torch.zeros(VOCAB, HIDDEN), requires_grad=False)

    def found(embedding: Any, ranks: int = 1) -> Tensor | None:
        served = SimpleNamespace(model=SimpleNamespace(embed_tokens=embedding), tp_size=ranks)
        return ServedDraft.plain_embedding(served)  # type: ignore[arg-type]

    plain = Embedding(layers.UnquantizedEmbeddingMethod())
    assert found(plain) is plain.weight
    assert found(plain, ranks=2) is None
    assert found(Embedding(object())) is None  # quantised, whatever its weight looks like
    assert found(SimpleNamespace(base_layer=plain, weight=plain.weight)) is None  # an adapter around it


@pytest.mark.slow
def test_candidates_are_taken_in_the_precision_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    from vllm_lilicorr.errors import UserError
    from vllm_lilicorr.serving import model

    weight, hidden = torch.randn(VOCAB, HIDDEN), torch.randn(3, HIDDEN)

    def logits(asked: str, weight: Tensor = weight) -> Tensor:
        served = SimpleNamespace(
            _draft_dtype=asked, _narrow_head=None,
            lm_head=SimpleNamespace(weight=weight, quant_method=UnquantizedEmbeddingMethod()),
            candidate_logits=lambda head, x, skip_gather: x @ head.weight.t(),
        )  # fmt: skip
        model.ServedDraft.lay_out_products(served)  # type: ignore[arg-type]
        narrow = asked == "int8" or asked == "bfloat16" and weight.dtype == torch.float32
        assert model.ServedDraft.head_dtype.fget(served) == (torch.bfloat16 if narrow else None)  # type: ignore[attr-defined]
        return model.ServedDraft.shard_logits(served, hidden.to(weight.dtype))  # type: ignore[arg-type]

    exact, narrow = logits("auto"), logits("bfloat16")
    assert torch.equal(exact, hidden @ weight.t())
    assert narrow.dtype == torch.bfloat16 and not torch.equal(narrow.float(), exact)
    rounded = hidden.bfloat16().float() @ weight.bfloat16().float().t()
    torch.testing.assert_close(narrow.float(), rounded, atol=1e-2, rtol=1e-2)
    # A target in bfloat16 has them anyway, and nothing is copied.
    assert torch.equal(logits("bfloat16", weight.bfloat16()), hidden.bfloat16() @ weight.bfloat16().t())
    # int8: what is rounded is each row of the weight and each row of hidden, to 127 steps of its largest value.
    for narrower in (logits("int8"), logits("int8", weight.bfloat16())):
        assert narrower.dtype == torch.bfloat16 and not torch.equal(narrower, narrow)
        error = (narrower.float() - exact).abs()
        assert error.mean() < 0.02 * exact.std() and error.max() < 0.1 * exact.std()
    layer = SimpleNamespace(quant_method=object())  # which may have no `weight`
    quantised = SimpleNamespace(_draft_dtype="bfloat16", lm_head=layer)
    with pytest.raises(UserError, match="quantised"):
        model.ServedDraft.lay_out_products(quantised)  # type: ignore[arg-type]
    monkeypatch.setattr(torch.ops, "_C", SimpleNamespace())  # as a build without oneDNN has it
    with pytest.raises(UserError, match="oneDNN .* set bfloat16"):
        model.Int8Linear(weight)


@pytest.mark.slow
def test_a_narrow_layer_multiplies_in_bfloat16_and_hands_on_what_it_was_given() -> None:
    from vllm_lilicorr.serving.model import NarrowLinear

    weight, bias, x = torch.randn(24, HIDDEN), torch.randn(24), torch.randn(2, 3, HIDDEN)
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    method = NarrowLinear()
    method.process_weights_after_loading(layer)
    assert layer.weight.numel() == 0, "the float32 weight is kept beside the copy"
    expected = x.bfloat16().float() @ weight.bfloat16().float().t()
    for given in (None, bias):
        y = method.apply(layer, x, given)
        assert y.dtype == torch.float32
        torch.testing.assert_close(y, expected + (0 if given is None else bias), atol=5e-2, rtol=1e-2)
    assert not torch.equal(method.apply(layer, x), x @ weight.t())


def test_the_embedding_is_left_as_it_is_where_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served("lilicorr")
    drafting = served.drafting()
    head = drafting.fused(served.head, max_blocks=8, num_slots=SLOTS)
    head.kernels = True  # as on a GPU
    monkeypatch.setattr(drafting, "fused", lambda *args, **options: head)
    drafting.lay_out(SLOTS, "greedy")
    assert drafting._heads[SLOTS] is head and head._projected is None


@pytest.mark.parametrize("name", HEADS)
def test_padded_blocks_write_no_tokens(name: str, layout: str) -> None:
    served = Served(name)
    out = torch.full((8, SLOTS), -7)
    rows = torch.tensor([3, -1, 0, 5, -1])
    tokens = served.drafting().propose(served.block, "greedy", rows=rows, tokens_out=out).tokens
    live = rows >= 0
    assert torch.equal(out[:BLOCKS][live], tokens[live])
    assert bool((out[:BLOCKS][~live] == -7).all()) and bool((out[BLOCKS:] == -7).all())


@pytest.mark.parametrize("name", LATTICES)
def test_the_verifiers_table_holds_the_scores_of_the_candidates_and_nothing_else(name: str, layout: str) -> None:
    served = Served(name)
    table = torch.full((8, SLOTS, VOCAB), -torch.inf)
    rows, temperature = torch.tensor([3, -1, 0, 5, 1]), torch.ones(8)
    drafting = served.drafting()
    withheld = torch.arange(BLOCKS) == 3
    step = Step(withheld=withheld, null_token=96)
    for seed in (0, 1):
        options = {"seeds": torch.arange(8) + seed, "positions": torch.arange(SLOTS).expand(BLOCKS, -1)}
        proposal = drafting.propose(
            served.block, "sampled", step, rows=rows, temperature=temperature, draft_logits=table, tokens_out=None, **options
        )
    live = (rows >= 0) & ~withheld
    expected = torch.full((BLOCKS, SLOTS, VOCAB), -torch.inf).scatter_(-1, proposal.ids, proposal.scores)
    assert torch.equal(table[rows[live]], expected[live])
    assert bool((table[[2, 4, 6, 7]] == -torch.inf).all())
    torch.testing.assert_close(table[5].softmax(-1), torch.eye(VOCAB)[96].expand(SLOTS, -1))


@pytest.mark.parametrize("name", HEADS)
def test_the_scores_that_decided_are_shown_to_the_observer(name: str, layout: str) -> None:
    served = Served(name)
    seen: dict[int | None, Tensor] = {}
    step = Step(observe=lambda scores, slot: seen.update({slot: scores.clone()}))
    proposal = served.drafting().propose(served.block, "greedy", step)
    if None in seen:
        assert torch.equal(seen[None].unflatten(0, (BLOCKS, SLOTS)).argmax(-1), proposal.index)
    else:
        assert torch.equal(torch.stack([seen[slot] for slot in range(SLOTS)], 1).argmax(-1), proposal.tokens)


@pytest.mark.parametrize("name", HEADS)
def test_an_index_out_of_range_is_an_error_when_debugging(name: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(name)
    top = int(served.drafting().propose(served.block, "greedy").ids.max())
    for debugging, size, wrong in (("1", top + 1, False), ("1", top, True), ("0", top, False)):
        monkeypatch.setenv("LILICORR_DEBUG", debugging)
        monkeypatch.setattr(served, "config", SimpleNamespace(vocab_size=size))
        with pytest.raises(IndexError, match=f"expected 0..{size - 1}") if wrong else contextlib.nullcontext():
            served.drafting().propose(served.block, "greedy")


def test_dsparks_confidence_is_written_where_it_is_asked_for() -> None:
    served = Served("dspark")
    out = torch.full((8, SLOTS), -1.0)
    drafting = served.drafting()
    assert drafting.has_confidence
    tokens = drafting.propose(served.block, "greedy", Step(confidence_out=out)).tokens
    previous = torch.cat((served.block.anchor_ids[:, None], tokens[:, :-1]), 1)
    torch.testing.assert_close(out[:BLOCKS], served.head.confidence(served.block.slot_hidden, previous))
    assert bool((out[BLOCKS:] == -1).all())


def test_a_draw_falls_where_the_cumulative_distribution_passes_it() -> None:
    probs = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    logits = probs.log().expand(1000, -1)
    uniforms = (torch.arange(1000) + 0.5) / 1000
    tokens, found = draw_uniform(logits, torch.ones(1000), uniforms)
    torch.testing.assert_close(found[0], probs)
    assert torch.bincount(tokens, minlength=6).tolist() == [0, 250, 0, 500, 250, 0]
    lowest, _ = draw_uniform(logits[:1], torch.ones(1), torch.zeros(1))
    highest, _ = draw_uniform(logits[:1], torch.ones(1), torch.tensor([1 - 2**-24]))
    assert (lowest.item(), highest.item()) == (1, 4)


@pytest.mark.parametrize(("width", "taps"), [(8, 2), (7, 3), (1, 2)])
@pytest.mark.parametrize("padding", [0, 1, 3])
def test_a_convolution_over_rows_is_the_one_over_blocks(width: int, taps: int, padding: int) -> None:
    torch.manual_seed(0)
    conv = RowConv(HIDDEN, pairs.ConvConfig(taps, 16)).requires_grad_(False)
    for parameter in conv.parameters():
        parameter.copy_(torch.randn(parameter.shape))
    x = torch.randn(BLOCKS * width + padding, HIDDEN)
    x[BLOCKS * width :] = torch.nan
    before, behind = conv.coefficients(x).unbind(-3)
    rows = conv.convolve_rows(x, before, torch.tensor(width))[: BLOCKS * width]
    blocks = x[: BLOCKS * width].unflatten(0, (1, BLOCKS, width))
    expected = GroupedConv.convolve(conv, blocks, before[: BLOCKS * width].unflatten(0, (1, BLOCKS, width)))
    assert torch.equal(rows, expected.flatten(0, 2))
