"""The whole objective of one micro-step against explicit loops, and what must not leak."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from vllm_lilicorr.config import (
    ConvConfig,
    DFlash2Config,
    DFlashConfig,
    DominoConfig,
    DraftConfig,
    DSparkConfig,
    LiLiCorrConfig,
)
from vllm_lilicorr.model import Draft, TargetVocabulary
from vllm_lilicorr.model.backbone import block_attention
from vllm_lilicorr.model.lattice import top_candidates
from vllm_lilicorr.trainer.attention import BlockAttention
from vllm_lilicorr.trainer.corpus import Conversation
from vllm_lilicorr.trainer.data import collate, draw_anchors
from vllm_lilicorr.trainer.objectives import OBJECTIVES, ObjectiveConfig
from vllm_lilicorr.trainer.vocabulary import SampledVocabulary

H, V, B, K = 24, 61, 4, 4


def draft_config(head):
    return DraftConfig(
        hidden_size=H, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=12, intermediate_size=16,
        vocab_size=V, rms_norm_eps=1e-6, max_position_embeddings=128, rope_theta=1e4, attention_bias=False, block_size=B,
        num_target_layers=6, mask_token_id=60, target_layer_ids=(1, 3), head=head,
        conv=ConvConfig(2, 8) if head.needs_conv else None,
    )  # fmt: skip


HEADS = {
    "lilicorr": LiLiCorrConfig(
        candidate_topk=K, hidden_size=16, num_layers=1, num_heads=2, mlp_ratio=2.0, factor_dim=8, vector_eps=1e-4, logit_scale=8.0
    ),
    "dflash": DFlashConfig(),
    "dflash2": DFlash2Config(rank=6, top_k=K),
    "dspark": DSparkConfig(markov_rank=6, enable_confidence_head=True, confidence_head_with_markov=True),
    "domino": DominoConfig(gru_hidden_dim=10, emb_dim=6, pure_draft_prefix_len=1),
}


def problem(head="lilicorr", dtype=torch.float64, seed=0, **options):
    torch.manual_seed(seed)
    draft = Draft(draft_config(HEADS[head]))
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            parameter.copy_((1.0 if name.endswith("norm.weight") else 0.0) + 0.3 * torch.randn(parameter.shape))
    # A head aligned with the embedding, so that some labels are among the candidates.
    embedding = torch.randn(V, H)
    target = TargetVocabulary(embedding.to(dtype), (embedding + 0.1 * torch.randn(V, H)).to(dtype))
    objective = OBJECTIVES[head](draft.to(dtype), ObjectiveConfig(**options), target, steps=10)
    rng = np.random.default_rng(seed)
    conversations, anchors, states = [], [], []
    for row, (length, spans) in enumerate((((14, ((5, 14),))), (20, ((3, 6), (9, 20))), (9, ((6, 8),)))):
        # Few distinct tokens: coverage is then neither all nor nothing.
        conversation = Conversation((row, 0), rng.integers(0, 12, length).astype(np.int32), spans)
        conversations.append(conversation)
        anchors.append(draw_anchors(seed, 0, conversation, length, 6))
        states.append((torch.randn(length, 2 * H).to(dtype), torch.randn(length, H).to(dtype)))
    return objective, conversations, anchors, states


@dataclass
class Block:
    """One block drafted on its own context: hidden, logits of its slots; labels, of supervised ones; before: the ground
    truth's token before each slot, the anchor's first; q: the target's distributions; feature: that of the anchor row."""

    hidden: torch.Tensor
    logits: torch.Tensor
    labels: list[int]
    before: list[int]
    q: torch.Tensor
    feature: torch.Tensor


def drafted_one_by_one(objective, conversations, anchors, states):
    draft, target, config = objective.draft, objective.target, objective.draft.config
    for conversation, drawn, (taps, final) in zip(conversations, anchors, states):
        ids = torch.from_numpy(conversation.ids.astype(np.int64))
        for anchor, end in zip(drawn.positions.tolist(), drawn.ends.tolist()):
            features = draft.backbone.context_features(taps[None, :anchor])
            kv = draft.backbone.context_kv(features, torch.arange(anchor)[None])
            block = torch.full((1, 1, B), 60)
            block[..., 0] = ids[anchor]
            hidden = draft.backbone(
                target.embed(block), (anchor + torch.arange(B))[None, None], kv, torch.ones(1, 1, anchor, dtype=torch.bool)
            )[0, 0, config.first_slot :]
            slots = len(hidden)
            labels = [int(ids[anchor + 1 + s]) for s in range(slots) if anchor + 1 + s < end]
            before = [int(ids[anchor + s]) for s in range(len(labels))]
            q = (final[anchor : anchor + len(labels)] @ target.lm_head.t()).softmax(-1)
            yield Block(hidden, hidden @ target.lm_head.t(), labels, before, q, features[:, -1])


def weighted_mean(blocks, beta, loss):
    """Return the mean of loss(block, slot) over supervised slots with weights exp(-s / beta)."""
    numerator = total = 0.0
    for block in blocks:
        for s in range(len(block.labels)):
            numerator = numerator + math.exp(-s / beta) * loss(block, s)
            total += math.exp(-s / beta)
    return numerator / total


def slow_dflash(objective, blocks):
    return weighted_mean(blocks, objective.config.beta, lambda b, s: -b.logits[s].log_softmax(-1)[b.labels[s]])


def slow_lilicorr(objective, blocks):
    config, target, draft = objective.config, objective.target, objective.draft
    ce = dist = slots = 0
    for block in blocks:
        if len(block.labels) < len(block.hidden):
            continue
        candidates, log_probs = top_candidates(block.logits[None], K)
        start, pair = draft.head(
            target.embed(candidates), log_probs, block.hidden[None], block.feature, torch.ones(1, dtype=torch.bool)
        )
        before = None
        for s, label in enumerate(block.labels):
            row = candidates[0, s].tolist()
            if label not in row:
                break
            z = start[0] if s == 0 else pair[0, s - 1, before]
            before = row.index(label)
            log_q = block.q[s].log()
            ce = ce - z.log_softmax(-1)[before]
            dist = dist + sum(z.softmax(-1)[j] * F.relu(log_q[label] - log_q[row[j]]) for j in range(K))
            slots += 1
    assert 0 < slots < sum(len(block.hidden) for block in blocks), "the problem covers neither extreme"
    return slow_dflash(objective, blocks) + config.gamma * (ce / slots + config.lambd * dist / slots)


def slow_dflash2(objective, blocks):
    head = objective.draft.head

    def selector(block, s):
        gate = head.hidden_projection.weight @ block.hidden[s]
        candidates = block.logits[s].argsort(descending=True)[:K].tolist()
        if block.labels[s] not in candidates:
            candidates[-1] = block.labels[s]
        scores = [
            block.logits[s][c] + (head.predecessor_codebook[block.before[s]] * gate) @ head.successor_codebook[c]
            for c in candidates
        ]
        return -torch.stack(scores).log_softmax(-1)[candidates.index(block.labels[s])]

    config = objective.config
    return slow_dflash(objective, blocks) + config.dflash2.selector * weighted_mean(blocks, config.beta, selector)


def slow_dspark(objective, blocks):
    head, loss = objective.draft.head, objective.config.dspark
    w1, w2 = head.markov_head.markov_w1.weight, head.markov_head.markov_w2.weight

    def probabilities(block, s):
        return (block.logits[s] + w2 @ w1[block.before[s]]).softmax(-1)

    def distance(block, s):
        return (probabilities(block, s) - block.q[s]).abs().sum()

    def surprise(block, s):
        accepted = torch.minimum(probabilities(block, s), block.q[s]).sum().detach()
        confidence = head.confidence(block.hidden[None, s : s + 1], torch.tensor([[block.before[s]]]))[0, 0]
        return -accepted * confidence.log() - (1 - accepted) * (1 - confidence).log()

    def ce(block, s):
        return -probabilities(block, s)[block.labels[s]].log()

    if objective.config.loss == "common":
        beta = objective.config.beta
        return weighted_mean(blocks, beta, ce) + loss.confidence * weighted_mean(blocks, beta, surprise)
    terms = ((loss.ce, ce), (loss.l1, distance), (loss.confidence, surprise))
    return sum(weight * weighted_mean(blocks, loss.beta, term) for weight, term in terms)


def slow_domino(objective, blocks):
    head, beta = objective.draft.head, objective.config.beta
    into, across = head.prefix_gru.weight_ih_l0.chunk(3), head.prefix_gru.weight_hh_l0.chunk(3)

    def state(tokens):
        h = torch.zeros(10, dtype=torch.float64)
        for token in tokens:
            x = objective.target.embedding[token]
            reset, update = ((into[i] @ x + across[i] @ h).sigmoid() for i in (0, 1))
            h = (1 - update) * (into[2] @ x + reset * (across[2] @ h)).tanh() + update * h
        return h

    def corrected(block, s):
        logits = block.logits[s]
        if s >= 1:
            joined = torch.cat((block.hidden[s], state(block.before[: s + 1])))
            logits = logits + head.embed_proj[2].weight @ F.silu(head.embed_proj[0].weight @ joined)
        return -logits.log_softmax(-1)[block.labels[s]]

    base = 0.0 if objective.config.loss == "common" else 1 - STEP / 5  # falls to 0 over half of 10 steps
    return base * slow_dflash(objective, blocks) + (1 - base) * weighted_mean(blocks, beta, corrected)


STEP = 2
SLOW = {
    "dflash": slow_dflash,
    "lilicorr": slow_lilicorr,
    "dflash2": slow_dflash2,
    "dspark": slow_dspark,
    "domino": slow_domino,
}


@pytest.mark.parametrize(("head", "loss"), [(head, loss) for head in OBJECTIVES for loss in OBJECTIVES[head].losses])
def test_loss_and_gradients_equal_explicit_loops_over_blocks_and_slots(head, loss):
    objective, *data = problem(head, seed=7, loss=loss)  # LiLiCorr's oracle prefixes then reach a pair
    value, sums = objective(collate(*data, 64), STEP)
    value.backward()
    ours = {name: p.grad.clone() for name, p in objective.named_parameters() if p.grad is not None}
    objective.zero_grad()
    blocks = list(drafted_one_by_one(objective, *data))
    assert any(len(block.labels) < len(block.hidden) for block in blocks), "some blocks reach past their turn"
    expected = SLOW[head](objective, blocks)
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-7)
    terms = sum(weight * sums[name][0] / sums[name][1] for name, weight in objective.weights(STEP).items())
    torch.testing.assert_close(value, terms)
    expected.backward()
    for name, parameter in objective.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(
            ours.get(name, torch.zeros_like(parameter)), grad, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )
    untouched = [name for name, _ in objective.draft.head.named_parameters(prefix="draft.head") if not ours[name].any()]
    assert untouched == [], "the whole head learns"


def test_nothing_of_the_target_is_trained():
    """No optimizer can reach it: the module's parameters are the drafter's, and a step leaves the target without gradients."""
    objective, *data = problem()
    assert {id(p) for p in objective.parameters()} == {id(p) for p in objective.draft.parameters()}
    objective(collate(*data, 64))[0].backward()
    assert objective.target.embedding.grad is None and objective.target.lm_head.grad is None


def test_the_head_trains_the_drafter_through_log_probabilities_and_states():
    objective, *data = problem(gamma=1.0, beta=1e-3)
    batch = collate(*data, 64)
    loss, _ = objective(batch)
    with_head = torch.autograd.grad(loss, objective.draft.backbone.fc.weight)[0]
    objective.config = replace(objective.config, gamma=0.0)
    without = torch.autograd.grad(objective(batch)[0], objective.draft.backbone.fc.weight)[0]
    assert (with_head - without).abs().max() > 1e-6


@pytest.mark.parametrize("head", list(OBJECTIVES))
def test_perturbing_one_conversation_leaves_the_others_losses_bit_equal(head):
    objective, conversations, anchors, states = problem(head, torch.float32)

    def parts():
        blocks = objective.draft_blocks(collate(conversations, anchors, states, 64))
        parts = [objective._candidates(blocks, K).target, *objective.drafts(blocks)[0].values()]
        return [part.view(3, -1, objective.draft.config.num_slots) for part in parts]

    before = parts()
    conversations[1].ids[:] = (conversations[1].ids + 5) % 12
    states[1] = tuple(1e4 * torch.randn_like(s) for s in states[1])
    after = parts()
    for a, b in zip(before, after):
        assert torch.equal(a[[0, 2]], b[[0, 2]])
    assert not torch.equal(before[0][1], after[0][1])


def test_a_micro_step_without_a_whole_block_has_head_losses_of_exactly_zero():
    objective, conversations, _, states = problem()
    short = [Conversation((9, 0), conversations[0].ids, ((5, 7),))]
    drawn = [draw_anchors(0, 0, short[0], 14, 6)]
    loss, sums = objective(collate(short, drawn, states[:1], 64))
    assert float(sums["ce"][0]) == 0.0 and float(sums["dist"][0]) == 0.0 and float(sums["dflash"][1]) == 1.0
    loss.backward()
    assert all(not p.grad.any() for p in objective.draft.head.parameters() if p.grad is not None)
    assert loss.isfinite()


def test_head_anchors_limit_the_lattices_of_each_conversation():
    objective, *data = problem(head_anchors=2)
    batch = collate(*data, 64)
    blocks = objective.draft_blocks(batch)
    index = objective.lattice_blocks(blocks, 3)
    per_conversation = torch.bincount(index // batch.anchors.shape[1], minlength=3)
    assert per_conversation.tolist() == [2, 2, 0] and bool(blocks.eligible[index].all())
    everything = problem()[0]
    full, limited = everything(batch)[1], objective(batch)[1]
    torch.testing.assert_close(full["dflash"], limited["dflash"])


@pytest.mark.parametrize(
    ("head", "everywhere", "limited"),
    [("dflash2", "dflash", "selector"), ("dspark", "ce", "l1"), ("domino", "base", "corrected")],
)
def test_head_anchors_limit_the_heads_terms_and_leave_the_others(head, everywhere, limited):
    objective, *data = problem(head, head_anchors=2)
    batch = collate(*data, 64)
    few, full = objective(batch)[1], problem(head)[0](batch)[1]
    torch.testing.assert_close(few[everywhere], full[everywhere])
    assert 0 < float(few[limited][1]) < float(full[limited][1])


@pytest.mark.parametrize("head", list(OBJECTIVES))
def test_a_sampled_vocabulary_that_holds_every_token_changes_nothing(head):
    objective, *data = problem(head)
    batch = collate(*data, 64)
    whole, _ = objective(batch, STEP)
    whole.backward()
    gradients = {name: p.grad.clone() for name, p in objective.named_parameters() if p.grad is not None}
    objective.zero_grad()
    tokens = range(12)
    sampled = SampledVocabulary(tokens, objective.target.lm_head, V, seed=0)
    objective._frozen = (objective.target, sampled)
    again, _ = objective(batch, STEP)
    torch.testing.assert_close(again, whole)
    again.backward()
    for name, parameter in objective.named_parameters():
        if name in gradients:
            torch.testing.assert_close(parameter.grad, gradients[name], msg=lambda m, n=name: f"{n}: {m}")
    few = SampledVocabulary(tokens, objective.target.lm_head, 6, seed=0)
    objective._frozen = (objective.target, few)
    assert not torch.allclose(objective(batch, STEP)[0], whole)
    objective.eval()
    torch.testing.assert_close(objective(batch, STEP)[0], whole)


@pytest.mark.parametrize("head", ["dspark", "domino"])
def test_a_sampled_token_counts_for_those_it_stands_for_in_corrected_logits_too(head):
    objective, *_ = problem(head)
    sampled = SampledVocabulary(range(12), objective.target.lm_head, 6, seed=0)
    objective._frozen = (objective.target, sampled)
    hidden, extra, labels = torch.randn(5, H).double(), torch.randn(5, 6).double(), torch.arange(5)
    logits = hidden @ objective.target.lm_head.t() + extra @ objective.table.t()
    drawn = sampled.draw(0)
    expected = logits[torch.arange(5), labels] - (logits[:, drawn.ids] + drawn.log_counts).logsumexp(-1)
    torch.testing.assert_close(objective.corrected(0)(hidden, extra, labels, None).target, expected)


@pytest.mark.parametrize("head", ["dflash2", "dspark", "domino"])
def test_the_selected_prefix_is_what_the_greedy_rule_drafts(head, monkeypatch):
    objective, *data = problem(head)
    batch = collate(*data, 64)
    blocks = objective.draft_blocks(batch)
    drafted = objective.drafts(blocks)[0]["greedy"]
    # A ground truth that leaves the draft at another slot in every block, or never.
    slots = drafted.shape[1]
    leaves = torch.arange(len(drafted))[:, None] % (slots + 1) == torch.arange(slots)
    blocks = replace(blocks, labels=torch.where(leaves, (drafted + 1) % 12, drafted))
    monkeypatch.setattr(objective, "draft_blocks", lambda _: blocks)
    expected = (torch.arange(len(drafted)) % (slots + 1))[blocks.eligible]
    assert len(set(expected.tolist())) == slots + 1
    matched, count = objective(batch)[1]["selected_prefix"]
    assert (float(matched), float(count)) == (float(expected.sum()), len(expected))


@pytest.mark.parametrize(("head", "seen"), [("dspark", [[0], [1], [2], [3]]), ("domino", [[], [0, 1], [0, 1, 2], [0, 1, 2, 3]])])
def test_a_slots_correction_reads_the_anchor_and_the_tokens_before_it_and_no_later_ones(head, seen):
    """seen: for every slot, which of (anchor, g_1, g_2, g_3) its correction depends on."""
    objective, *data = problem(head)
    blocks = objective.draft_blocks(collate(*data, 64)).select(slice(0, 1))
    before = objective.corrections(blocks)[0]
    for token in range(4):
        changed = replace(blocks, anchor_ids=blocks.anchor_ids.clone(), labels=blocks.labels.clone())
        where = changed.anchor_ids if token == 0 else changed.labels[:, token - 1]
        where += 20
        differs = (objective.corrections(changed)[0] != before).any(-1).tolist()
        assert differs == [token in slot for slot in seen], token
    if head == "domino":
        assert not before[0].any(), "the first slot stays as the backbone drafted it"


def test_the_sampled_normaliser_is_unbiased():
    torch.manual_seed(0)
    lm_head, hidden, labels = (
        torch.randn(V, H, dtype=torch.float64),
        0.3 * torch.randn(5, H, dtype=torch.float64),
        torch.arange(5),
    )
    sampled = SampledVocabulary(range(12), lm_head, 8, seed=1)
    logits = hidden @ lm_head.t()
    label_logits = logits.gather(1, labels[:, None])[:, 0]
    estimates = torch.stack([(label_logits - sampled.at(step)(hidden, labels, 0).target).exp() for step in range(3000)])
    standard_error = estimates.std(0) / 3000**0.5
    assert ((estimates.mean(0) - logits.exp().sum(-1)).abs() < 5 * standard_error).all()


@pytest.mark.parametrize("backend", ["sdpa", "flex"])
def test_both_attention_backends_equal_per_block_loops(backend):
    torch.manual_seed(1)
    n, m, t = 2, 3, 7
    anchors = torch.tensor([[0, 3, 7], [2, 5, 6]])
    q, k, v = torch.randn(n, m, B, 4, 16), torch.randn(n, m, B, 2, 16), torch.randn(n, m, B, 2, 16)
    ck, cv = torch.randn(n, t, 2, 16), torch.randn(n, t, 2, 16)
    ours = BlockAttention(anchors, t, B, backend)(q, k, v, ck, cv, torch.empty(0))
    for i in range(n):
        for j in range(m):
            a = int(anchors[i, j])
            keys = torch.cat((ck[i, :a], k[i, j])).repeat_interleave(2, dim=1)
            values = torch.cat((cv[i, :a], v[i, j])).repeat_interleave(2, dim=1)
            weights = torch.einsum("qhd,khd->hqk", q[i, j], keys).div(4.0).softmax(-1)
            torch.testing.assert_close(ours[i, j], torch.einsum("hqk,khd->qhd", weights, values), rtol=1e-4, atol=1e-5)
    visible = torch.arange(t) < anchors[..., None]
    torch.testing.assert_close(ours, block_attention(q, k, v, ck, cv, visible), rtol=1e-4, atol=1e-5)
