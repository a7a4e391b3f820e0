"""The backbone against a re-derivation with one block at a time and explicit masks, in fp64."""

from __future__ import annotations

import math

import pytest
import torch

from vllm_lilicorr.model import TargetVocabulary


def slow_block(backbone, embeddings, position, features):
    """Hidden states [B, H] of one block at absolute `position` after context features [T, H], token by token."""
    config = backbone.config
    heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim

    def rms(norm, x):
        return x / (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * norm.weight

    def rope(x, at):  # [heads, size]
        half = size // 2
        angle = at * config.rope_theta ** (-torch.arange(half, dtype=torch.float64) * 2 / size)
        a, b = x[:, :half], x[:, half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    x = embeddings
    for layer in backbone.layers:
        attn = layer.self_attn
        normed = rms(layer.input_layernorm, x)
        # The context enters without the layer's input norm.
        sources = [(row, at) for at, row in enumerate(features)]
        sources += [(row, position + i) for i, row in enumerate(normed)]
        keys = [rope(rms(attn.k_norm, (attn.k_proj.weight @ row).view(kv_heads, size)), at) for row, at in sources]
        values = [(attn.v_proj.weight @ row).view(kv_heads, size) for row, at in sources]
        rows = []
        for i, row in enumerate(normed):
            q = rope(rms(attn.q_norm, (attn.q_proj.weight @ row).view(heads, size)), position + i)
            out = []
            for h in range(heads):
                group = h * kv_heads // heads
                weights = torch.stack([q[h] @ k[group] / math.sqrt(size) for k in keys]).softmax(0)
                out.append(sum(w * v[group] for w, v in zip(weights, values)))
            rows.append(attn.o_proj.weight @ torch.cat(out))
        x = x + torch.stack(rows)
        normed = rms(layer.post_attention_layernorm, x)
        gate = normed @ layer.mlp.gate_proj.weight.T
        x = x + (gate / (1 + (-gate).exp()) * (normed @ layer.mlp.up_proj.weight.T)) @ layer.mlp.down_proj.weight.T
    return rms(backbone.norm, x)


@pytest.fixture
def setting(draft, config):
    config = config()
    model = draft(config).double()
    generator = torch.Generator().manual_seed(3)
    taps = torch.randn(1, 9, 2 * 48, generator=generator, dtype=torch.float64)
    table = torch.randn(97, 48, generator=generator, dtype=torch.float64)
    return config, model, taps, TargetVocabulary(table, table)


@pytest.mark.parametrize("slots", [5, 2])
def test_blocks_equal_a_slow_rederivation(setting, slots):
    config, model, taps, vocabulary = setting
    features = model.backbone.context_features(taps)
    positions = torch.arange(9)[None]
    context = model.backbone.context_kv(features, positions)
    anchors, ids = torch.tensor([[0, 4, 9]]), torch.tensor([[5, 11, 7]])
    visible = positions[:, None] < anchors[..., None]
    hidden = model.slot_hidden(ids, anchors, context, visible, vocabulary, slots)
    assert hidden.shape == (1, 3, slots, 48)

    rms = taps[0] @ model.backbone.fc.weight.T
    rms = rms / (rms.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * model.backbone.hidden_norm.weight
    torch.testing.assert_close(features[0], rms)
    for m, (anchor, token) in enumerate(zip(anchors[0].tolist(), ids[0].tolist())):
        block = vocabulary.embedding[[token] + [config.mask_token_id] * slots]
        expected = slow_block(model.backbone, block, anchor, rms[:anchor])
        torch.testing.assert_close(hidden[0, m], expected[1:])


def test_context_behind_the_anchor_does_not_leak(setting):
    _, model, taps, vocabulary = setting
    positions = torch.arange(9)[None]
    anchors, ids = torch.tensor([[4]]), torch.tensor([[5]])
    visible = positions[:, None] < anchors[..., None]

    def run(taps):
        context = model.backbone.context_kv(model.backbone.context_features(taps), positions)
        return model.slot_hidden(ids, anchors, context, visible, vocabulary)

    before = run(taps)
    changed = taps.clone()
    changed[:, 4:] += 1.0
    torch.testing.assert_close(run(changed), before, rtol=0, atol=0)
    changed[:, 3] += 1.0
    assert bool((run(changed) != before).any())


def test_too_many_slots_are_an_error(setting):
    _, model, taps, vocabulary = setting
    with pytest.raises(ValueError, match=r"1\.\.5, got 6"):
        model.slot_hidden(torch.tensor([[1]]), torch.tensor([[0]]), [], torch.zeros(1, 1, 0), vocabulary, 6)
