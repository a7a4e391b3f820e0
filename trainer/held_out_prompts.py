"""Write the prompts that `data.holdout` keeps from training: `python trainer/held_out_prompts.py --config FILE --out FILE`.

What is chosen with the drafter at hand, such as how many tokens to draft, is chosen on these: it was trained on none of them, and
they are none that it is judged by. --prompts: the JSON Lines file that trainer/regenerate.py answered, all of it in one piece.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from vllm_lilicorr.errors import UserError, run_command
from vllm_lilicorr.io import write_file_atomically
from vllm_lilicorr.trainer.config import TrainConfig
from vllm_lilicorr.trainer.corpus import Corpus
from vllm_lilicorr.trainer.data import split


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="the training run's YAML file")
    parser.add_argument("--prompts", type=Path, required=True, help="the file that the corpus was regenerated from")
    parser.add_argument("--out", type=Path, required=True, help="JSON Lines file to write")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")
    args = parser.parse_args(argv)
    config = TrainConfig.load(args.config, args.overrides)
    corpus = Corpus(config.data.path)
    _, held_out, _ = split(corpus, config.data)
    try:
        lines = [line for line in args.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise UserError(f"--prompts: {args.prompts} cannot be read ({error.strerror})") from None
    rows = sorted({corpus[int(index)].key[0] for index in held_out})
    if not rows:
        raise UserError("data.holdout: is 0, so no prompt was kept from training; set it to what the run had")
    if rows[-1] >= len(lines):
        raise UserError(
            f"--prompts: {args.prompts} has {len(lines)} rows and the corpus in {corpus.folder} a row {rows[-1] + 1}; "
            "name the file that the corpus was regenerated from"
        )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_file_atomically(args.out, "\n".join(json.dumps(json.loads(lines[row])) for row in rows) + "\n")
    print(f"{args.out}: {len(rows)} prompts")
    return 0


if __name__ == "__main__":
    run_command(main)
