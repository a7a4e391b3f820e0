from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from vllm_lilicorr.errors import UserError
from vllm_lilicorr.trainer import cache as cache_command
from vllm_lilicorr.trainer import states as states_module
from vllm_lilicorr.trainer.config import TrainConfig
from vllm_lilicorr.trainer.corpus import Corpus, Origin
from vllm_lilicorr.trainer.data import collate, draw_anchors
from vllm_lilicorr.trainer.objectives import OBJECTIVES, ObjectiveConfig
from vllm_lilicorr.trainer.states import CachedStates, OnlineStates, load_vocabulary, read_target_config


@pytest.fixture
def make_cache(tiny_target, tiny_corpus, tmp_path, train_settings, monkeypatch):
    monkeypatch.setattr(states_module, "SHARD_BYTES", 100_000)  # several shards of the tiny corpus
    config = train_settings(
        tiny_target, tiny_corpus, tmp_path / "run", data={"mode": "offline", "cache": str(tmp_path / "states")}
    )

    def run(*arguments: str) -> Path:
        cache_command.main(["--config", str(config), *arguments])
        return tmp_path / "states"

    run.config = config  # type: ignore[attr-defined]
    return run


def opened(folder, target, corpus, layers=(1, 3), length=96):
    return CachedStates(folder, Corpus(corpus), Origin.of(target), layers, length)


def test_offline_and_online_states_give_the_same_loss_within_bf16_rounding(make_cache, tiny_target, tiny_corpus):
    from vllm_lilicorr.model import Draft
    from vllm_lilicorr.target import load_target

    corpus = Corpus(tiny_corpus)
    config = TrainConfig.load(make_cache.config)
    origin = Origin.of(tiny_target)
    torch.manual_seed(0)
    draft = Draft(config.draft_config(read_target_config(tiny_target), "tiny", origin.tokenizer_hash))
    vocabulary = load_vocabulary(tiny_target, torch.float32, torch.device("cpu"))
    objective = OBJECTIVES["lilicorr"](draft, ObjectiveConfig(), vocabulary)
    cached = opened(make_cache("--dtype", "float32"), tiny_target, tiny_corpus)
    rows = [corpus[i] for i in range(4)]
    anchors = [draw_anchors(0, 0, row, len(row.ids), 16) for row in rows]

    def loss(source):
        return float(objective(collate(rows, anchors, source.of([0, 1, 2, 3], rows, 96), 96))[0].detach())

    exact = loss(OnlineStates(load_target(tiny_target, draft.config.target_layer_ids, torch.float32)))
    assert abs(loss(cached) - exact) < 2e-2 * exact
    in_bf16 = OnlineStates(load_target(tiny_target, draft.config.target_layer_ids, torch.bfloat16))
    shutil.rmtree(cached.folder)
    assert abs(loss(opened(make_cache(), tiny_target, tiny_corpus)) - loss(in_bf16)) < 2e-2 * exact


def test_an_interrupted_cache_continues_after_the_last_finished_shard(make_cache, tiny_target, tiny_corpus, monkeypatch):
    folder = make_cache()
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    shards = sorted(path.name for path in folder.glob("states-*.json"))
    assert len(shards) > 3
    (folder / shards[2]).unlink()
    (folder / "states-00002.bin").write_bytes(b"half a shard")
    (folder / ".states-00002.bin.1").write_bytes(b"what a killed writer left")
    with pytest.raises(UserError, match=r"is unfinished \(states-00002.json is missing\)"):
        opened(folder, tiny_target, tiny_corpus)
    written = []
    monkeypatch.setattr(
        cache_command, "write_shard", lambda f, n, m, r, real=states_module.write_shard: (written.append(n), real(f, n, m, r))
    )
    make_cache()
    assert written == [2]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole


def test_shards_of_two_machines_make_the_same_cache(make_cache, tiny_target, tiny_corpus):
    folder = make_cache("--shard", "1/2")
    make_cache("--shard", "0/2")
    by_two = {path.name: path.read_bytes() for path in folder.iterdir()}
    shutil.rmtree(folder)
    make_cache()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == by_two


def test_damaged_states_are_found_when_they_are_first_read(make_cache, tiny_target, tiny_corpus):
    folder = make_cache()
    data = bytearray((folder / "states-00000.bin").read_bytes())
    data[1000] ^= 1
    (folder / "states-00000.bin").write_bytes(data)
    corpus, states = Corpus(tiny_corpus), opened(folder, tiny_target, tiny_corpus)
    states.of([len(corpus) - 1], [corpus[len(corpus) - 1]], 96)
    with pytest.raises(UserError, match=r"states of conversation 0 are damaged .* remove states-00000.json"):
        states.of([0], [corpus[0]], 96)
    (folder / "states-00000.bin").write_bytes(data[:-2])
    with pytest.raises(UserError, match=r"expected"):
        opened(folder, tiny_target, tiny_corpus)
    with pytest.raises(UserError, match="damaged|expected"):
        make_cache("--verify")


def test_a_cache_of_another_corpus_layers_or_length_is_refused(make_cache, tiny_target, tiny_corpus):
    folder = make_cache()
    with pytest.raises(UserError, match=r"layers \[1, 3\], this run needs \[0, 3\]"):
        opened(folder, tiny_target, tiny_corpus, layers=(0, 3))
    with pytest.raises(UserError, match="first 96 tokens of each conversation, data.max_length is 97"):
        opened(folder, tiny_target, tiny_corpus, length=97)
    meta = json.loads((folder / "states.json").read_text())
    (folder / "states.json").write_text(json.dumps(meta | {"corpus": "another"}))
    with pytest.raises(UserError, match="corpus another"):
        opened(folder, tiny_target, tiny_corpus)
    with pytest.raises(UserError, match="holds no cached states"):
        opened(folder / "nowhere", tiny_target, tiny_corpus)


def test_the_vocabulary_is_read_without_the_rest_and_tied_heads_are_one_tensor(tiny_target, smollm2):
    from vllm_lilicorr.target import load_target

    ours = load_vocabulary(tiny_target, torch.float32, torch.device("cpu"))
    theirs = load_target(tiny_target).vocabulary
    assert torch.equal(ours.embedding, theirs.embedding) and torch.equal(ours.lm_head, theirs.lm_head)
    tied = load_vocabulary(smollm2, torch.bfloat16, torch.device("cpu"))
    assert tied.embedding is tied.lm_head and tied.embedding.shape == (49152, 576)


def test_a_fine_tuned_target_has_another_fingerprint_and_a_copy_the_same(tiny_target, tmp_path):
    from safetensors.torch import load_file, save_file

    copy = tmp_path / "copy"
    shutil.copytree(tiny_target, copy)
    assert Origin.of(copy).weights == Origin.of(tiny_target).weights
    tensors = load_file(copy / "model.safetensors")
    tensors["model.norm.weight"] += 1.0
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    assert Origin.of(copy).weights != Origin.of(tiny_target).weights


def test_training_offline_without_a_cache_says_how_to_make_one(tiny_target, tiny_corpus, tmp_path, train_settings):
    config = train_settings(tiny_target, tiny_corpus, tmp_path / "run", data={"mode": "offline"})
    command = [sys.executable, "trainer/main.py", "--config", str(config)]
    import os

    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"DS_ACCELERATOR": "cpu"}, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and "make them with trainer/cache.py" in errors[0] and "Traceback" not in done.stderr


def test_a_cache_made_for_fewer_held_out_conversations_is_refused_before_training(make_cache):
    from vllm_lilicorr.trainer.loop import Trainer

    make_cache()
    Trainer(TrainConfig.load(make_cache.config))
    with pytest.raises(UserError, match="no continuation of held-out conversation .* run trainer/cache.py again"):
        Trainer(TrainConfig.load(make_cache.config, ["data.holdout=5"]))


def test_cached_rows_equal_what_the_target_computes(make_cache, tiny_target, tiny_corpus):
    from vllm_lilicorr.target import load_target

    states = opened(make_cache(), tiny_target, tiny_corpus)
    corpus = Corpus(tiny_corpus)
    target = load_target(tiny_target, (1, 3), torch.bfloat16)
    for index in (0, 7, 23):
        ids = torch.from_numpy(corpus[index].ids.astype(np.int64))[None]
        expected = target.forward(ids, torch.arange(ids.shape[1])[None])
        taps, final = states.of([index], [corpus[index]], 96)[0]
        assert torch.equal(taps, expected.taps[0, :96]) and torch.equal(final, expected.final[0, :96])
