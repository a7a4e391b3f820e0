"""Cache the target's states for offline training: `python trainer/cache.py --config FILE [key.sub=value ...]`.

Writes, per token, the tapped layers' outputs and the final-normed hidden state in bf16. Killed at any moment, the same
command continues after the last finished shard; `--shard i/n` deals the shards over n machines.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from tqdm import tqdm

from vllm_lilicorr.errors import run_command
from vllm_lilicorr.io import write_file_atomically
from vllm_lilicorr.target import Target, load_target
from vllm_lilicorr.trainer.config import TrainConfig
from vllm_lilicorr.trainer.corpus import Corpus, Origin
from vllm_lilicorr.trainer.data import split
from vllm_lilicorr.trainer.sharding import parse_shard
from vllm_lilicorr.trainer.states import (
    FORMAT,
    TAILS,
    CachedStates,
    CacheMeta,
    OnlineStates,
    begin_cache,
    greedy_tails,
    plan_shards,
    read_target_config,
    shard_is_done,
    write_shard,
)

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="the training run's YAML file")
    parser.add_argument("--shard", default="0/1", metavar="i/n", help="write every n-th shard, from the i-th on")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="what the target computes in (states are bf16)")
    parser.add_argument("--verify", action="store_true", help="check every checksum of a finished cache and exit")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")
    args = parser.parse_args(argv)
    config = TrainConfig.load(args.config, args.overrides)
    corpus, origin = Corpus(config.data.path), Origin.of(config.target.path)
    corpus.origin.check(origin, f"the corpus in {config.data.path}")
    draft = config.draft_config(read_target_config(config.target.path), origin.target_name, origin.tokenizer_hash)
    folder = Path(config.data.cache or Path(config.data.path) / "states")
    length = config.data.max_length
    if args.verify:
        states = CachedStates(folder, corpus, origin, draft.target_layer_ids, length)
        for index in tqdm(range(len(corpus)), unit="conversation"):
            states.of([index], [corpus[index]], length)
        print(f"{folder}: {len(corpus)} conversations, every checksum holds")
        return 0

    meta = CacheMeta(
        FORMAT,
        asdict(origin),
        corpus.fingerprint,
        list(draft.target_layer_ids),
        draft.hidden_size,
        length,
        args.dtype,
        len(corpus),
    )
    begin_cache(folder, meta)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shards = plan_shards(corpus, meta.width, length)
    index, count = parse_shard(args.shard)
    mine = [number for number in range(index, len(shards), count)]
    todo = [number for number in mine if not shard_is_done(folder, number)]
    target = load_target(config.target.path, draft.target_layer_ids, DTYPES[args.dtype], device)
    write_states(folder, corpus, shards, todo, target, length)
    if index == 0:
        write_tails(folder, corpus, config, target, draft.num_slots - 1)
    size = sum(path.stat().st_size for path in folder.glob("states-*.bin"))
    print(f"{folder}: {len(mine)} of {len(shards)} shards here are finished, {size / 1e9:.2f} GB, {meta.width * 2} bytes a token")
    return 0


def write_states(folder: Path, corpus: Corpus, shards: list[range], todo: list[int], target: Target, length: int) -> None:
    """Write the shards numbered `todo`."""
    source = OnlineStates(target)
    total = sum(min(len(corpus[i].ids), length) for number in todo for i in shards[number])
    with tqdm(total=total, unit="token", unit_scale=True, dynamic_ncols=True) as bar:

        def rows(members: range) -> Iterator[torch.Tensor]:
            for i in members:
                taps, final = source.of([i], [corpus[i]], length)[0]
                bar.update(len(final))
                yield torch.cat((taps, final), -1).bfloat16()

        for number in todo:
            write_shard(folder, number, shards[number], rows(shards[number]))


def write_tails(folder: Path, corpus: Corpus, config: TrainConfig, target: Target, count: int) -> None:
    """Write the held-out conversations' continuations, those that are not there yet."""
    path = folder / TAILS
    tails: dict[str, list[list[int]]] = json.loads(path.read_text()) if path.exists() else {}
    _, held_out, _ = split(corpus, config.data)
    began = time.time()
    missing = [int(i) for i in held_out if any(len(tail) < count for tail in tails.get(str(i), [[]]))]
    for i in missing:
        tails[str(i)] = greedy_tails(target, corpus[i], config.data.max_length, count)
    if missing:
        write_file_atomically(path, json.dumps(tails) + "\n")
        print(f"{path}: continued {len(missing)} held-out conversations by {count} tokens in {time.time() - began:.0f} s")


if __name__ == "__main__":
    run_command(main)
