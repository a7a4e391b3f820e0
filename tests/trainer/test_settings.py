from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from vllm_lilicorr.config import ConvConfig, DFlash2Config, DominoConfig, DSparkConfig, LiLiCorrConfig
from vllm_lilicorr.errors import UserError
from vllm_lilicorr.trainer.config import TrainConfig
from vllm_lilicorr.trainer.data import Schedule
from vllm_lilicorr.trainer.optim import ScheduleConfig, learning_rate

ROOT = Path(__file__).resolve().parents[2]
QWEN3_8B = {
    "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 12288, "vocab_size": 151936, "rms_norm_eps": 1e-6, "max_position_embeddings": 40960, "rope_theta": 1e6,
}  # fmt: skip


HEAD_ANCHORS = ["objective.head_anchors=16"]


@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3-4b"])
def test_the_shipped_recipe_has_every_number_of_the_papers_table(name):
    config = TrainConfig.load(ROOT / f"configs/{name}.yaml")
    assert config.head.lilicorr == LiLiCorrConfig(8, 1024, 2, 8, 2.0, 1024, 1e-4, 8.0)
    assert (config.draft.block_size, config.draft.num_layers, config.draft.mask_token_id) == (16, 5, 151669)
    assert (config.objective.beta, config.objective.lambd, config.objective.gamma) == (7.0, 1.0, 0.25)
    assert config.objective.dflash_normalize and config.objective.train_vocab is None and config.objective.head_anchors is None
    assert (config.optimizer.lr, config.optimizer.weight_decay, config.optimizer.clip) == (6e-4, 0.0, 1.0)
    assert (config.schedule.kind, config.schedule.warmup) == ("linear", 0.04)
    assert (config.run.batch_size, config.run.epochs, config.run.precision) == (64, 6, "bf16")
    assert (config.data.max_length, config.data.anchors) == (3120, 512)
    draft = config.draft_config(QWEN3_8B, "Qwen3-8B", "0" * 64)
    assert draft.target_layer_ids == (1, 9, 17, 25, 33) and draft.rope_theta == 1e6 and draft.head_dim == 128


@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3-4b"])
def test_the_shipped_recipe_has_the_comparators_sizes(name):
    config = TrainConfig.load(ROOT / f"configs/{name}.yaml")
    assert config.head.dflash2 == DFlash2Config(256, 16)
    assert config.head.dspark == DSparkConfig(256, True, True)
    assert config.head.domino == DominoConfig(1024, 256, 1)
    loss = config.objective.dspark
    assert (loss.ce, loss.l1, loss.beta) == (0.1, 0.9, 4.0)


@pytest.mark.parametrize("name", ["qwen3-8b", "smollm2-135m"])
@pytest.mark.parametrize(
    ("overrides", "architecture", "slots"),
    [
        (["draft.head=dflash"], "DFlashDraftModel", 15),
        (["draft.head=dflash2"], "DFlash2DraftModel", 15),
        (["draft.head=dspark", "draft.block_size=15"], "Qwen3DSparkModel", 15),
        (["draft.head=domino", "draft.block_size=15"], "DominoDraftModel", 15),
        (["draft.conv=true"], "LiLiCorrDraftModel", 15),
    ],
)
def test_one_file_describes_all_arms(name, overrides, architecture, slots):
    draft = TrainConfig.load(ROOT / f"configs/{name}.yaml", ["draft.block_size=16", *overrides]).draft_config(QWEN3_8B, "x", "y")
    assert (draft.architecture, draft.num_slots) == (architecture, slots)
    convolved = architecture == "DFlash2DraftModel" or overrides == ["draft.conv=true"]
    assert draft.conv == (ConvConfig(2, 16) if convolved else None)


def test_a_convolution_that_does_not_divide_the_width_is_a_sentence():
    config = TrainConfig.load(ROOT / "configs/qwen3-8b.yaml", ["draft.conv=true", "draft.conv_group_size=24"])
    with pytest.raises(UserError, match=r"conv_group_size must divide hidden_size 4096, got 24"):
        config.draft_config(QWEN3_8B, "x", "y")


@pytest.mark.parametrize(
    "overrides",
    [
        ["objective.lambd=0"],
        ["objective.gamma=1.0"],
        ["head.lilicorr.candidate_topk=16"],
        ["head.lilicorr.num_layers=0"],
        ["draft.without=[pass_hidden_proj, context_proj]"],
        ["draft.freeze_backbone=true", "run.warm_start=somewhere"],
    ],
)
def test_every_ablation_is_a_configuration(overrides):
    config = TrainConfig.load(ROOT / "configs/smollm2-135m.yaml", overrides)
    assert config.hash() != TrainConfig.load(ROOT / "configs/smollm2-135m.yaml").hash()
    config.draft_config(QWEN3_8B, "x", "y")


@pytest.mark.parametrize(("conversations", "steps"), [(1_397_048, 130_968), (1_396_889, 130_956)])
def test_the_step_count_follows_the_papers_rule(conversations, steps):
    assert Schedule(np.arange(conversations), 64, seed=0).steps_per_epoch * 6 == steps


def test_every_zero_stage_has_its_file():
    for stage in range(4):
        values = json.loads((ROOT / f"configs/deepspeed/zero{stage}.json").read_text())
        assert values["zero_optimization"]["stage"] == stage


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["run.sede=1"], r"run\.sede is no known key; did you mean 'seed'\?"),
        (["optimiser.lr=1"], r"optimiser is no known key; did you mean 'optimizer'\?"),
        (["draft.head=lilicor"], r"draft\.head must be one of .*did you mean 'lilicorr'"),
        (["head.lilicorr.candidate_topk=eight"], r"head\.lilicorr\.candidate_topk must be an integer, got \"eight\""),
        (["run.precision=fp16"], r"run\.precision must be one of bf16, fp32"),
        (["optimizer.lr=-1"], r"optimizer\.lr must be positive"),
        (["optimizer.eps=0"], r"optimizer\.eps must be positive"),
        (["optimizer.weight_decay=-0.1"], r"optimizer\.weight_decay must not be negative"),
        (["evaluation.conversations=0"], r"evaluation\.conversations must be at least 1, or null"),
        (["evaluation.every=2", "data.holdout=0"], r"evaluation\.every is 2, but data\.holdout is 0 .* raise data\.holdout"),
        (["run.max_steps=0"], r"run\.max_steps must be at least 1"),
        (["data.mode=true"], r"data\.mode must be one of offline, online"),
        (["run.seed"], r"override 'run\.seed': must have the form key\.sub=value"),
        (["run.seed.x=1"], r"run\.seed is a value, not a section"),
        (["schedule.warmup=1.5"], r"schedule\.warmup is a share"),
        (["objective.loss=common"], r"objective\.loss is 'common', but this head has only own; set it to own"),
        (["objective.dspark.beta=0"], r"objective\.dspark\.beta must be positive"),
        (["objective.domino.base_until=null"], r"objective\.domino\.base_until null with base 1 would never train the head"),
        (["objective.domino.base_until=0"], r"objective\.domino\.base_until must lie in \(0, 1\], or null"),
        (["objective.dspark.confidense=1"], r"objective\.dspark\.confidense is no known key; did you mean 'confidence'"),
        (
            ["draft.head=domino", "objective.loss=common", *HEAD_ANCHORS],
            r"objective\.head_anchors would leave the other anchors",
        ),
        (
            ["draft.head=dspark", "objective.loss=common", "head.dspark.enable_confidence_head=false", *HEAD_ANCHORS],
            r"objective\.head_anchors limits DSpark's L1 and confidence losses, and this run has neither; set it to null",
        ),
        (["draft.head=dflash2", "draft.conv=false"], r"draft\.conv cannot be false: dflash2 has the convolution"),
        (["draft.conv_group_size=0"], r"draft\.conv_group_size must be at least 1"),
        (["draft.freeze_backbone=true"], r"draft\.freeze_backbone would keep the backbone at random weights; give"),
        (["draft.freeze_backbone=true", "draft.head=dflash"], r"draft\.freeze_backbone leaves dflash nothing to train"),
    ],
)
def test_a_wrong_key_or_value_is_one_sentence_that_names_it(overrides, sentence):
    with pytest.raises(UserError, match=sentence):
        TrainConfig.load(ROOT / "configs/smollm2-135m.yaml", overrides)


def test_a_missing_key_is_named(tmp_path):
    values = yaml.safe_load((ROOT / "configs/smollm2-135m.yaml").read_text())
    del values["data"]["path"]
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(UserError, match=r"data\.path is missing and has no default"):
        TrainConfig.load(tmp_path / "c.yaml")
    (tmp_path / "c.yaml").write_text("run: {seed: 1, seed: 2}")
    with pytest.raises(UserError, match="the key 'seed' stands twice"):
        TrainConfig.load(tmp_path / "c.yaml")


def test_a_head_that_is_chosen_and_not_described_is_an_error(tmp_path):
    values = yaml.safe_load((ROOT / "configs/smollm2-135m.yaml").read_text())
    del values["head"]
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(UserError, match=r"head\.lilicorr is missing"):
        TrainConfig.load(tmp_path / "c.yaml").draft_config(QWEN3_8B, "x", "y")
    plain = TrainConfig.load(tmp_path / "c.yaml", ["draft.head=dflash"])
    assert plain.draft_config(QWEN3_8B, "x", "y").architecture == "DFlashDraftModel"


def test_a_deepspeed_file_may_not_set_what_the_run_decides(tmp_path):
    (tmp_path / "ds.json").write_text('{"train_batch_size": 8}')
    config = TrainConfig.load(ROOT / "configs/smollm2-135m.yaml", [f"deepspeed.config={tmp_path}/ds.json"])
    with pytest.raises(UserError, match=r"train_batch_size is decided by run\.batch_size"):
        config.resolved()


def test_the_hash_names_the_numbers_and_not_the_place(tmp_path):
    path = ROOT / "configs/smollm2-135m.yaml"
    hashes = {
        key: TrainConfig.load(path, [key]).hash()
        for key in (
            "run.seed=0",
            "run.output=elsewhere",
            "run.stop_after=5",
            "run.seed=1",
            "optimizer.lr=2e-3",
            "draft.head=dflash",
        )
    }
    assert hashes["run.seed=0"] == hashes["run.output=elsewhere"] == hashes["run.stop_after=5"]
    assert len(set(hashes.values())) == 4


def test_print_config_prints_yaml_that_loads_to_the_same_configuration(tmp_path):
    command = [
        sys.executable,
        "trainer/main.py",
        "--config",
        "configs/qwen3-8b.yaml",
        "--print-config",
        "run.seed=7",
        "optimizer.lr=1e-3",
    ]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (tmp_path / "again.yaml").write_text(printed)
    again = TrainConfig.load(tmp_path / "again.yaml")
    assert again.run.seed == 7 and again.optimizer.lr == 1e-3
    assert f"# hash: {again.hash()}" in printed
    command[-2] = "run.sede=7"
    failed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert failed.returncode == 1 and failed.stderr.startswith("error: ") and failed.stderr.count("\n") == 1


def test_the_learning_rate_warms_up_and_decays():
    linear = [learning_rate(step, 100, 1.0, ScheduleConfig()) for step in range(101)]
    assert linear[:4] == [0.25, 0.5, 0.75, 1.0] and linear[4] == 1.0 and linear[52] == 0.5 and linear[100] == 0.0
    cosine = ScheduleConfig(kind="cosine", warmup=0.0, floor=0.1)
    assert learning_rate(0, 10, 2.0, cosine) == 2.0 and abs(learning_rate(5, 10, 2.0, cosine) - 1.1) < 1e-9
