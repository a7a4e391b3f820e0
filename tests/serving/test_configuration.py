"""The speculative configuration, as a user writes it: what is filled in, what is refused and in which words."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pairs
import pytest
from engines import HERE, RELEASES, environment
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from vllm_lilicorr.model import Draft
from vllm_lilicorr.model.checkpoint import save_draft
from vllm_lilicorr.serving import hooks

pytestmark = pytest.mark.slow


def _edited(draft: Path, folder: Path, change: Any) -> str:
    shutil.copytree(draft, folder)
    values = json.loads((folder / "config.json").read_text())
    change(values)
    (folder / "config.json").write_text(json.dumps(values))
    return str(folder)


def _tensors(draft: Path, folder: Path, change: Any) -> str:
    shutil.copytree(draft, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def _sharded(draft: Path, folder: Path) -> str:
    """Return a copy in two files whose index has lost a tensor of one."""
    shutil.copytree(draft, folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for number, half in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name] for name in half}, folder / f"part{number}.safetensors", {"format": "pt"})
        weight_map |= dict.fromkeys(half, f"part{number}.safetensors")
    del weight_map[names[0]]
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return str(folder)


def save(target: Path, folder: Path, head: str) -> Path:
    save_draft(Draft(pairs.draft_config(target, head)), folder)
    return folder


SHIPPED = HERE.parents[1] / "configs/lilicorr.json"


def _plain(values: dict[str, Any]) -> None:
    values["architectures"] = ["DFlashDraftModel"]
    values["dflash_config"].pop("projector_type")


@pytest.fixture(scope="module", params=RELEASES)
def outcomes(request: pytest.FixtureRequest, pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every case below, run in one process of that release."""
    target, draft = pair
    root = tmp_path_factory.mktemp("configs")
    files = {
        "good": {"model": "checkpoint"},
        "unknown": {"model": "checkpoint", "num_speculative_token": 3},
    }
    shutil.copytree(draft, root / "checkpoint")
    for name, values in files.items():
        (root / f"{name}.json").write_text(json.dumps(values))
    (root / "broken.json").write_text('{\n  "model": "checkpoint",\n  num: 3\n}')
    (root / "list.json").write_text("[]")
    other = pairs.make_target(root / "other", seed=1)
    values = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(values | {"num_hidden_layers": 5}))

    others = {name: str(save(target, root / name, name)) for name in ("dflash2", "dspark", "domino", "lilicorr-conv")}
    wordy = shutil.copytree(target, root / "wordy")
    tokenizer = AutoTokenizer.from_pretrained(wordy)
    tokenizer.add_tokens(["<|new|>"])
    tokenizer.save_pretrained(wordy)

    def model(path: str, **more: Any) -> dict[str, Any]:
        return {"model": str(target), "speculative_config": {"model": path, **more}}

    ours = str(draft)
    cases: list[tuple[str, Any]] = [
        ("no speculation", {"model": str(target)}),
        ("defaults", model(ours)),
        ("options", model(ours, num_speculative_tokens=3, path_rule="exact", method="dflash")),
        ("dashes", model(ours, **{"num-speculative-tokens": 2})),
        ("narrow candidates", model(ours, draft_dtype="bfloat16")),
        ("narrower candidates", model(ours, draft_dtype="int8")),
        ("threshold", model(ours, confidence_threshold=0.1)),
        ("stock backend", model(ours, backend="stock")),
        ("file", {"model": str(target), "speculative_config": str(root / "good.json")}),
        ("flags", {"model": str(target), "spec_model": ours, "spec_tokens": 3}),
        ("short", model(_edited(draft, root / "short", lambda v: v.update(max_position_embeddings=100)))),
        ("ngram", {"model": str(target), "speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}),
        ("plain", model(_tensors(Path(_edited(draft, root / "p", _plain)), root / "plain",
                                 lambda t: [t.pop(k) for k in list(t) if k.startswith("lilicorr.")]))),
        *((name, model(path)) for name, path in others.items()),
        ("dspark by name", model(others["dspark"], method="dspark")),
        ("dspark of others", model(_edited(Path(others["dspark"]), root / "o1", lambda v: v.update(dspark_draft_topk=8)),
                                   method="dspark", num_speculative_tokens=7)),
        ("dflash2 of others", model(_edited(Path(others["dflash2"]), root / "o2",
                                            lambda v: v["dflash_config"].update(final_logit_softcapping=30.0)),
                                    method="dflash", num_speculative_tokens=7)),
        ("dspark with embedding", model(_tensors(Path(others["dspark"]), root / "o3",
                                                 lambda t: t.update({"embed_tokens.weight": t["fc.weight"].clone()})),
                                        method="dspark", num_speculative_tokens=7)),
        ("dspark of others, no method", model(str(root / "o1"), num_speculative_tokens=7)),
        ("dflash2 of others, no method", model(str(root / "o2"), num_speculative_tokens=7)),
        ("dspark with embedding, no method", model(str(root / "o3"), num_speculative_tokens=7)),
        ("scaled dspark", model(_edited(Path(others["dspark"]), root / "o4", lambda v: v.update(logit_scale=0.5)),
                                num_speculative_tokens=7)),
        ("unscaled dspark", model(_edited(Path(others["dspark"]), root / "o5", lambda v: v.update(logit_scale=1.0)))),
        ("plain of others", model(_edited(root / "plain", root / "o6", lambda v: v.update(hidden_act="gelu")),
                                   num_speculative_tokens=7)),
        ("cli file", ["--speculative-config", str(root / "good.json")]),
        ("cli inline", ["--speculative-config", json.dumps({"model": ours})]),
        ("cli short", ["-sc", str(root / "good.json")]),
        # refused
        ("missing file", {"model": str(target), "speculative_config": str(root / "none.json")}),
        ("broken file", {"model": str(target), "speculative_config": str(root / "broken.json")}),
        ("list file", {"model": str(target), "speculative_config": str(root / "list.json")}),
        ("unknown in file", {"model": str(target), "speculative_config": str(root / "unknown.json")}),
        ("unknown inline", model(ours, path_rul="greedy")),
        ("bad rule", model(ours, path_rule="greedi")),
        ("bad backend", model(ours, backend="stok")),
        ("bad dtype", model(ours, draft_dtype="bfloat")),
        ("threshold of one", model(ours, confidence_threshold=1)),
        ("threshold in words", model(ours, confidence_threshold="0.1")),
        ("threshold without candidates", model(others["dspark"], confidence_threshold=0.1)),
        ("threshold stock", model(ours, backend="stock", confidence_threshold=0.1)),
        ("narrow without candidates", model(others["dspark"], draft_dtype="bfloat16")),
        ("narrow stock", model(ours, backend="stock", draft_dtype="bfloat16")),
        ("too many", model(ours, num_speculative_tokens=8)),
        ("none", model(ours, num_speculative_tokens=0)),
        ("method", model(ours, method="eagle3")),
        ("exact and probabilistic", model(ours, path_rule="exact", draft_sample_method="probabilistic")),
        ("our key elsewhere", model("ngram", method="ngram", path_rule="greedy")),
        ("no such model", model(str(root / "absent"))),
        ("no checkpoint beside the file", {"model": str(target), "speculative_config": str(SHIPPED)}),
        ("layers", {"model": str(other), "speculative_config": {"model": ours}}),
        ("hidden size", model(_edited(draft, root / "hidden", lambda v: v.update(hidden_size=128)))),
        ("vocabulary", model(_edited(draft, root / "vocab", lambda v: v.update(vocab_size=400)))),
        ("taps", model(_edited(draft, root / "taps", lambda v: v["dflash_config"].update(target_layer_ids=[1, 6])))),
        ("tokenizer", model(_edited(draft, root / "hash", lambda v: v["dflash_config"].update(tokenizer_hash="0" * 64)))),
        ("missing tensor", model(_tensors(draft, root / "less", lambda t: t.pop("lilicorr.out_head.weight")))),
        ("extra tensor", model(_tensors(draft, root / "more", lambda t: t.update({"lilicorr.extra": t["norm.weight"].clone()})))),
        ("hidden head", model(_edited(draft, root / "plainhead", _plain))),
        ("dspark lacks a tensor", model(_tensors(Path(others["dspark"]), root / "d1",
                                                 lambda t: t.pop("markov_head.markov_w1.weight")))),
        ("dspark of others, insisted", model(str(root / "o1"), backend="lilicorr")),
        ("damaged shards", model(_sharded(Path(others["dspark"]), root / "d2"))),
        ("draft topk", model(others["dspark"], dspark_draft_topk=8)),
        ("dspark walks", model(others["dspark"], path_rule="exact")),
        ("domino stock", model(others["domino"], backend="stock")),
        ("domino sampled", model(others["domino"], draft_sample_method="probabilistic")),
        ("domino method", model(others["domino"], method="dspark")),
        ("convolution", model(_edited(draft, root / "conv",
                                      lambda v: v["dflash_config"].update(conv_kernel_size=2, conv_group_size=16)))),
        ("added vocabulary", {"model": str(wordy), "speculative_config": {"model": ours}}),
        ("missing field", model(_edited(draft, root / "field", lambda v: v["dflash_config"].pop("lilicorr_logit_scale")))),
    ]  # fmt: skip
    process = subprocess.run(
        [sys.executable, str(HERE / "config_driver.py")], input=json.dumps(cases), env=environment(request.param), text=True,
        capture_output=True,
    )  # fmt: skip
    lines = [line for line in process.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, process.stderr[-4000:]
    return json.loads(lines[0].removeprefix("RESULT ")) | {"root": str(root)}


def test_what_is_left_out_is_filled_in(outcomes: dict[str, Any]) -> None:
    found = outcomes["defaults"]["ok"]
    assert (found["method"], found["num_speculative_tokens"]) == ("dflash", 7)
    assert found["architectures"] == [hooks.SERVED_ARCHITECTURE]
    assert found["options"]["path_rule"] == "greedy"
    assert not found["v2"], "a CPU build serves on the V1 runner"


def test_options_reach_the_workers(outcomes: dict[str, Any]) -> None:
    found = outcomes["options"]["ok"]
    assert found["num_speculative_tokens"] == 3 and found["options"]["path_rule"] == "exact"
    assert outcomes["dashes"]["ok"]["num_speculative_tokens"] == 2
    assert outcomes["narrow candidates"]["ok"]["options"]["draft_dtype"] == "bfloat16"
    assert outcomes["narrower candidates"]["ok"]["options"]["draft_dtype"] == "int8"
    assert found["options"]["draft_dtype"] == "auto" and found["options"]["confidence_threshold"] == 0
    assert outcomes["threshold"]["ok"]["options"]["confidence_threshold"] == 0.1
    assert outcomes["flags"]["ok"]["num_speculative_tokens"] == 3


def test_a_file_is_read_where_inline_json_is(outcomes: dict[str, Any]) -> None:
    checkpoint = str(Path(outcomes["root"], "checkpoint").resolve())
    assert outcomes["file"]["ok"]["model"] == checkpoint, "a relative model is found beside the file"
    assert outcomes["cli file"]["ok"]["parsed"]["model"] == checkpoint
    assert outcomes["cli short"]["ok"] == outcomes["cli file"]["ok"]
    assert outcomes["cli inline"]["ok"]["parsed"]["model"] != checkpoint


def test_the_stock_backend_keeps_vllms_own_head(outcomes: dict[str, Any]) -> None:
    # Which vLLM then refuses on the V1 runner, in its own words.
    kind, text = outcomes["stock backend"]["error"]
    assert "candidate-head" in text and "V1" in text


def test_the_length_limit_is_the_drafters_and_its_rotary_table_reaches_the_target(outcomes: dict[str, Any]) -> None:
    found = outcomes["short"]["ok"]
    assert found["draft_max_model_len"] == found["options"]["max_len"] == 100
    assert found["max_position_embeddings"] >= 256 + 8


@pytest.mark.parametrize("head", ["dflash2", "dspark", "domino", "lilicorr-conv", "dspark by name"])
def test_every_method_is_served_by_our_classes_with_all_its_slots(outcomes: dict[str, Any], head: str) -> None:
    found = outcomes[head].get("ok", outcomes[head])
    assert (found["method"], found["num_speculative_tokens"]) == ("dflash", 7)
    assert found["architectures"] == [hooks.SERVED_ARCHITECTURE] and not found["v2"]


@pytest.mark.parametrize(
    "case",
    [
        *("dspark of others", "dflash2 of others", "dspark with embedding", "scaled dspark"),
        *("dspark of others, no method", "dflash2 of others, no method", "dspark with embedding, no method"),
    ],
)
def test_kinds_of_a_method_that_only_vllm_knows_are_left_to_it(outcomes: dict[str, Any], case: str) -> None:
    # On this runner it refuses them, in its own words.
    kind, text = outcomes[case]["error"]
    assert kind != "UserError" and "V1" in text, text


def test_a_plain_drafter_that_only_vllm_reads_is_no_draft_model(outcomes: dict[str, Any]) -> None:
    found = outcomes["plain of others"]["ok"]
    assert found["method"] == "dflash" and found["options"] is None


def test_a_scale_of_one_asks_for_nothing(outcomes: dict[str, Any]) -> None:
    assert outcomes["unscaled dspark"]["ok"]["architectures"] == [hooks.SERVED_ARCHITECTURE]


def test_configurations_that_are_not_ours_pass_through(outcomes: dict[str, Any]) -> None:
    assert outcomes["no speculation"]["ok"]["speculative"] is None
    assert outcomes["ngram"].get("ok") or "UserError" not in outcomes["ngram"]["error"][0]
    found = outcomes["plain"]["ok"]
    assert found["architectures"] == ["DFlashDraftModel"] and found["options"] is None


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("missing file", ["none.json", "no such file"]),
        ("broken file", ["broken.json", "line 3, column 3"]),
        ("list file", ["list.json", "JSON object"]),
        ("unknown in file", ["unknown.json", "num_speculative_token", "did you mean 'num_speculative_tokens'"]),
        ("unknown inline", ["path_rul", "did you mean 'path_rule'"]),
        ("bad rule", ["path_rule", "greedi", "did you mean 'greedy'"]),
        ("bad backend", ["backend", "did you mean 'stock'"]),
        ("bad dtype", ["draft_dtype", "did you mean 'bfloat16'"]),
        ("narrow without candidates", ["draft_dtype", "Qwen3DSparkModel has none"]),
        ("narrow stock", ["stock", "draft_dtype", "remove one"]),
        ("threshold of one", ["confidence_threshold", "below 1", "got 1"]),
        ("threshold in words", ["confidence_threshold", '"0.1"']),
        ("threshold without candidates", ["confidence_threshold", "Qwen3DSparkModel has none"]),
        ("threshold stock", ["stock", "confidence_threshold", "remove one"]),
        ("too many", ["num_speculative_tokens", "1..7", "got 8"]),
        ("none", ["num_speculative_tokens", "1..7", "got 0"]),
        ("method", ["eagle3", "dflash"]),
        ("exact and probabilistic", ["exact", "probabilistic"]),
        ("our key elsewhere", ["path_rule", "LiLiCorrDraftModel"]),
        ("no such model", ["absent", "does not exist"]),
        ("no checkpoint beside the file", ["lilicorr-qwen3-8b", "neither a folder nor a hub id"]),
        ("layers", ["num_target_layers is 6", "5"]),
        ("hidden size", ["hidden_size is 128", "64"]),
        ("vocabulary", ["vocab_size is 400", "320"]),
        ("taps", ["target_layer_ids", "0..5"]),
        ("tokenizer", ["tokenizer"]),
        ("missing tensor", ["lilicorr.out_head.weight"]),
        ("extra tensor", ["lilicorr.extra"]),
        ("hidden head", ["DFlashDraftModel", "silently ignore", "LiLiCorrDraftModel"]),
        ("dspark lacks a tensor", ["markov_head.markov_w1.weight", "lacks"]),
        ("dspark of others, insisted", ["dspark_draft_topk is 8"]),
        ("damaged shards", ["unknown to model.safetensors.index.json"]),
        ("draft topk", ["dspark_draft_topk", '"backend": "stock"']),
        ("dspark walks", ["path_rule 'exact'", "Qwen3DSparkModel", "greedy, argmax"]),
        ("domino stock", ["DominoDraftModel", '"backend": "stock"']),
        ("domino sampled", ["probabilistic", "DominoDraftModel", 'use "greedy"']),
        ("domino method", ["dspark", '"dflash"']),
        ("convolution", ["attention_conv.base_kernel", "lacks"]),
        ("added vocabulary", ["tokenizer"]),
        ("missing field", ["lilicorr_logit_scale", "missing"]),
    ],
)
def test_a_wrong_configuration_is_one_sentence(outcomes: dict[str, Any], case: str, words: list[str]) -> None:
    kind, text = outcomes[case].get("error", ("nothing", json.dumps(outcomes[case])))
    assert kind == "UserError", text
    assert "\n" not in text
    for word in words:
        assert word in text, text


def test_command_line_errors_have_no_traceback(pair: tuple[Path, Path], tmp_path: Path) -> None:
    bad = _edited(pair[1], tmp_path / "bad", lambda v: v.update(vocab_size=400))
    vllm = Path(sys.executable).with_name("vllm")
    speculative = ["--speculative-config", json.dumps({"model": bad})]
    done = subprocess.run(
        [vllm, "serve", pair[0], "--dtype", "float32", "--max-model-len", "128", *speculative],
        env=environment(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith("error: ") and "vocab_size is 400" in line]


def test_every_symbol_is_found_in_the_installed_release() -> None:
    for symbol in (*hooks.REPLACED, *hooks.RELIED_ON):
        assert hooks.mismatch(symbol) is None, symbol


def test_a_changed_symbol_is_named() -> None:
    changed = hooks.REPLACED[0]._replace(parameters=("self target_model_config something_new",))
    assert "something_new" in str(hooks.mismatch(changed))
    assert hooks.mismatch(changed._replace(name="EngineArgs.gone")) == "is missing"


def test_an_unsupported_release_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_lilicorr.errors import UserError

    monkeypatch.setattr(hooks, "vllm_version", lambda: "0.31.2")
    hooks.require_supported_vllm.cache_clear()
    with pytest.raises(UserError, match=r"vLLM 0\.31\.2: .* needs 0\.32 or 0\.33"):
        hooks.require_supported_vllm()
    hooks.require_supported_vllm.cache_clear()


STRANGER = """
import sys, types
from vllm_lilicorr.serving import configuration, hooks
names = ("vllm.engine.arg_utils", "vllm.v1.spec_decode.dflash", "vllm.v1.worker.gpu.spec_decode",
         "vllm.model_executor.models.registry")
for name in names:
    sys.modules[name] = types.ModuleType(name)
sys.modules[names[0]].EngineArgs = type("EngineArgs", (), {})
from vllm_lilicorr import plugin
plugin.register()
config = configuration.create_speculative_config(lambda *_: "stock", types.SimpleNamespace(speculative_config=None), None, None)
print(config)
"""


def test_a_release_without_what_is_replaced_still_serves_everything_else() -> None:
    done = subprocess.run([sys.executable, "-c", STRANGER], capture_output=True, text=True, env=environment())
    assert done.stdout == "stock\n", done.stderr
    warnings = [line for line in done.stderr.splitlines() if "need 0.32 or 0.33, everything else is served" in line]
    assert len(warnings) == 4, done.stderr


@pytest.mark.parametrize(
    ("head", "own", "words"),
    [
        ("dspark", "embed_tokens", ["input embedding", '"backend": "stock"']),
        ("dflash2", "lm_head", ["output head", '"backend": "stock"']),
        ("domino", "embed_tokens", ["input embedding", "export it without"]),
    ],
)
def test_what_a_hubs_checkpoint_carries_of_its_own_is_named_when_it_is_loaded(head: str, own: str, words: list[str]) -> None:
    from vllm_lilicorr.errors import UserError
    from vllm_lilicorr.serving.model import ServedDraft

    assert not ServedDraft.has_own_embed_tokens and not ServedDraft.has_own_lm_head, "what vLLM's loader sets"
    theirs = {"embed_tokens": object(), "lm_head": object()}
    ours = theirs | {own: object()}
    target = SimpleNamespace(model=SimpleNamespace(embed_tokens=theirs["embed_tokens"]), lm_head=theirs["lm_head"])
    served = SimpleNamespace(
        has_own_embed_tokens=own == "embed_tokens", has_own_lm_head=own == "lm_head", lm_head=ours["lm_head"],
        model=SimpleNamespace(embed_tokens=ours["embed_tokens"]),
        draft=SimpleNamespace(source="some/hub-id/config.json", head=pairs.HEADS[head][0]),
    )  # fmt: skip
    with pytest.raises(UserError, match="some/hub-id") as raised:
        ServedDraft.check_vocabulary(served, target)  # type: ignore[arg-type]
    for word in words:
        assert word in str(raised.value)


def test_int8_candidates_are_refused_where_vllm_has_no_product_for_them(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.platforms import current_platform

    from vllm_lilicorr.config import DraftConfig
    from vllm_lilicorr.errors import UserError
    from vllm_lilicorr.serving import configuration

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    with pytest.raises(UserError, match="int8 .* CPU build; set bfloat16"):
        configuration._checked_plan({"draft_dtype": "int8"}, DraftConfig.load(pair[1]), None)
