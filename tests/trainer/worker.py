"""What the launched tests run on every rank: several training runs after one another, in one process group.

    deepspeed --num_gpus 2 worker.py PLAN.json

PLAN is a list of {"config": FILE, "overrides": [...], "kill_at": step or null}: `kill_at` kills this process with -9
after that step.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from pathlib import Path

from vllm_lilicorr.trainer.config import TrainConfig
from vllm_lilicorr.trainer.loop import Trainer


def main() -> None:
    plan = json.loads(Path(next(argument for argument in sys.argv[1:] if argument.endswith(".json"))).read_text())
    for entry in plan:
        with Trainer(TrainConfig.load(entry["config"], entry["overrides"])) as trainer:
            if entry.get("kill_at"):
                take = trainer.train_step

                def step_or_die(take=take, trainer=trainer, last=entry["kill_at"]):
                    if trainer.step == last:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return take()

                trainer.train_step = step_or_die  # type: ignore[method-assign]
            trainer.run()
        del trainer
        gc.collect()


if __name__ == "__main__":
    main()
