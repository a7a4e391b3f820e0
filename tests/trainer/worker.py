"""What the launched tests run on every rank: several training runs after one another, in one process group.

    deepspeed --num_gpus 2 worker.py PLAN.json

PLAN is a list of {"config": FILE, "overrides": [...]}. With {"kill_at": STEP, "port": PORT} the run is a child's, which joins
a process group of its own at that port and kills itself with -9 after that step; such runs come first in a plan.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import sys
from pathlib import Path
from typing import Any

from vllm_lilicorr.trainer.config import TrainConfig
from vllm_lilicorr.trainer.loop import Trainer


def main() -> None:
    plan = json.loads(Path(next(argument for argument in sys.argv[1:] if argument.endswith(".json"))).read_text())
    for entry in plan:
        if "kill_at" not in entry:
            train(entry)
            gc.collect()
            continue
        # A fork has everything imported, which takes longer than the run.
        child = multiprocessing.get_context("fork").Process(target=train, args=(entry,))
        child.start()
        child.join()
        if not child.exitcode:  # a rank that sees the other one die first ends by an exception
            sys.exit(f"ended before it was killed: {entry}")


def train(entry: dict[str, Any]) -> None:
    if "kill_at" in entry:
        os.environ["MASTER_PORT"] = str(entry["port"])
    trainer = Trainer(TrainConfig.load(entry["config"], entry["overrides"]))
    with trainer:
        if "kill_at" in entry:
            take = trainer.train_step

            def step_or_die() -> Any:
                if trainer.step == entry["kill_at"]:
                    os.kill(os.getpid(), signal.SIGKILL)
                return take()

            trainer.train_step = step_or_die  # type: ignore[method-assign]
        trainer.run()


if __name__ == "__main__":
    main()
