"""Our backbone and vLLM's own DFlash: the same random weights must draft the same tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vllm_lilicorr.model.checkpoint import load_draft, save_draft
from vllm_lilicorr.near_tie import Comparison
from vllm_lilicorr.reference import drafts_at
from vllm_lilicorr.target import load_target

from .conftest import make_config, make_draft, make_target
from .test_reference import random_prompts

pytest.importorskip("vllm", reason="vLLM is not installed, so its drafter cannot be compared with")
pytestmark = pytest.mark.slow


def test_vllms_own_dflash_drafts_what_the_reference_drafts(tmp_path):
    # vLLM's CPU attention wants head sizes in multiples of 32.
    sizes = dict(hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    config = make_config("dflash", num_target_layers=4, target_layer_ids=(0, 3), **sizes)
    make_target(config, logit_spread=4.0).model.save_pretrained(tmp_path / "target")
    weights = make_draft(config, spread=0.1)
    # vLLM's CPU operator norms the context keys of every layer by the first layer's weight (docs/serving.md), so its drafts
    # can be ours only where all layers have the same.
    shared = weights.backbone.layers[0].self_attn.k_norm.state_dict()
    for layer in weights.backbone.layers:
        layer.self_attn.k_norm.load_state_dict(shared)
    save_draft(weights, tmp_path / "draft")
    prompts = random_prompts(10, lengths=(2, 40))
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    environment = os.environ | {
        "VLLM_PLUGINS": "",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }
    script = Path(__file__).with_name("stock_engine.py")
    files = [tmp_path / name for name in ("target", "draft", "prompts.json", "out.json")]
    done = subprocess.run([sys.executable, script, *files], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]

    draft = load_draft(tmp_path / "draft", dtype=torch.float32)
    target = load_target(tmp_path / "target", config.target_layer_ids)
    results = json.loads((tmp_path / "out.json").read_text())
    comparison = Comparison()
    for i, (prompt, served) in enumerate(zip(prompts, results)):
        sequence = prompt + served["output_ids"]
        blocks = [block for block in served["drafts"] if block["anchor"] < len(sequence)]
        assert blocks and blocks[0]["anchor"] == len(prompt)
        proposal = drafts_at(target, draft, sequence, [block["anchor"] for block in blocks], "argmax")
        for block, ours, margin in zip(blocks, proposal.tokens.tolist(), proposal.margin.tolist()):
            comparison.add(f"prompt {i}, anchor {block['anchor']}", ours, block["tokens"], [margin] * len(ours))
    drafted = {token for row in results for block in row["drafts"] for token in block["tokens"]}
    assert comparison.compared > 500 and len(drafted) > 20, "too few or too uniform drafts to say anything"
    comparison.check()
