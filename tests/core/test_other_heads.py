"""DFlash2, DSpark, Domino and the convolution: their sizes, their formulas, and vLLM's own modules."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from vllm_lilicorr.config import ConvConfig, DFlash2Config, DominoConfig, DSparkConfig
from vllm_lilicorr.model import BlockStates, Draft, TargetVocabulary
from vllm_lilicorr.model.backbone import GroupedConv

from .conftest import make_config, make_draft

N, HIDDEN, VOCAB = 3, 48, 97


def block(slots, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    states = BlockStates(
        randn(N, slots, HIDDEN),
        randn(N, HIDDEN),
        torch.ones(N, dtype=torch.bool),
        torch.randint(VOCAB, (N,), generator=generator),
    )
    return states, TargetVocabulary(randn(VOCAB, HIDDEN), randn(VOCAB, HIDDEN))


QWEN3_8B = dict(
    hidden_size=4096,
    num_hidden_layers=5,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=12288,
    vocab_size=151936,
    num_target_layers=36,
    mask_token_id=151669,
    target_layer_ids=(1, 9, 17, 25, 33),
)


@pytest.mark.parametrize(
    ("head", "block_size", "parameters"),
    [
        (DFlash2Config(rank=256, top_k=16), 16, 78_839_808),
        (DSparkConfig(markov_rank=256, enable_confidence_head=True, confidence_head_with_markov=True), 15, 77_795_585),
        (DominoConfig(gru_hidden_dim=1024, emb_dim=256, pure_draft_prefix_len=1), 15, 55_934_976),
    ],
)
def test_parameter_counts_are_those_of_the_docstrings(head, block_size, parameters):
    with torch.device("meta"):
        draft = Draft(make_config(head, block_size=block_size, **QWEN3_8B))
    assert sum(p.numel() for p in draft.head.parameters()) == parameters
    assert f"{parameters:,}" in type(draft.head).__doc__
    assert draft.config.num_slots == 15


def test_convolution_parameter_count_is_that_of_the_docstring():
    with torch.device("meta"):
        conv = GroupedConv(4096, ConvConfig(2, 16))
    assert f"{sum(p.numel() for p in conv.parameters()):,}" in GroupedConv.__doc__


# --- the convolution -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("taps", [1, 2, 3])
def test_convolution_equals_its_formula_position_by_position(taps):
    conv = GroupedConv(HIDDEN, ConvConfig(taps, 16)).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in conv.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float64))
    normed, x = (torch.randn(1, 2, 5, HIDDEN, generator=generator, dtype=torch.float64) for _ in range(2))
    for side in (0, 1):
        y = conv.convolve(x, conv.coefficients(normed)[..., side, :, :])
        for m in range(2):
            for t in range(5):
                delta = (conv.kernel_projection.weight @ normed[0, m, t]).view(2, taps, HIDDEN // 16)[side]
                expected = torch.zeros(HIDDEN, dtype=torch.float64)
                for tap in range(taps):
                    if t >= tap:
                        for c in range(HIDDEN):
                            weight = conv.base_kernel[side, tap, c] + delta[tap, c // 16]
                            expected[c] += weight * x[0, m, t - tap, c]
                torch.testing.assert_close(y[0, m, t], expected)


@pytest.mark.parametrize("head", ["lilicorr", "dflash"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fresh_convolution_changes_nothing_bit_for_bit(head, dtype):
    plain = make_draft(make_config(head)).to(dtype)
    convolved = Draft(make_config(head, conv=ConvConfig(2, 16))).to(dtype)
    missing, unexpected = convolved.load_state_dict(plain.state_dict(), strict=False)
    assert not unexpected and all("_conv." in name for name in missing)
    generator = torch.Generator().manual_seed(0)
    positions = torch.arange(9)[None]
    taps = torch.randn(1, 9, 2 * HIDDEN, generator=generator).to(dtype)
    table = torch.randn(VOCAB, HIDDEN, generator=generator).to(dtype)
    anchors, ids = torch.tensor([[4, 9]]), torch.tensor([[5, 7]])
    hidden = []
    for draft in (plain, convolved):
        context = draft.backbone.context_kv(draft.backbone.context_features(taps), positions)
        visible = positions[:, None] < anchors[..., None]
        hidden.append(draft.slot_hidden(ids, anchors, context, visible, TargetVocabulary(table, table)))
    assert torch.equal(*hidden)


def test_convolution_does_not_reach_from_one_block_into_the_next():
    draft = make_draft(make_config("dflash2")).double()
    generator = torch.Generator().manual_seed(0)
    embeddings = torch.randn(1, 2, 6, HIDDEN, generator=generator, dtype=torch.float64)
    positions = torch.arange(6).expand(1, 2, -1)
    context = draft.backbone.context_kv(torch.zeros(1, 1, HIDDEN, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.long))
    visible = torch.ones(1, 1, 1, dtype=torch.bool)
    before = draft.backbone(embeddings, positions, context, visible)
    embeddings[0, 0] += 1.0
    after = draft.backbone(embeddings, positions, context, visible)
    assert torch.equal(before[0, 1], after[0, 1]) and not torch.equal(before[0, 0], after[0, 0])


# --- DFlash2 ---------------------------------------------------------------------------------------------------------


def test_dflash2_scores_equal_their_formula_pair_by_pair():
    config = make_config("dflash2")
    head = make_draft(config).head.double().requires_grad_(False)
    states, target = block(config.num_slots)
    proposal = head.propose(states, target, "greedy")
    logits = target.logits(states.slot_hidden)
    for n in range(N):
        previous = int(states.anchor_ids[n])
        for s in range(config.num_slots):
            gate = head.hidden_projection.weight @ states.slot_hidden[n, s]
            top = logits[n, s].topk(4).indices.tolist()
            assert proposal.candidate_ids[n, s].tolist() == top
            scores = [
                logits[n, s, c] + (head.predecessor_codebook[previous] * gate) @ head.successor_codebook[c] for c in top
            ]
            previous = top[int(torch.stack(scores).argmax())]
            assert int(proposal.tokens[n, s]) == previous


def test_dflash2_proposals_are_the_distribution_drawn_from():
    config = make_config("dflash2")
    head = make_draft(config).head.double().requires_grad_(False)
    states, target = block(config.num_slots)
    proposal = head.propose(states, target, "sampled", 1.3, torch.Generator().manual_seed(0))
    start, pair = head(proposal.candidate_ids, proposal.log_probs, states.slot_hidden, states.anchor_ids)
    torch.testing.assert_close(proposal.probs[:, 0], (start / 1.3).softmax(-1))
    chosen = (proposal.candidate_ids == proposal.tokens[..., None]).long().argmax(-1)
    for s in range(1, config.num_slots):
        rows = pair[torch.arange(N), s - 1, chosen[:, s - 1]]
        torch.testing.assert_close(proposal.probs[:, s], (rows / 1.3).softmax(-1))


# --- DSpark and Domino -----------------------------------------------------------------------------------------------


def test_dspark_adds_the_markov_bias_of_the_token_before():
    config = make_config("dspark")
    head = make_draft(config).head.double().requires_grad_(False)
    states, target = block(config.num_slots)
    proposal = head.propose(states, target, "greedy")
    assert proposal.tokens.shape == (N, 6)
    w1, w2 = head.markov_head.markov_w1.weight, head.markov_head.markov_w2.weight
    for n in range(N):
        previous = int(states.anchor_ids[n])
        for s in range(6):
            previous = int((target.lm_head @ states.slot_hidden[n, s] + w2 @ w1[previous]).argmax())
            assert int(proposal.tokens[n, s]) == previous


def test_dspark_proposals_are_the_distribution_drawn_from():
    config = make_config("dspark")
    head = make_draft(config).head.double().requires_grad_(False)
    states, target = block(config.num_slots)
    temperature = torch.tensor([0.0, 0.7, 2.0], dtype=torch.float64)
    proposal = head.propose(states, target, "sampled", temperature, torch.Generator().manual_seed(0))
    greedy = head.propose(states, target, "greedy")
    assert torch.equal(proposal.tokens[0], greedy.tokens[0])
    previous = torch.cat([states.anchor_ids[:, None], proposal.tokens[:, :-1]], dim=1)
    logits = target.logits(states.slot_hidden) + head.bias(previous)
    for n in (1, 2):
        torch.testing.assert_close(proposal.probs[n], (logits[n] / temperature[n]).softmax(-1))
    assert bool((proposal.probs[0].max(-1).values == 1).all())


def test_dspark_confidence_sees_state_and_markov_embedding():
    for with_markov in (True, False):
        head_config = DSparkConfig(markov_rank=12, enable_confidence_head=True, confidence_head_with_markov=with_markov)
        head = make_draft(make_config(head_config)).head.double().requires_grad_(False)
        states, _ = block(6)
        previous = torch.randint(VOCAB, (N, 6))
        found = head.confidence(states.slot_hidden, previous)
        x = states.slot_hidden[1, 2]
        if with_markov:
            x = torch.cat([x, head.markov_head.markov_w1.weight[previous[1, 2]]])
        layer = head.confidence_head.proj
        torch.testing.assert_close(found[1, 2], (layer.weight[0] @ x + layer.bias[0]).sigmoid())


def test_domino_corrects_all_but_the_first_slots_from_the_tokens_committed():
    config = make_config("domino")
    head = make_draft(config).head.double().requires_grad_(False)
    states, target = block(config.num_slots)
    proposal = head.propose(states, target, "greedy")
    w_ih, w_hh = head.prefix_gru.weight_ih_l0, head.prefix_gru.weight_hh_l0
    down, up = head.embed_proj[0].weight, head.embed_proj[2].weight
    for n in range(N):
        g = torch.zeros(20, dtype=torch.float64)
        previous = int(states.anchor_ids[n])
        for s in range(6):
            x = (w_ih @ target.embedding[previous]).chunk(3)
            h = (w_hh @ g).chunk(3)
            reset, update = (x[0] + h[0]).sigmoid(), (x[1] + h[1]).sigmoid()
            g = (1 - update) * (x[2] + reset * h[2]).tanh() + update * g
            logits = target.lm_head @ states.slot_hidden[n, s]
            if s >= 1:
                hidden = down @ torch.cat([states.slot_hidden[n, s], g])
                logits = logits + up @ (hidden * hidden.sigmoid())
            previous = int(logits.argmax())
            assert int(proposal.tokens[n, s]) == previous


def test_teacher_forced_states_are_those_of_drafting():
    """What training computes in one pass is what drafting computes token by token."""
    config = make_config("domino")
    head = make_draft(config).head.double().requires_grad_(False)
    states, target = block(config.num_slots)
    proposal = head.propose(states, target, "greedy")
    tokens = torch.cat([states.anchor_ids[:, None], proposal.tokens[:, :-1]], dim=1)
    logits = target.logits(states.slot_hidden)
    logits[:, 1:] += head.corrections(states.slot_hidden, head.states(target.embed(tokens)))[:, 1:]
    assert torch.equal(logits.argmax(-1), proposal.tokens)


# --- vLLM's own modules ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vllm():
    pytest.importorskip("vllm", reason="vLLM is not installed, so its modules cannot be compared with")
    from .stock import vllm_parallel_state

    with vllm_parallel_state() as vllm_config:
        yield vllm_config


def load_into(stock, ours):
    from vllm.model_executor.layers.linear import LinearBase

    state = ours.state_dict()
    parameters = dict(stock.named_parameters())
    assert parameters.keys() == state.keys(), "the tensors' names differ from vLLM's"
    with torch.no_grad():
        for name, parameter in parameters.items():
            assert parameter.shape == state[name].shape
            parameter.copy_(state[name])
    for module in stock.modules():
        if isinstance(module, LinearBase):
            module.quant_method.process_weights_after_loading(module)
    return stock


@pytest.mark.slow
def test_dflash2_selector_equals_vllms(vllm):
    from vllm.model_executor.models.qwen3_dflash2 import CandidateSelector

    config = make_config("dflash2")
    ours = make_draft(config).head.float().requires_grad_(False)
    head = config.head
    sizes = dict(hidden_size=HIDDEN, vocab_size=VOCAB, rank=head.rank, top_k=head.top_k)
    stock = CandidateSelector(**sizes, params_dtype=torch.float32, prefix="selector")
    load_into(stock, ours)
    states, target = block(config.num_slots)
    ids = target.logits(states.slot_hidden).topk(head.top_k).indices
    unary, hidden = torch.randn(ids.shape), states.slot_hidden.float()
    start, pair = ours(ids, unary, hidden, states.anchor_ids)
    theirs = stock(ids, unary, hidden, states.anchor_ids)
    assert float((theirs[:, 0, 0] - start).abs().max()) <= 1e-5
    assert float((theirs[:, 1:] - pair).abs().max()) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("positions", [6, 4])
def test_convolution_equals_vllms(vllm, positions):
    from vllm.model_executor.models.qwen3_dflash2 import DFlashGroupedConv

    ours = make_draft(make_config("dflash2")).backbone.layers[0].attention_conv.float().requires_grad_(False)
    stock = load_into(DFlashGroupedConv(HIDDEN, 2, 16, positions, torch.float32, "conv"), ours)
    normed, x = torch.randn(1, 3, positions, HIDDEN), torch.randn(1, 3, positions, HIDDEN)
    before, behind = ours.coefficients(normed).unbind(-3)
    prepared, coefficients = stock.prepare(normed.view(-1, HIDDEN))
    finished = stock.finish(x.view(-1, HIDDEN), coefficients)
    assert float((prepared.view_as(x) - ours.convolve(normed, before)).abs().max()) <= 1e-5
    assert float((finished.view_as(x) - ours.convolve(x, behind)).abs().max()) <= 1e-5


@pytest.mark.slow
def test_dspark_heads_equal_vllms(vllm):
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.models.qwen3_dspark import DSparkConfidenceHead, DSparkMarkovHead

    config = make_config("dspark")
    ours = make_draft(config).head.float().requires_grad_(False)
    markov = DSparkMarkovHead(VOCAB, VOCAB, 12, "markov_head")
    confidence = DSparkConfidenceHead(HIDDEN + 12, "confidence_head", bias=True)
    with torch.no_grad():
        # vLLM pads the vocabulary's rows.
        markov.markov_w1.weight.copy_(ours.markov_head.markov_w1.weight)
        markov.markov_w2.weight[:VOCAB].copy_(ours.markov_head.markov_w2.weight)
        confidence.proj.weight.copy_(ours.confidence_head.proj.weight)
        confidence.proj.bias.copy_(ours.confidence_head.proj.bias)
    for module in (markov.markov_w2, confidence.proj):
        module.quant_method.process_weights_after_loading(module)
    tokens = torch.randint(VOCAB, (7,))
    embedded = markov.embed(tokens)
    theirs = markov.bias(embedded, LogitsProcessor(VOCAB))
    assert float((theirs - ours.bias(tokens)).abs().max()) <= 1e-5
    hidden = torch.randn(7, HIDDEN)
    mine = ours.confidence(hidden[:, None], tokens[:, None])[:, 0]
    assert float((confidence(hidden, embedded).sigmoid() - mine).abs().max()) <= 1e-5


@pytest.mark.parametrize(
    ("head", "changes", "expected"),
    [
        ("dflash2", {"dflash_config__conv_kernel_size": None, "dflash_config__conv_group_size": None}, "has a convolution"),
        ("dflash2", {"dflash_config__selector_top_k": 5}, "power of two"),
        ("dflash2", {"dflash_config__selector_rank": None}, "selector_rank is missing"),
        ("dflash2", {"dflash_config__selector_topk": 4}, "did you mean 'selector_top_k'"),
        ("dspark", {"markov_rank": None}, "markov_rank is missing"),
        ("dspark", {"markov_head_type": "gated"}, 'needs "vanilla"'),
        ("dspark", {"sample_from_anchor": False}, "needs true"),
        ("dspark", {"enable_confidence_head": 1}, "must be true or false"),
        ("domino", {"dflash_config__emb_dim": 0}, "must be positive"),
        ("domino", {"dflash_config__shift_label": False}, "needs true"),
        ("domino", {"dflash_config__projector_type": "lilicorr"}, "silently ignore"),
    ],
)
def test_their_configurations_are_checked_too(head, changes, expected):
    from .test_config import refusal

    assert expected in refusal(make_config(head).to_dict(), **changes)


def test_lilicorr_takes_a_convolution_too():
    config = make_config("lilicorr", conv=ConvConfig(2, 16))
    assert type(config).from_dict(config.to_dict()) == config
    assert replace(config, conv=None) == make_config("lilicorr")
