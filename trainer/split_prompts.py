"""Divide prompt files into a corpus and held-out rows: `python trainer/split_prompts.py --prompts DIR --also DIR --out DIR`.

The last N rows of every file of --prompts go to OUT/heldout/NAME.jsonl and nowhere else; all others, and every row of the
folders named by --also, are shuffled into OUT/train.jsonl, so that any leading part of it is a fair sample.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from vllm_lilicorr.errors import UserError, run_command
from vllm_lilicorr.io import write_file_atomically


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True, help="folder of JSON Lines files whose last rows are held out")
    parser.add_argument(
        "--also", type=Path, action="append", default=[], help="a folder of further files, all of them to train on"
    )
    parser.add_argument("--held-out", type=int, default=20, metavar="N", help="rows held out of each file (default 20)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    if args.held_out < 1:
        raise UserError(f"--held-out: must be at least 1, got {args.held_out}")
    (args.out / "heldout").mkdir(parents=True, exist_ok=True)
    rows: list[str] = []
    for file in _files(args.prompts):
        lines = _lines(file)
        write_file_atomically(args.out / "heldout" / file.name, "\n".join(lines[-args.held_out :]) + "\n")
        rows += lines[: -args.held_out]
    for folder in args.also:
        rows += [line for file in _files(folder) for line in _lines(file)]
    # A prompt may stand in several files; what is held out of one must not come back with another.
    held_out = {line for file in _files(args.out / "heldout") for line in _lines(file)}
    kept = [row for row in dict.fromkeys(rows) if row not in held_out]
    random.Random(args.seed).shuffle(kept)
    write_file_atomically(args.out / "train.jsonl", "\n".join(kept) + "\n")
    print(f"{args.out}: {len(kept)} rows to train on, {len(held_out)} held out, {len(rows) - len(kept)} repeated ones dropped")
    return 0


def _files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise UserError(f"{folder}: holds no *.jsonl file; name a folder of prompt files")
    return files


def _lines(file: Path) -> list[str]:
    """Return the file's rows, written alike, so that equal rows compare equal."""
    lines = []
    for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), 1):
        if line.strip():
            try:
                lines.append(json.dumps(json.loads(line), ensure_ascii=False, sort_keys=True))
            except ValueError as error:
                raise UserError(f"{file}, line {number}: is not JSON ({error}); mend or remove it") from None
    return lines


if __name__ == "__main__":
    run_command(main)
