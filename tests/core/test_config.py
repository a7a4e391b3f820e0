"""The drafter's configuration: what is read, what is written, what is refused and how."""

from __future__ import annotations

import copy
import json

import pytest

from vllm_lilicorr.config import DraftConfig, default_target_layer_ids
from vllm_lilicorr.errors import UserError

from .conftest import HEADS


@pytest.fixture
def values(config):
    return config().to_dict()


def refusal(values, **changes):
    """The sentence that refuses `values` with dotted keys changed (None removes a key)."""
    values = copy.deepcopy(values)
    for dotted, value in changes.items():
        *path, key = dotted.split("__")
        section = values
        for part in path:
            section = section[part]
        if value is None:
            section.pop(key, None)
        else:
            section[key] = value
    with pytest.raises(UserError) as caught:
        DraftConfig.from_dict(values, "folder/config.json")
    sentence = str(caught.value)
    assert sentence.startswith("folder/config.json: ") and "\n" not in sentence
    return sentence


@pytest.mark.parametrize("head", HEADS)
def test_what_is_written_reads_back_to_the_same_bytes(config, head):
    first = config(head, target_name="t", tokenizer_hash="abc")
    again = DraftConfig.from_dict(json.loads(first.to_json()))
    assert again == first
    assert again.to_json() == first.to_json()


def test_a_plain_drafter_needs_none_of_lilicorrs_fields(config):
    written = config("dflash").to_dict()
    assert not any("lilicorr" in key for key in written["dflash_config"])
    assert DraftConfig.from_dict(written).architecture == "DFlashDraftModel"


LILICORR_KEYS = "candidate_topk hidden_size num_layers num_heads mlp_ratio factor_dim vector_eps logit_scale".split()


@pytest.mark.parametrize("key", LILICORR_KEYS)
def test_no_field_of_the_head_has_a_default(values, key):
    assert f"dflash_config.lilicorr_{key} is missing" in refusal(values, **{f"dflash_config__lilicorr_{key}": None})


@pytest.mark.parametrize(
    "key",
    "hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim intermediate_size vocab_size "
    "rms_norm_eps max_position_embeddings hidden_act attention_bias num_target_layers architectures dflash_config".split(),
)
def test_no_field_of_the_backbone_has_a_default(values, key):
    assert f"{key} is missing" in refusal(values, **{key: None})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"hidden_size": "48"}, "hidden_size must be an integer"),
        ({"hidden_size": True}, "hidden_size must be an integer"),
        ({"hidden_size": 0}, "hidden_size must be positive"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a finite number"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a finite number"),
        ({"hidden_size": 10**18}, "hidden_size must be at most"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most"),
        ({"dflash_config__lilicorr_num_layers": 10**9}, "lilicorr_num_layers must be at most"),
        ({"dflash_config__lilicorr_mlp_ratio": 1e308}, "lilicorr_mlp_ratio must be at most"),
        ({"vocab_size": 3, "dflash_config__mask_token_id": 0}, "candidate_topk must be at most vocab_size 3"),
        ({"model_type": "llama"}, "model_type"),
        ({"model_type": None}, "model_type is missing"),
        ({"dtype": "float8"}, "dtype"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_theta": 2.0}}, "make them equal"),
        ({"dflash_config__draft_vocab_size": 32}, "draft_vocab_size is 32, a reduced draft vocabulary, which is not supported"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads"),
        ({"head_dim": 13}, "head_dim must be even"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"dflash_config__lilicorr_candidate_topk": 6}, "power of two"),
        ({"dflash_config__lilicorr_candidate_topk": 32}, "at most 16"),
        ({"dflash_config__lilicorr_hidden_size": 30}, "divisible by lilicorr_num_heads"),
        ({"dflash_config__lilicorr_mlp_ratio": 1.01}, "must be an integer"),
        ({"dflash_config__lilicorr_vector_eps": 0}, "must be positive"),
        ({"dflash_config__lilicorr_logitscale": 8.0}, "did you mean 'lilicorr_logit_scale'"),
        ({"dflash_config__lilicorr_enabled": False}, "lilicorr_enabled"),
        ({"dflash_config__conv_kernel_size": 2}, "conv_group_size is missing while conv_kernel_size is set"),
        ({"dflash_config__conv_group_size": 16}, "conv_kernel_size is missing while conv_group_size is set"),
        ({"dflash_config__conv_kernel_size": 6, "dflash_config__conv_group_size": 16}, "smaller than block_size 6"),
        ({"dflash_config__conv_kernel_size": 2, "dflash_config__conv_group_size": 7}, "must divide hidden_size"),
        ({"dflash_config__target_layer_ids": [0, 4]}, "must lie in 0..3"),
        ({"dflash_config__target_layer_ids": [2, 2]}, "must increase"),
        ({"dflash_config__target_layer_ids": [2, 0]}, "must increase"),
        ({"dflash_config__target_layer_ids": []}, "non-empty list"),
        ({"dflash_config__target_layer_ids": [0.5]}, "list of integers"),
        ({"dflash_config__mask_token_id": 97}, "vocabulary 0..96"),
        ({"dflash_config__mask_token_id": -1}, "vocabulary 0..96"),
        ({"architectures": ["LiliCorrDraftModel"]}, "known are DFlashDraftModel, LiLiCorrDraftModel"),
        ({"architectures": []}, "exactly one name"),
        ({"architectures": ["DFlashDraftModel"]}, "silently ignore the head"),
        ({"draft_vocab_size": 32}, "reduced draft vocabulary, which is not supported"),
        ({"block_size": 1, "dflash_config__block_size": 1}, "at least 2"),
        ({"dflash_config__block_size": 8}, "make them equal"),
        ({"block_size": None, "dflash_config__block_size": None}, "block_size is missing"),
        ({"rope_theta": None, "rope_parameters": None}, "rope_theta is missing"),
        ({"rope_theta": 5.0}, "make them equal"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "plain rotary"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "full_attention"),
        ({"dflash_config__causal": True}, "does not have"),
    ],
)
def test_each_inconsistency_is_one_sentence_naming_its_field(values, changes, expected):
    assert expected in refusal(values, **changes)


@pytest.mark.parametrize("kept", ["rope_theta", "rope_parameters"])
def test_the_rotary_base_is_read_in_either_spelling(values, kept):
    values.pop({"rope_theta": "rope_parameters", "rope_parameters": "rope_theta"}[kept])
    assert DraftConfig.from_dict(values).rope_theta == 1e4


def test_a_draft_vocabulary_that_is_the_whole_one_is_no_reduced_one(values):
    values["draft_vocab_size"] = values["dflash_config"]["draft_vocab_size"] = values["vocab_size"]
    assert DraftConfig.from_dict(values).vocab_size == values["vocab_size"]


def test_block_size_is_read_from_either_place(values):
    del values["block_size"]
    assert DraftConfig.from_dict(values).num_slots == 5


def test_a_missing_or_broken_file_is_named(tmp_path):
    contents = ((None, "has no config.json"), ("{", "line 1, column 2"), ("[" * 100_000, "not valid JSON"), ("[]", "JSON object"))
    for content, expected in contents:
        if content is not None:
            (tmp_path / "config.json").write_text(content)
        with pytest.raises(UserError, match=expected) as caught:
            DraftConfig.load(tmp_path)
        assert str(tmp_path) in str(caught.value)
    with pytest.raises(UserError, match="does not exist"):
        DraftConfig.load(tmp_path / "absent")
    with pytest.raises(UserError, match="is a file"):
        DraftConfig.load(tmp_path / "config.json")


def test_default_taps_follow_the_layer_rule():
    assert default_target_layer_ids(36) == (1, 9, 17, 25, 33)
    assert default_target_layer_ids(30) == (1, 8, 14, 20, 27)
    assert default_target_layer_ids(36, 1) == (18,)
    with pytest.raises(UserError, match="too shallow for 5 taps"):
        default_target_layer_ids(4)
