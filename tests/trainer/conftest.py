"""A tiny target on disk (byte-level tokenizer, chat template), a corpus it wrote, and a training configuration."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from vllm_lilicorr.chat import render
from vllm_lilicorr.target import load_target, load_tokenizer
from vllm_lilicorr.trainer.corpus import Conversation, Origin, write_meta, write_shard

os.environ["DS_ACCELERATOR"] = "cpu"  # before deepspeed is imported anywhere
ROOT = Path(__file__).resolve().parents[2]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(SPECIAL + alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


def write_target(folder: Path, seed: int = 0, spread: float = 0.08) -> None:
    """A random Llama whose greedy answers neither loop at once nor stop at once."""
    from transformers import LlamaConfig, LlamaForCausalLM

    write_tokenizer(folder)
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=264,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=6,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            max_position_embeddings=512,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=2,
            rope_theta=10000.0,
        )
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(std=spread)
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder)


def greedy_answer(target: Any, prompt: list[int], count: int, stop: int = 2) -> list[int]:
    from transformers import DynamicCache

    cache, ids, answer = DynamicCache(), torch.tensor([prompt]), []
    positions = torch.arange(len(prompt))[None]
    while len(answer) < count:
        states = target.forward(ids, positions, cache=cache)
        answer.append(int(target.logits(states.final[:, -1]).argmax(-1)))
        if answer[-1] == stop:
            break
        ids, positions = torch.tensor([answer[-1:]]), positions[:, -1:] + 1
    return answer


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target") / "tiny"
    folder.mkdir()
    write_target(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_corpus(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 conversations answered greedily in fp32; the prompts are `prompt(i)`."""
    folder = tmp_path_factory.mktemp("corpus")
    target, tokenizer = load_target(tiny_target), load_tokenizer(tiny_target)
    conversations = []
    for row in range(24):
        ids = render(tokenizer, [{"role": "user", "content": prompt(row)}])
        answer = greedy_answer(target, ids, 20 + 3 * (row % 7))
        spans = ((len(ids), len(ids) + len(answer)),)
        conversations.append(Conversation((row, 0), np.array(ids + answer, np.int32), spans, ("stop",)))
    write_meta(folder, Origin.of(tiny_target), {"temperature": 0.0}, "test", 1)
    write_shard(folder, 0, 1, conversations, Counter())
    return folder


def prompt(row: int) -> str:
    return f"Say {row * row} in {'words' if row % 2 else 'digits'}, {'please' * (row % 3)}"


def settings(target: Path, corpus: Path, output: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, dict[str, Any]] = {
        "target": {"path": str(target)},
        "data": {"path": str(corpus), "mode": "online", "max_length": 96, "anchors": 8, "holdout": 4},
        "draft": {"head": "lilicorr", "num_layers": 1, "block_size": 5, "mask_token_id": 3, "num_taps": 2},
        "head": {
            "lilicorr": {
                "candidate_topk": 4, "hidden_size": 16, "num_layers": 1, "num_heads": 2, "mlp_ratio": 2.0, "factor_dim": 8,
                "vector_eps": 1e-4, "logit_scale": 8.0,
            },
            "dflash2": {"rank": 8, "top_k": 4},
            "dspark": {"markov_rank": 8, "enable_confidence_head": True, "confidence_head_with_markov": True},
            "domino": {"gru_hidden_dim": 12, "emb_dim": 8, "pure_draft_prefix_len": 1},
        },
        "optimizer": {"lr": 3e-3},
        "run": {
            "output": str(output), "batch_size": 4, "micro_batch_size": 1, "max_steps": 6, "save_every": 100,
            "tensorboard": False,
        },
        "deepspeed": {"config": str(ROOT / "configs/deepspeed/zero1.json")},
    }  # fmt: skip
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section
    return values


@pytest.fixture(scope="session")
def train_settings(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that writes a training configuration (target, corpus, output, section={key: value}) to a file."""

    def write(target: Path, corpus: Path, output: Path, **sections: dict[str, Any]) -> Path:
        return write_settings(tmp_path_factory.mktemp("config") / "run.yaml", settings(target, corpus, output, **sections))

    return write


def write_settings(path: Path, values: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(values))
    return path
