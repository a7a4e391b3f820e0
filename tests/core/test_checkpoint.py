"""Checkpoints: the public format in both spellings, every way a file can be wrong, and kills while saving."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_lilicorr import io
from vllm_lilicorr.check import main as check
from vllm_lilicorr.config import ConvConfig
from vllm_lilicorr.errors import UserError
from vllm_lilicorr.model.checkpoint import INDEX, WEIGHTS, load_draft, save_draft

from .conftest import HEADS, make_config, make_draft, make_target


@pytest.fixture(params=[*HEADS, "lilicorr+conv"])
def saved(request, tmp_path):
    folder = tmp_path / "checkpoint"
    head, _, conv = request.param.partition("+")
    changes = {"conv": ConvConfig(kernel_size=3, group_size=8)} if conv else {}
    save_draft(make_draft(make_config(head, **changes)), folder)
    return folder


@pytest.fixture
def lilicorr(tmp_path):
    folder = tmp_path / "checkpoint"
    save_draft(make_draft(), folder)
    return folder


def rewrite(folder, change):
    """Apply `change` to the dictionary of tensors on disk."""
    tensors = load_file(folder / WEIGHTS)
    save_file(change(tensors) or tensors, folder / WEIGHTS)


def edit_config(folder, change):
    values = json.loads((folder / "config.json").read_text())
    change(values)
    (folder / "config.json").write_text(json.dumps(values))


def states_equal(a, b):
    return a.state_dict().keys() == b.state_dict().keys() and all(
        torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values())
    )


def refusal(folder):
    """The one sentence with which loading refuses; the command says the same on stderr."""
    with pytest.raises(UserError) as caught:
        load_draft(folder)
    sentence = str(caught.value)
    assert "\n" not in sentence and str(folder) in sentence
    with pytest.raises(UserError) as from_command:
        check([str(folder)])
    assert str(from_command.value) == sentence
    return sentence


def test_a_round_trip_is_bit_exact_and_byte_stable(saved, tmp_path):
    first = load_draft(saved)
    assert first.dtype == torch.bfloat16
    save_draft(first, tmp_path / "again")
    assert states_equal(first, load_draft(tmp_path / "again"))
    for name in (WEIGHTS, "config.json", "README.md"):
        assert (saved / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_fp32_weights_are_rounded_to_bf16_once(lilicorr):
    original, loaded = make_draft(), load_draft(lilicorr, dtype=torch.float32)
    for a, b in zip(original.state_dict().values(), loaded.state_dict().values()):
        assert torch.equal(a.bfloat16().float(), b)


def test_names_are_the_public_ones_and_no_target_weight_is_held(lilicorr):
    names = set(load_file(lilicorr / WEIGHTS))
    block = "input_layernorm.weight post_attention_layernorm.weight self_attn.q_proj.weight self_attn.k_proj.weight "
    block += "self_attn.v_proj.weight self_attn.o_proj.weight self_attn.q_norm.weight self_attn.k_norm.weight "
    block += "mlp.gate_proj.weight mlp.up_proj.weight mlp.down_proj.weight"
    tower = "attn_norm.weight attn.in_proj_weight attn.in_proj_bias attn.out_proj.weight attn.out_proj.bias "
    tower += "mlp_norm.weight mlp.up_proj.weight mlp.up_proj.bias mlp.down_proj.weight mlp.down_proj.bias"
    linears = "token_proj pass_hidden_proj context_proj feature_norm feature_mlp.up_proj feature_mlp.down_proj "
    linears += "factor_input_proj out_head in_head anchor_out_head"
    tables = "slot_embedding rank_embedding relative_slot_bias same_slot_bias output_norm.weight anchor_norm.weight"
    expected = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    expected |= {f"layers.{i}.{name}" for i in range(2) for name in block.split()}
    expected |= {f"lilicorr.layers.{i}.{name}" for i in range(2) for name in tower.split()}
    expected |= {f"lilicorr.{name}.{part}" for name in linears.split() for part in ("weight", "bias")}
    expected |= {f"lilicorr.{name}" for name in tables.split()}
    assert names == expected


def test_older_spellings_and_a_model_prefix_are_read(lilicorr):
    expected = load_draft(lilicorr)
    old = (
        (".feature_norm.", ".feature_mlp.0."),
        (".feature_mlp.up_proj.", ".feature_mlp.1."),
        (".feature_mlp.down_proj.", ".feature_mlp.3."),
        (".mlp.up_proj.", ".mlp.0."),
        (".mlp.down_proj.", ".mlp.2."),
    )

    def spell(tensors):
        renamed = {}
        for name, tensor in tensors.items():
            if name.startswith("lilicorr."):
                for new, sequence in old:
                    name = name.replace(new, sequence)
            renamed["model." + name] = tensor
        assert "model.lilicorr.layers.1.mlp.2.bias" in renamed and "model.lilicorr.feature_mlp.0.weight" in renamed
        return renamed

    rewrite(lilicorr, spell)
    assert states_equal(load_draft(lilicorr), expected)


def shard(folder):
    tensors = load_file(folder / WEIGHTS)
    names = sorted(tensors)
    weight_map = {}
    for i, part in enumerate((names[::2], names[1::2])):
        file = f"model-{i + 1:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    (folder / WEIGHTS).unlink()
    return weight_map


def test_sharded_checkpoints_load(saved):
    expected = load_draft(saved)
    shard(saved)
    assert states_equal(load_draft(saved), expected)


def test_broken_shards_are_named(lilicorr):
    weight_map = shard(lilicorr)
    name = sorted(weight_map)[0]
    (lilicorr / INDEX).write_text(json.dumps({"weight_map": weight_map | {name: "model-00002-of-00002.safetensors"}}))
    assert name in refusal(lilicorr)
    (lilicorr / INDEX).write_text(json.dumps({"weight_map": weight_map | {name: "absent.safetensors"}}))
    assert "absent.safetensors" in refusal(lilicorr)
    (lilicorr / INDEX).write_text("{}")
    assert "weight_map" in refusal(lilicorr)


def test_missing_unexpected_and_misshapen_tensors_are_named(lilicorr):
    whole = load_file(lilicorr / WEIGHTS)
    cases = (
        ({k: v for k, v in whole.items() if k != "lilicorr.out_head.bias"}, "lacks lilicorr.out_head.bias"),
        ({k: v for k, v in whole.items() if ".mlp." not in k}, "and 11 more"),
        (whole | {"lilicorr.extra": torch.zeros(2)}, "holds lilicorr.extra"),
        (whole | {"norm.weight": torch.ones(47)}, r"norm.weight has shape [47], but config.json calls for [48]"),
        (whole | {"norm.weight": torch.ones(48, dtype=torch.int8)}, "norm.weight has dtype I8"),
        (whole | {"model.norm.weight": torch.ones(48)}, "twice"),
    )
    for tensors, expected in cases:
        save_file(tensors, lilicorr / WEIGHTS)
        assert expected in refusal(lilicorr)


def test_truncated_and_foreign_files_are_refused(lilicorr):
    whole = (lilicorr / WEIGHTS).read_bytes()
    for content in (whole[:-7], whole[:100], b"", b"not a safetensors file at all"):
        (lilicorr / WEIGHTS).write_bytes(content)
        assert "truncated or no safetensors file" in refusal(lilicorr)
    (lilicorr / WEIGHTS).unlink()
    assert f"has no {WEIGHTS}" in refusal(lilicorr)
    (lilicorr / "pytorch_model.bin").write_bytes(b"x")
    assert "pickle files can run code" in refusal(lilicorr)


def test_a_head_under_the_plain_architecture_is_refused(lilicorr):
    def disguise(values):
        values["architectures"] = ["DFlashDraftModel"]
        del values["dflash_config"]["projector_type"]

    edit_config(lilicorr, disguise)
    sentence = refusal(lilicorr)
    assert "silently ignore the head" in sentence and '["LiLiCorrDraftModel"]' in sentence


def test_a_path_that_is_no_folder_is_refused(lilicorr):
    assert "is a file" in refusal(lilicorr / "config.json")
    assert "does not exist" in refusal(lilicorr / "absent")


def test_the_model_card_tells_method_target_geometry_and_serving(tmp_path):
    draft = make_draft(make_config(target_name="Some-Target", tokenizer_hash="f00d"))
    save_draft(draft, tmp_path / "c")
    card = (tmp_path / "c" / "README.md").read_text()
    for expected in ("LiLiCorr", "Some-Target", "f00d", "| block size | 6 (5 drafted) |", "vllm serve", "logit_scale | 8.0"):
        assert expected in card


def test_a_full_disk_leaves_the_old_checkpoint(lilicorr, monkeypatch):
    before = {p.name: p.read_bytes() for p in lilicorr.iterdir()}
    for target, name in ((os, "fsync"), (os, "rename")):
        with monkeypatch.context() as patch, pytest.raises(UserError, match="the disk is full"):
            patch.setattr(target, name, lambda *a, **k: (_ for _ in ()).throw(OSError(28, "No space left on device")))
            if name == "rename":
                save_draft(make_draft(seed=1), lilicorr.parent / "new")
            else:
                save_draft(make_draft(seed=1), lilicorr)
    assert {p.name: p.read_bytes() for p in lilicorr.iterdir()} == before
    assert [p.name for p in lilicorr.parent.iterdir()] == [lilicorr.name], "leftovers stand beside the checkpoint"


def test_everything_is_flushed_before_it_takes_the_old_ones_place(lilicorr, monkeypatch):
    flushed: set[str] = set()
    flush, switch = io.fsync_path, io._switch
    monkeypatch.setattr(io, "fsync_path", lambda path: (flushed.add(path.name), flush(path)))

    def switched(fresh, path):
        assert flushed == {fresh.name, "config.json", WEIGHTS, "README.md"}
        switch(fresh, path)

    monkeypatch.setattr(io, "_switch", switched)
    save_draft(make_draft(seed=1), lilicorr)
    assert lilicorr.parent.name in flushed, "the rename itself is flushed too"


SAVER = """
import itertools, json, os, signal, sys, warnings
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, {root!r})
from tests.core.conftest import LILICORR, make_config, make_draft
from vllm_lilicorr.model.checkpoint import save_draft

warnings.simplefilter("ignore")
folder = Path(sys.argv[1])
# Of other weights, another configuration and another card each, so that any mix of the two is neither.
drafts = [make_draft(make_config(replace(LILICORR, logit_scale=scale)), seed=int(scale)) for scale in (8.0, 4.0)]


def content():
    return {{file.name: file.read_bytes() for file in folder.iterdir()}} if folder.exists() else None


def killed_at(step):
    # Whether saving the new drafter had a step of that number: the child dies in front of it.
    child = os.fork()
    if child == 0:
        seen = itertools.count(1)

        def count(event, arguments):
            if event.split(".")[0] in ("open", "os", "shutil", "tempfile", "ctypes") and next(seen) == step:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        save_draft(drafts[1], folder)
        os._exit(0)
    return os.waitpid(child, 0)[1] == signal.SIGKILL


save_draft(drafts[1], folder)
new = content()
save_draft(drafts[0], folder)
old = content()
found = []
for step in itertools.count(1):
    if not killed_at(step):
        break
    now = content()
    found.append("old" if now == old else "new" if now == new else "mixed")
    save_draft(drafts[0], folder)  # removes what the killed one left, so that every child has the same steps
print(json.dumps([found, content() == new, os.listdir(folder.parent)]))  # the last child lived
"""


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path, pytestconfig):
    """A child that saves over a checkpoint is killed in front of its first operation on a file, then its second, and so on."""
    code = SAVER.format(root=str(pytestconfig.rootpath))
    command = [sys.executable, "-c", code, str(tmp_path / "checkpoint")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found, whole, left = json.loads(done.stdout)
    assert found == ["old"] * found.count("old") + ["new"] * found.count("new"), found
    assert found.count("old") > 10 and "new" in found, "the steps of saving, before and behind the switch, were not seen"
    assert whole and left == ["checkpoint"], "a later save removes what killed ones left"


def run_check(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "vllm_lilicorr.check", *map(str, arguments)], capture_output=True, text=True, timeout=120
    )


@pytest.fixture
def tiny_target(tmp_path):
    """A target folder with a tokenizer of 97 words, the last of them reserved."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path / "target"
    make_target(make_config()).model.save_pretrained(folder)
    words = {f"w{i}": i for i in range(96)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<mask>"]})
    tokenizer.save_pretrained(folder)
    return folder


def test_check_prints_one_json_object_and_compares_the_target(lilicorr, tiny_target):
    done = run_check(lilicorr, "--target", tiny_target, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    parameters = found["parameters"]
    assert parameters["backbone"] + parameters["head"] == parameters["total"]
    assert parameters["total"] == sum(t.numel() for t in load_file(lilicorr / WEIGHTS).values())
    assert found["architecture"] == "LiLiCorrDraftModel" and found["geometry"]["block_size"] == 6


def test_check_says_in_one_sentence_what_does_not_fit(lilicorr, tiny_target):
    from vllm_lilicorr.config import DraftConfig
    from vllm_lilicorr.target import TargetShape, check_fits, load_tokenizer, tokenizer_hash

    config, shape, tokenizer = DraftConfig.load(lilicorr), TargetShape.load(tiny_target), load_tokenizer(tiny_target)
    assert check_fits(config, shape, tokenizer) == []
    assert check_fits(replace(config, tokenizer_hash=tokenizer_hash(tokenizer)), shape, tokenizer) == []
    (warning,) = check_fits(replace(config, target_name="other/model"), shape, tokenizer)
    assert "other/model" in warning
    for changes, expected in (
        ({"hidden_size": 64}, "hidden_size is 64, but the target target has 48"),
        ({"vocab_size": 96}, "vocab_size is 96"),
        ({"num_target_layers": 5}, "num_target_layers is 5"),
        ({"mask_token_id": 7}, "a token that occurs in text"),
        ({"tokenizer_hash": "0"}, "another tokenizer"),
    ):
        with pytest.raises(UserError, match=expected):
            check_fits(replace(config, **changes), shape, tokenizer)

    edit_config(lilicorr, lambda values: values.update(num_target_layers=9))
    done = run_check(lilicorr, "--target", tiny_target)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_saving_never_deletes_what_is_no_checkpoint(lilicorr, tmp_path, monkeypatch):
    stranger = tmp_path / "home"
    stranger.mkdir()
    (stranger / "thesis.txt").write_text("years of work")
    (stranger / "inner").mkdir()
    (lilicorr / "notes.txt").write_text("mine")
    monkeypatch.chdir(stranger)
    for path in (stranger, stranger / "inner" / "..", ".", lilicorr, "/"):
        with pytest.raises(UserError, match="would delete"):
            save_draft(make_draft(), path)
    assert (stranger / "thesis.txt").read_text() == "years of work" and (lilicorr / "notes.txt").exists()
    save_draft(make_draft(), stranger / "inner")  # an empty folder is fine
    save_draft(make_draft(seed=1), stranger / "inner")  # and so is an earlier checkpoint
    assert states_equal(load_draft(stranger / "inner"), load_draft(stranger / "inner"))


def test_a_target_that_brings_code_is_refused_without_asking_to_run_it(tmp_path, monkeypatch):
    from vllm_lilicorr.target import load_target, load_tokenizer

    auto = {"AutoConfig": "brought.C", "AutoModelForCausalLM": "brought.C", "AutoTokenizer": ["brought.C", None]}
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_text(json.dumps({"model_type": "brought", "auto_map": auto}))
    (tmp_path / "brought.py").write_text("import os\nos.environ['BROUGHT_CODE_RAN'] = '1'\n")
    asked = []
    monkeypatch.setattr("builtins.input", lambda question: asked.append(question) or "y")
    for load in (load_target, load_tokenizer):
        with pytest.raises(UserError, match="cannot be loaded"):
            load(tmp_path)
    assert not asked and "BROUGHT_CODE_RAN" not in os.environ


def test_a_target_that_lacks_weights_is_refused(tiny_target):
    from vllm_lilicorr.target import load_target

    tensors = load_file(tiny_target / WEIGHTS)
    lost = next(name for name in tensors if "q_proj" in name)
    save_file({k: v for k, v in tensors.items() if k != lost}, tiny_target / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(UserError, match="lack"):
        load_target(tiny_target)


def test_a_closed_pipe_is_no_error_and_a_full_one_is_a_sentence(lilicorr):
    command = f"{sys.executable} -m vllm_lilicorr.check {lilicorr}"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    piped = subprocess.run(["bash", "-o", "pipefail", "-c", f"{command} | true"], capture_output=True, text=True, env=environment)
    assert (piped.returncode, piped.stderr) == (0, "")
    full = subprocess.run(["bash", "-c", f"{command} > /dev/full"], capture_output=True, text=True, env=environment)
    assert full.returncode == 1 and full.stderr.startswith("error: the output cannot be written")
    assert full.stderr.count("\n") == 1


def test_an_empty_target_is_refused_and_a_mistyped_one_is_not_looked_up(lilicorr):
    for target, expected in (("", "the path is empty"), ("nope", "nope: does not exist")):
        done = run_check(lilicorr, "--target", target)
        assert done.returncode == 1 and expected in done.stderr
