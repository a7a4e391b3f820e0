"""The frozen target's part in training: its vocabulary, its states per token, computed (online) or cached (offline).

A cache is a folder of shards of raw bf16 rows, one per token: the tapped layers' outputs side by side, then the
final-normed hidden state. Shards are independent and complete or absent, so a killed run continues with the next one;
every conversation's bytes carry a checksum that is verified when they are first read.

    states.json            origin, corpus, layers, widths, lengths of every conversation
    states-00000.bin       bf16 [tokens, (n_taps + 1) * H]
    states-00000.json      the conversations inside, their checksums
    tails.json             of held-out conversations: the target's greedy continuation past the end of every turn
"""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from vllm_lilicorr.errors import UserError
from vllm_lilicorr.io import write_file_atomically
from vllm_lilicorr.model import TargetVocabulary
from vllm_lilicorr.target import Target

from .corpus import Conversation, Corpus, Origin

META, TAILS = "states.json", "tails.json"
FORMAT = 1
SHARD_BYTES = 512 << 20

States = tuple[Tensor, Tensor]
"""taps [T, n_taps * H] and final [T, H] of one conversation."""


def read_target_config(folder: str | Path) -> dict[str, Any]:
    """Return the decoded `config.json` of the target's language model."""
    path = Path(folder) / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"target.path: {path} cannot be read ({error.strerror}); give the target's Hugging Face folder") from None
    except ValueError as error:
        raise UserError(f"{path}: is not valid JSON ({error})") from None
    return values.get("text_config", values)


def load_vocabulary(folder: str | Path, dtype: torch.dtype, device: torch.device) -> TargetVocabulary:
    """Return the target's embedding and lm_head [V, H], reading only these two tensors; tied weights are one tensor."""
    files: dict[str, Path] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, framework="pt") as opened:
            files |= {name: path for name in opened.keys()}

    def read(suffix: str) -> Tensor | None:
        for name, path in files.items():
            if name.endswith(suffix):
                with safe_open(path, framework="pt") as opened:
                    return opened.get_tensor(name).to(device=device, dtype=dtype)
        return None

    embedding = read("embed_tokens.weight")
    if embedding is None:
        raise UserError(f"{folder}: no safetensors file there holds embed_tokens.weight; give the target's Hugging Face folder")
    tied = read_target_config(folder).get("tie_word_embeddings", False)
    head = None if tied else read("lm_head.weight")
    if head is None and not tied:
        raise UserError(f"{folder}: holds no lm_head.weight, and its config.json does not tie it to the embedding")
    return TargetVocabulary(embedding, embedding if head is None else head)


class StateSource(Protocol):
    """Where a conversation's states come from. `of` returns them for corpus indices, in order; `tails` the target's
    greedy continuation past each turn's end, of held-out conversations; `partitioned`: ranks must ask together."""

    partitioned: bool

    def of(self, indices: Sequence[int], conversations: Sequence[Conversation], max_length: int) -> list[States]: ...

    def tails(self, index: int, conversation: Conversation, max_length: int, count: int) -> list[list[int]]: ...


class OnlineStates:
    """The target in this process; `partitioned`: over all ranks, which must then ask for the same states together."""

    def __init__(self, target: Target, partitioned: bool = False) -> None:
        self.target, self.partitioned = target, partitioned
        self._device = target.device

    def of(self, indices: Sequence[int], conversations: Sequence[Conversation], max_length: int) -> list[States]:
        lengths = [min(len(c.ids), max_length) for c in conversations]
        ids = torch.zeros(len(conversations), max(lengths), dtype=torch.long)
        for i, (conversation, length) in enumerate(zip(conversations, lengths)):
            ids[i, :length] = torch.from_numpy(conversation.ids[:length].astype(np.int64))
        ids = ids.to(self._device)
        # Padding stands behind every conversation, and attention is causal: no token sees it.
        states = self.target.forward(ids, torch.arange(ids.shape[1], device=ids.device).expand_as(ids))
        return [(states.taps[i, :length], states.final[i, :length]) for i, length in enumerate(lengths)]

    def tails(self, index: int, conversation: Conversation, max_length: int, count: int) -> list[list[int]]:
        return greedy_tails(self.target, conversation, max_length, count)


@torch.no_grad()
def greedy_tails(target: Target, conversation: Conversation, max_length: int, count: int) -> list[list[int]]:
    """Return, for each turn, the `count` tokens the target would write after the turn's last one, stop tokens ignored.

    A verifier accepts drafts past a stop token before generation is truncated there; an exact count needs to know them.
    """
    from transformers import DynamicCache

    tails = []
    for _, end in conversation.spans:
        length = min(end, max_length)
        ids = torch.from_numpy(conversation.ids[:length].astype(np.int64))[None].to(target.device)
        positions = torch.arange(length, device=target.device)[None]
        cache, tail = DynamicCache(), []
        for step in range(count):
            states = target.forward(ids, positions, cache=cache)
            ids = target.logits(states.final[:, -1:]).argmax(-1)
            positions = torch.tensor([[length + step]], device=target.device)
            tail.append(int(ids))
        tails.append(tail)
    return tails


@dataclass(frozen=True)
class CacheMeta:
    """What a cache was made of; two runs that differ in any of it cannot share one."""

    format: int
    origin: dict[str, str]
    corpus: str
    layers: list[int]
    hidden_size: int
    max_length: int
    compute: str
    conversations: int

    @property
    def width(self) -> int:
        return (len(self.layers) + 1) * self.hidden_size


def plan_shards(corpus: Corpus, width: int, max_length: int) -> list[range]:
    """Return the corpus indices of each shard: consecutive ones of about SHARD_BYTES together."""
    shards, first, size = [], 0, 0
    for index in range(len(corpus)):
        size += min(len(corpus[index].ids), max_length) * width * 2
        if size >= SHARD_BYTES or index == len(corpus) - 1:
            shards.append(range(first, index + 1))
            first, size = index + 1, 0
    return shards


def begin_cache(folder: Path, meta: CacheMeta) -> None:
    """Write the cache's description, or check that the one there says the same."""
    path = folder / META
    if path.exists():
        there = json.loads(path.read_text())
        for key, value in asdict(meta).items():
            if there.get(key) != value:
                raise UserError(
                    f"{folder}: holds states with {key} {json.dumps(there.get(key))}, this run needs {json.dumps(value)}; give "
                    "another folder, or remove this one"
                )
        return
    write_file_atomically(path, json.dumps(asdict(meta), indent=2) + "\n")


def write_shard(folder: Path, number: int, members: range, rows: Iterator[Tensor]) -> None:
    """Write the states of `members`, one bf16 [T_i, width] tensor each, and last the index that makes the shard count."""
    name = f"states-{number:05d}"
    lengths, checksums = [], []
    for leftover in folder.glob(f".{name}.bin.*"):
        leftover.unlink()
    temporary = folder / f".{name}.bin.{os.getpid()}"
    try:
        with temporary.open("wb") as file:
            for row in rows:
                data = row.contiguous().cpu().view(torch.int16).numpy().tobytes()
                file.write(data)
                lengths.append(len(row))
                checksums.append(zlib.crc32(data))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, folder / f"{name}.bin")
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise UserError(
            f"{folder}: shard {number} cannot be written ({error.strerror}); finished shards stay, free space"
        ) from None
    index = {"first": members.start, "count": len(members), "lengths": lengths, "crc32": checksums}
    write_file_atomically(folder / f"{name}.json", json.dumps(index) + "\n")


def shard_is_done(folder: Path, number: int) -> bool:
    return (folder / f"states-{number:05d}.json").exists()


class CachedStates:
    """A finished cache, memory-mapped."""

    partitioned = False

    def __init__(self, folder: str | Path, corpus: Corpus, origin: Origin, layers: Sequence[int], max_length: int) -> None:
        """Open the cache in `folder`; raises UserError when it is missing, unfinished, damaged, or of something else."""
        self.folder = Path(folder)
        path = self.folder / META
        if not path.exists():
            raise UserError(
                f"{folder}: holds no cached states (no {META}); make them with trainer/cache.py, or train with data.mode=online"
            )
        self.meta = CacheMeta(**json.loads(path.read_text()))
        Origin(**self.meta.origin).check(origin, f"the cache in {folder}")
        for what, have, need in (
            ("format", self.meta.format, FORMAT),
            ("corpus", self.meta.corpus, corpus.fingerprint),
            ("layers", self.meta.layers, list(layers)),
        ):
            if have != need:
                raise UserError(f"{folder}: holds states with {what} {have}, this run needs {need}; run trainer/cache.py again")
        if self.meta.max_length < max_length:
            raise UserError(
                f"{folder}: holds the first {self.meta.max_length} tokens of each conversation, data.max_length is {max_length}; "
                "lower it or run trainer/cache.py again"
            )
        self._rows: list[tuple[int, int, int, int]] = []  # shard, first token, tokens, checksum
        self._maps: list[np.ndarray] = []
        self._verified: set[int] = set()
        while len(self._rows) < self.meta.conversations:
            self._open_shard(len(self._maps))

    def _open_shard(self, number: int) -> None:
        path = self.folder / f"states-{number:05d}.json"
        if not path.exists():
            raise UserError(
                f"{self.folder}: is unfinished ({path.name} is missing); run trainer/cache.py again, it continues there"
            )
        index = json.loads(path.read_text())
        data = path.with_suffix(".bin")
        expected = sum(index["lengths"]) * self.meta.width * 2
        size = data.stat().st_size if data.exists() else 0
        if size != expected or index["first"] != len(self._rows):
            raise UserError(f"{data}: has {size} bytes, expected {expected}; remove {path} and run trainer/cache.py again")
        token = 0
        for length, checksum in zip(index["lengths"], index["crc32"]):
            self._rows.append((number, token, length, checksum))
            token += length
        self._maps.append(np.memmap(data, np.int16, "r", shape=(token, self.meta.width)))

    def of(self, indices: Sequence[int], conversations: Sequence[Conversation], max_length: int) -> list[States]:
        return [self._read(int(index), max_length) for index in indices]

    def _read(self, index: int, max_length: int) -> States:
        number, first, length, checksum = self._rows[index]
        rows = self._maps[number][first : first + length]
        if index not in self._verified:
            if zlib.crc32(rows.data) != checksum:
                name = f"states-{number:05d}"
                raise UserError(
                    f"{self.folder / name}.bin: the states of conversation {index} are damaged (checksum); remove {name}.json "
                    "and run trainer/cache.py again, it rewrites that shard"
                )
            self._verified.add(index)
        states = torch.from_numpy(rows[:max_length].copy()).view(torch.bfloat16)
        return states[:, : -self.meta.hidden_size], states[:, -self.meta.hidden_size :]

    def tails(self, index: int, conversation: Conversation, max_length: int, count: int) -> list[list[int]]:
        path = self.folder / TAILS
        tails = json.loads(path.read_text()) if path.exists() else {}
        found = tails.get(str(index))
        if (
            found is None
            or any(len(tail) < count for tail in found)
            or self._rows[index][2] != min(len(conversation.ids), max_length)
        ):
            raise UserError(
                f"{path}: has no continuation of held-out conversation {index} by {count} tokens; run trainer/cache.py again "
                "with this configuration (finished shards are kept)"
            )
        return [tail[:count] for tail in found]
