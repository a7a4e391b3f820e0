"""The corpus: conversations whose assistant turns the target itself wrote, as token ids and turn spans.

A folder of Arrow shards (HF-compatible: `datasets.Dataset.from_file`) beside a `corpus.json` that says which target, which
tokenizer and which sampling settings made it. Shards are written independently, anywhere, and the folder is complete
when all of them are there: merging is copying files together.

    corpus.json                       origin, sampling settings, number of shards
    shard-00000-of-00004.arrow        row, part, input_ids, span_starts, span_ends, finish_reasons
    shard-00000-of-00004.json         rows, tokens, unusable rows by reason, checksum
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from vllm_lilicorr.errors import UserError
from vllm_lilicorr.io import write_file_atomically
from vllm_lilicorr.target import TargetShape, load_tokenizer, tokenizer_hash

META = "corpus.json"
FORMAT = 1
SCHEMA = pa.schema(
    [
        ("row", pa.int64()),
        ("part", pa.int32()),
        ("input_ids", pa.list_(pa.int32())),
        ("span_starts", pa.list_(pa.int32())),
        ("span_ends", pa.list_(pa.int32())),
        ("finish_reasons", pa.list_(pa.string())),
    ]
)
ROWS_PER_BATCH = 256


@dataclass(frozen=True)
class Origin:
    """Which target a corpus or a cache belongs to: its folder's name, its tokenizer's hash and its weights' fingerprint."""

    target_name: str
    tokenizer_hash: str
    weights: str

    @classmethod
    def of(cls, folder: str | Path) -> Origin:
        """Return the origin of the target in `folder`, reading file headers and samples of the weights only."""
        return cls(TargetShape.load(folder).name, tokenizer_hash(load_tokenizer(folder)), weights_fingerprint(folder))

    def check(self, other: Origin, what: str) -> None:
        """Raise UserError unless `other`, the target in use, is the one `what` was made with."""
        if self.tokenizer_hash != other.tokenizer_hash:
            raise UserError(
                f"{what} was made with the tokenizer of {self.target_name}, and {other.target_name}'s differs (its hash is "
                f"{other.tokenizer_hash[:12]}, not {self.tokenizer_hash[:12]}); regenerate it with this target"
            )
        if self.weights != other.weights:
            raise UserError(
                f"{what} was made by the target {self.target_name}, whose weights are not {other.target_name}'s (fingerprint "
                f"{self.weights}, not {other.weights}); regenerate it with this target"
            )


def weights_fingerprint(folder: str | Path) -> str:
    """Return 16 hex digits that name a target's weights: every tensor's name, shape and dtype, and a sample of its bytes.

    A copy under another path has the same fingerprint, a fine-tuned model another. Raises UserError without safetensors.
    """
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise UserError(f"{folder}: holds no *.safetensors file; give the target's Hugging Face folder")
    entries = []
    for path in files:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
            for name, entry in header.items():
                if name == "__metadata__":
                    continue
                first, last = entry["data_offsets"]
                samples = b""
                for at in (first, (first + last) // 2):
                    file.seek(8 + length + at)
                    samples += file.read(min(256, last - at))
                entries.append((name, entry["dtype"], entry["shape"], hashlib.sha256(samples).hexdigest()))
    return hashlib.sha256(json.dumps(sorted(entries)).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Conversation:
    """One training sequence: `ids` [T] and its assistant turns [start, end), the turn's end token included where it came.

    key = (row of the source, part): a conversation is one part unless the chat template renders an earlier answer
    differently in a later prompt (Qwen3 drops its empty reasoning block); then each such prompt begins a part.
    """

    key: tuple[int, int]
    ids: np.ndarray
    spans: tuple[tuple[int, int], ...]
    finish_reasons: tuple[str, ...] = ()


def shard_name(index: int, count: int) -> str:
    return f"shard-{index:05d}-of-{count:05d}"


def write_meta(folder: Path, origin: Origin, sampling: dict[str, Any], source: str, shards: int) -> None:
    """Write the corpus' description, or check that it says the same; raises UserError naming what differs."""
    meta = {"format": FORMAT, "origin": asdict(origin), "sampling": sampling, "source": source, "shards": shards}
    path = folder / META
    if path.exists():
        there = _read_json(path)
        for key, value in meta.items():
            if there.get(key) != value:
                raise UserError(
                    f"{folder}: holds a corpus with {key} {json.dumps(there.get(key))}, this run has {json.dumps(value)}; "
                    "give an empty folder, or the settings it was begun with"
                )
        return
    write_file_atomically(path, json.dumps(meta, indent=2) + "\n")


def write_shard(
    folder: Path, index: int, count: int, conversations: Iterable[Conversation], reasons: Counter[str]
) -> dict[str, Any]:
    """Write one shard and, last, the report that makes it count; return the report."""
    name = shard_name(index, count)
    temporary = folder / f".{name}.{os.getpid()}"
    rows = parts = tokens = answers = 0
    last_row = None
    digest = hashlib.sha256()
    with pa.OSFile(str(temporary), "wb") as file, pa.ipc.new_stream(file, SCHEMA) as writer:
        for batch in _batches(sorted(conversations, key=lambda conversation: conversation.key)):
            columns = [
                [c.key[0] for c in batch],
                [c.key[1] for c in batch],
                [c.ids for c in batch],
                [[start for start, _ in c.spans] for c in batch],
                [[end for _, end in c.spans] for c in batch],
                [list(c.finish_reasons) for c in batch],
            ]
            arrays = [pa.array(column, type=field.type) for column, field in zip(columns, SCHEMA)]
            writer.write_batch(pa.record_batch(arrays, schema=SCHEMA))
            for c in batch:
                digest.update(c.ids.tobytes())
                rows += c.key[0] != last_row
                last_row = c.key[0]
                parts += 1
                tokens += len(c.ids)
                answers += sum(end - start for start, end in c.spans)
    with open(temporary, "rb") as written:
        os.fsync(written.fileno())
    os.replace(temporary, folder / f"{name}.arrow")
    report = {
        "rows": rows,
        "sequences": parts,
        "tokens": tokens,
        "answer_tokens": answers,
        "unusable": dict(sorted(reasons.items())),
        "sha256": digest.hexdigest(),
    }
    write_file_atomically(folder / f"{name}.json", json.dumps(report, indent=2) + "\n")
    return report


def _batches(conversations: list[Conversation]) -> Iterator[list[Conversation]]:
    for at in range(0, len(conversations), ROWS_PER_BATCH):
        yield conversations[at : at + ROWS_PER_BATCH]


class Corpus:
    """A complete corpus, memory-mapped: `corpus[i]` is its i-th conversation."""

    def __init__(self, folder: str | Path) -> None:
        """Open the corpus in `folder`; raises UserError when there is none, or shards are missing."""
        self.folder = Path(folder)
        path = self.folder / META
        if not path.exists():
            raise UserError(f"{folder}: is no corpus (it has no {META}); make one with trainer/regenerate.py")
        meta = _read_json(path)
        if meta.get("format") != FORMAT:
            raise UserError(f"{path}: has format {meta.get('format')}, this release reads {FORMAT}; regenerate the corpus")
        self.origin = Origin(**meta["origin"])
        self.sampling: dict[str, Any] = meta["sampling"]
        count = meta["shards"]
        names = [shard_name(i, count) for i in range(count)]
        missing = [name for name in names if not (self.folder / f"{name}.json").exists()]
        if missing:
            raise UserError(
                f"{folder}: {len(missing)} of {count} shards are not finished ({missing[0]} is the first); run "
                f"trainer/regenerate.py --shard {int(missing[0].split('-')[1])}/{count} to its end, or copy them here"
            )
        self.reports = [_read_json(self.folder / f"{name}.json") for name in names]
        self._batches: list[pa.RecordBatch] = []
        for name in names:
            source = pa.memory_map(str(self.folder / f"{name}.arrow"))
            self._batches += list(pa.ipc.open_stream(source))
        self._starts = np.cumsum([0, *(len(batch) for batch in self._batches)])
        self.fingerprint = hashlib.sha256("".join(report["sha256"] for report in self.reports).encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> Conversation:
        if not 0 <= index < len(self):
            raise IndexError(index)
        which = int(np.searchsorted(self._starts, index, side="right")) - 1
        batch, at = self._batches[which], index - int(self._starts[which])
        starts, ends = batch.column("span_starts")[at].as_py(), batch.column("span_ends")[at].as_py()
        return Conversation(
            (batch.column("row")[at].as_py(), batch.column("part")[at].as_py()),
            batch.column("input_ids")[at].values.to_numpy(),
            tuple(zip(starts, ends)),
            tuple(batch.column("finish_reasons")[at].as_py()),
        )

    @property
    def tokens(self) -> int:
        return sum(report["tokens"] for report in self.reports)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); make the corpus again") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: must hold an object; make the corpus again")
    return values
