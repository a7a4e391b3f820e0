"""Train a drafter and its head: `deepspeed trainer/main.py --config FILE [key.sub=value ...]`.

The same command resumes a run that stopped. docs/training.md has the recipes.
"""

from __future__ import annotations

import argparse
import os
import sys

from vllm_lilicorr.errors import UserError, run_command
from vllm_lilicorr.trainer.config import TrainConfig
from vllm_lilicorr.trainer.settings import to_yaml


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="YAML file, such as configs/qwen3-8b.yaml")
    parser.add_argument("--print-config", action="store_true", help="print the resolved configuration and its hash, and exit")
    parser.add_argument("--skip-nonfinite", type=int, default=0, metavar="N", help="skip up to N steps with a NaN or Inf")
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)  # the launcher passes it
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="configuration keys to set")
    args = parser.parse_args(argv)
    first = int(os.environ.get("RANK", "0")) == 0
    try:
        config = TrainConfig.load(args.config, args.overrides)
        if args.print_config:
            print(f"{to_yaml(config)}# hash: {config.hash()}")
            return 0
        # DeepSpeed takes seconds to import and chooses its device then; a mistake in the configuration should not wait.
        from vllm_lilicorr.trainer.loop import Trainer

        with Trainer(config, skip_nonfinite=args.skip_nonfinite) as trainer:
            trainer.run()
        return 0
    except UserError as error:
        # What is wrong for all ranks is said once; what one rank met alone (its disk), by that rank.
        if first or getattr(error, "one_rank", False):
            raise
        sys.exit(1)


if __name__ == "__main__":
    run_command(main)
