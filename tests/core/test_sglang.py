"""What SGLang 0.5.23 reads of a drafter's folder, as facts found in its files; and, given these, its own loader on our export.

$SGLANG names a folder that its wheel was unpacked into (`pip download --no-deps sglang==0.5.23`, then `unzip`); nothing of it is
installed, and it needs no GPU. Without it the facts alone are tested.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from vllm_lilicorr.config import ConvConfig
from vllm_lilicorr.model.checkpoint import save_draft

from .conftest import make_config, make_draft

STACKED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
"""Projections that SGLang keeps in one parameter, one below the other in this order; the head's own `up_proj`s stay apart."""

REGISTERED = {"DFlashDraftModel", "LiLiCorrDraftModel", "DFlash2DraftModel", "Qwen3DSparkModel"}
"""Architectures that SGLang has a class for. Domino it takes as `DFlashDraftModel`, by `projector_type`."""

DRAFTERS = {
    "lilicorr": make_config(),
    "lilicorr as wide as the drafter": make_config(head=replace(make_config().head, hidden_size=48)),
    "lilicorr with convolutions": make_config(conv=ConvConfig(kernel_size=2, group_size=16)),
    "dflash": make_config("dflash"),
    "dflash with attention biases": make_config("dflash", attention_bias=True),
    "dflash2": make_config("dflash2"),
    "dspark": make_config("dspark"),
}


def parameters(config: dict) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the parameters that SGLang makes for a `config.json`, each of which it wants filled."""
    dflash, architecture = config["dflash_config"], config["architectures"][0]
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    width = config["head_dim"]
    queries, keys = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    found = {
        "fc.weight": (hidden, len(dflash["target_layer_ids"]) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for i in range(config["num_hidden_layers"]):
        layer = {
            "input_layernorm.weight": (hidden,),
            "self_attn.qkv_proj.weight": (queries + 2 * keys, hidden),
            "self_attn.o_proj.weight": (hidden, queries),
            "self_attn.q_norm.weight": (width,),
            "self_attn.k_norm.weight": (width,),
            "post_attention_layernorm.weight": (hidden,),
            "mlp.gate_up_proj.weight": (2 * inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
        }
        if config["attention_bias"]:
            layer |= {"self_attn.qkv_proj.bias": (queries + 2 * keys,), "self_attn.o_proj.bias": (hidden,)}
        for conv in ("attention_conv", "mlp_conv") if "conv_kernel_size" in dflash else ():
            taps, groups = dflash["conv_kernel_size"], hidden // dflash["conv_group_size"]
            layer |= {f"{conv}.base_kernel": (2, taps, hidden), f"{conv}.kernel_projection.weight": (2 * taps * groups, hidden)}
        found |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    if architecture == "DFlash2DraftModel":
        rank = dflash["selector_rank"]
        found |= {f"candidate_selector.{name}_codebook": (vocab, rank) for name in ("predecessor", "successor")}
        found["candidate_selector.hidden_projection.weight"] = (rank, hidden)
    if architecture == "Qwen3DSparkModel":
        rank = config["markov_rank"]
        found |= {f"markov_head.markov_w{i}.weight": (vocab, rank) for i in (1, 2)}
        found |= {"confidence_head.proj.weight": (1, hidden + rank), "confidence_head.proj.bias": (1,)}
    if architecture == "LiLiCorrDraftModel":
        found |= {f"lilicorr.{name}": shape for name, shape in lilicorr(config, {k[9:]: v for k, v in dflash.items()}).items()}
    return found


def lilicorr(config: dict, head: dict) -> dict[str, tuple[int, ...]]:
    hidden, block, inner = config["hidden_size"], config["block_size"], int(head["hidden_size"] * head["mlp_ratio"])
    width, heads, factor = head["hidden_size"], head["num_heads"], head["factor_dim"]
    linear = {
        "pass_hidden_proj": (width, hidden),
        "context_proj": (width, hidden),
        "feature_mlp.up_proj": (width, 5),
        "feature_mlp.down_proj": (width, width),
        "factor_input_proj": (width, 3 * width),
        "out_head": (factor, width),
        "in_head": (factor, width),
        "anchor_out_head": (factor, width),
    }
    if width != hidden:
        linear["token_proj"] = (width, hidden)
    found = {
        "slot_embedding": (1, 1, block - 1, 1, width),
        "rank_embedding": (1, 1, 1, head["candidate_topk"], width),
        "relative_slot_bias": (heads, 2 * block - 1),
        "same_slot_bias": (heads,),
        "feature_norm.weight": (5,),
        "feature_norm.bias": (5,),
        "output_norm.weight": (width,),
        "anchor_norm.weight": (width,),
    }
    for j in range(head["num_layers"]):
        linear |= {
            f"layers.{j}.attn.out_proj": (width, width),
            f"layers.{j}.mlp.up_proj": (inner, width),
            f"layers.{j}.mlp.down_proj": (width, inner),
        }
        found |= {f"layers.{j}.attn.in_proj_weight": (3 * width, width), f"layers.{j}.attn.in_proj_bias": (3 * width,)}
        found |= {f"layers.{j}.{norm}.weight": (width,) for norm in ("attn_norm", "mlp_norm")}
    for name, (rows, columns) in linear.items():
        found |= {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}
    return found


def placed(tensors: dict) -> dict[str, tuple[int, ...]]:
    """Return the parameters, by name and shape, that the tensors of a file fill together."""
    found: dict[str, tuple[int, ...]] = {}
    for name, tensor in tensors.items():
        part = name.split(".")[-2] if "." in name else ""
        if part in STACKED and not name.startswith("lilicorr."):
            name = name.replace(part, STACKED[part])
            found[name] = (found.get(name, (0,))[0] + tensor.shape[0], *tensor.shape[1:])
        else:
            found[name] = tuple(tensor.shape)
    return found


@pytest.fixture(params=DRAFTERS, ids=lambda name: name.replace(" ", "-"))
def export(request, tmp_path) -> Path:
    save_draft(make_draft(DRAFTERS[request.param]), tmp_path / "export")
    return tmp_path / "export"


def test_every_tensor_has_its_place_in_sglangs_model_and_every_parameter_its_tensor(export):
    config = json.loads((export / "config.json").read_text())
    assert placed(load_file(export / "model.safetensors")) == parameters(config)


def test_what_sglang_reads_of_a_configuration_is_there(export):
    config = json.loads((export / "config.json").read_text())
    dflash = config["dflash_config"]
    assert len(config["architectures"]) == 1 and config["architectures"][0] in REGISTERED
    assert config["model_type"] == "qwen3" and "layer_types" not in config, "every layer attends both ways, to everything"
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": config["rope_theta"]}, "where it is read"
    assert dflash["block_size"] == config["block_size"] >= 2, "16 is assumed where it is missing"
    assert type(dflash["mask_token_id"]) is int, "else it looks for a token by name"
    ids = dflash["target_layer_ids"]
    assert type(ids) is list and 0 <= min(ids) and max(ids) < config["num_target_layers"]
    assert ("conv_kernel_size" in dflash) == ("conv_group_size" in dflash)
    if config["architectures"] == ["LiLiCorrDraftModel"]:
        sizes = (
            "candidate_topk",
            "hidden_size",
            "num_layers",
            "num_heads",
            "mlp_ratio",
            "factor_dim",
            "vector_eps",
            "logit_scale",
        )
        assert all(dflash[f"lilicorr_{name}"] > 0 for name in sizes) and dflash["lilicorr_enabled"] is True
    if config["architectures"] == ["DFlash2DraftModel"]:
        assert dflash["selector_rank"] > 0 and dflash["selector_top_k"] > 0
    if config["architectures"] == ["Qwen3DSparkModel"]:
        assert config["markov_rank"] > 0 and config["markov_head_type"] == "vanilla" and config["sample_from_anchor"] is True
        assert config["confidence_head_with_markov"] is True and config["enable_confidence_head"] is True


@pytest.mark.slow
def test_sglangs_own_loader_fills_every_parameter_from_our_export(export):
    """With the files of the release: its class, its `load_weights`, its scores. See `sglang_loader.py`."""
    if "SGLANG" not in os.environ:
        pytest.skip("$SGLANG does not name a folder with an unpacked wheel of SGLang")
    command = [sys.executable, str(Path(__file__).with_name("sglang_loader.py")), os.environ["SGLANG"], str(export)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    read = json.loads(done.stdout.splitlines()[-1])
    config, tensors = json.loads((export / "config.json").read_text()), load_file(export / "model.safetensors")
    assert read["parameters"] == {name: list(shape) for name, shape in parameters(config).items()}
    assert read["unfilled"] == [] and read["unplaced"] == [] and len(read["tensors"]) == len(tensors)
    assert read["rope_theta"] == config["rope_theta"] and read["attention"] == "ENCODER_ONLY"
    assert read.get("score_difference", 0) <= 1e-4, "the scores of its head, at sigma = 8, in fp32"
