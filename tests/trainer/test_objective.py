"""The whole objective of one micro-step against explicit loops, and what must not leak."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from vllm_lilicorr.config import DFlashConfig, DraftConfig, LiLiCorrConfig
from vllm_lilicorr.model import Draft, TargetVocabulary
from vllm_lilicorr.model.backbone import block_attention
from vllm_lilicorr.model.lattice import top_candidates
from vllm_lilicorr.trainer.attention import BlockAttention
from vllm_lilicorr.trainer.corpus import Conversation
from vllm_lilicorr.trainer.data import collate, draw_anchors
from vllm_lilicorr.trainer.objective import OBJECTIVES, ObjectiveConfig
from vllm_lilicorr.trainer.vocabulary import SampledVocabulary

H, V, B, K = 24, 61, 4, 4


def draft_config(head):
    return DraftConfig(
        hidden_size=H, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=12, intermediate_size=16,
        vocab_size=V, rms_norm_eps=1e-6, max_position_embeddings=128, rope_theta=1e4, attention_bias=False, block_size=B,
        num_target_layers=6, mask_token_id=60, target_layer_ids=(1, 3), head=head,
    )  # fmt: skip


HEADS = {
    "lilicorr": LiLiCorrConfig(
        candidate_topk=K, hidden_size=16, num_layers=1, num_heads=2, mlp_ratio=2.0, factor_dim=8, vector_eps=1e-4, logit_scale=8.0
    ),
    "dflash": DFlashConfig(),
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
    objective = OBJECTIVES[head](draft.to(dtype), ObjectiveConfig(**options), target)
    rng = np.random.default_rng(seed)
    conversations, anchors, states = [], [], []
    for row, (length, spans) in enumerate((((14, ((5, 14),))), (20, ((3, 6), (9, 20))), (9, ((6, 8),)))):
        # Few distinct tokens: coverage is then neither all nor nothing.
        conversation = Conversation((row, 0), rng.integers(0, 12, length).astype(np.int32), spans)
        conversations.append(conversation)
        anchors.append(draw_anchors(seed, 0, conversation, length, 6))
        states.append((torch.randn(length, 2 * H).to(dtype), torch.randn(length, H).to(dtype)))
    return objective, conversations, anchors, states


def explicit(objective, conversations, anchors, states):
    """Return (L_DFlash, L_CE, L_dist) block by block and slot by slot, each block on its own context."""
    draft, target, config = objective.draft, objective.target, objective.config
    weights = numerator = 0.0
    ce = dist = 0.0
    slots = 0
    for conversation, drawn, (taps, final) in zip(conversations, anchors, states):
        ids = torch.from_numpy(conversation.ids.astype(np.int64))
        for anchor, end in zip(drawn.positions.tolist(), drawn.ends.tolist()):
            features = draft.backbone.context_features(taps[None, :anchor])
            kv = draft.backbone.context_kv(features, torch.arange(anchor)[None])
            block = torch.full((1, 1, B), 60)
            block[..., 0] = ids[anchor]
            hidden = draft.backbone(
                target.embed(block), (anchor + torch.arange(B))[None, None], kv, torch.ones(1, 1, anchor, dtype=torch.bool)
            )[0, 0, 1:]
            logits = hidden @ target.lm_head.t()
            labels = [int(ids[anchor + 1 + s]) for s in range(B - 1) if anchor + 1 + s < end]
            for s, label in enumerate(labels):
                w = math.exp(-s / config.beta)
                numerator = numerator - w * logits[s].log_softmax(-1)[label]
                weights += w
            if len(labels) < B - 1 or not hasattr(draft.config.head, "candidate_topk"):
                continue
            candidates, log_probs = top_candidates(logits[None], K)
            start, pair = draft.head(
                target.embed(candidates), log_probs, hidden[None], features[:, -1], torch.ones(1, dtype=torch.bool)
            )
            before = None
            for s, label in enumerate(labels):
                row = candidates[0, s].tolist()
                if label not in row:
                    break
                z = start[0] if s == 0 else pair[0, s - 1, before]
                before = row.index(label)
                log_q = (final[anchor + s] @ target.lm_head.t()).log_softmax(-1)
                ce = ce - z.log_softmax(-1)[before]
                dist = dist + sum(z.softmax(-1)[j] * F.relu(log_q[label] - log_q[row[j]]) for j in range(K))
                slots += 1
    return numerator / weights, ce / max(slots, 1), dist / max(slots, 1), slots


@pytest.mark.parametrize("head", list(OBJECTIVES))
def test_loss_and_gradients_equal_explicit_loops_over_blocks_and_slots(head):
    objective, *data = problem(head)
    loss, sums = objective(collate(*data, 64))
    loss.backward()
    ours = {name: p.grad.clone() for name, p in objective.named_parameters() if p.grad is not None}
    objective.zero_grad()
    dflash, ce, dist, slots = explicit(objective, *data)
    if head == "lilicorr":
        assert 0 < slots < 3 * sum(len(a.positions) for a in data[1]), "the problem covers neither extreme"
        assert sums["ce"][1] == slots
    expected = dflash + objective.config.gamma * (ce + objective.config.lambd * dist)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-7)
    expected.backward()
    for name, parameter in objective.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(
            ours.get(name, torch.zeros_like(parameter)), grad, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


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
        found = objective._candidates(blocks, K)
        return [
            found.target.view(3, -1, B - 1),
            *[x.view(3, found.target.view(3, -1, B - 1).shape[1], -1) for x in objective.drafts(blocks)[0].values()],
        ]

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


def test_a_sampled_vocabulary_that_holds_every_token_changes_nothing():
    objective, *data = problem()
    batch = collate(*data, 64)
    whole, _ = objective(batch)
    tokens = range(12)
    sampled = SampledVocabulary(tokens, objective.target.lm_head, V, seed=0)
    objective._frozen = (objective.target, sampled)
    torch.testing.assert_close(objective(batch)[0], whole)
    few = SampledVocabulary(tokens, objective.target.lm_head, 6, seed=0)
    objective._frozen = (objective.target, few)
    assert not torch.allclose(objective(batch)[0], whole)
    objective.eval()
    torch.testing.assert_close(objective(batch)[0], whole)


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
