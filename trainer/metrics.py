"""Where a run's numbers go: metrics.jsonl always, the terminal, TensorBoard and W&B where they are."""

from __future__ import annotations

import json
import math
import resource
import secrets
from pathlib import Path
from typing import Any

import torch

from vllm_lilicorr.errors import UserError
from vllm_lilicorr.io import write_file_atomically

SHOWN = (
    "loss", "dflash", "ce", "dist", "selector", "l1", "confidence", "base", "corrected", "oracle_prefix", "selected_prefix",
    "top1_prefix",
)  # fmt: skip


class MetricsLog:
    """Rank 0's record of a run. A resumed run first drops the records of steps it will repeat."""

    def __init__(
        self, output: Path, resumed_at: int, total: int, tensorboard: bool, wandb: str | None, config: dict[str, Any]
    ) -> None:
        from tqdm import tqdm

        output.mkdir(parents=True, exist_ok=True)
        self.path = output / "metrics.jsonl"
        if self.path.exists():
            lines = self.path.read_text(encoding="utf-8").splitlines()
            kept = [line for line in lines if _step_of(line) is not None and _step_of(line) <= resumed_at]  # type: ignore[operator]
            write_file_atomically(self.path, "".join(line + "\n" for line in kept))
        self._file = self.path.open("a", encoding="utf-8")
        self._bar = tqdm(total=total, initial=resumed_at, unit="step", dynamic_ncols=True, mininterval=1.0)
        self._tensorboard = _tensorboard(output) if tensorboard else None
        self._wandb = _wandb(wandb, output, config, resumed_at > 0) if wandb else None

    def step(self, values: dict[str, Any]) -> None:
        """Record one optimizer step."""
        self._write(values)
        self._bar.set_postfix_str(" ".join(f"{key} {values[key]:.3f}" for key in SHOWN if key in values), refresh=False)
        self._bar.update(1)

    def evaluation(self, values: dict[str, Any]) -> None:
        """Record one evaluation and print it."""
        self._write(values)
        shown = "  ".join(f"{key} {value:.4f}" for key, value in values.items() if key.startswith("tau_"))
        self._bar.write(f"step {values['step']}: {shown}")

    def note(self, text: str) -> None:
        self._bar.write(text)

    def _write(self, values: dict[str, Any]) -> None:
        # JSON has no NaN and no infinity; what a tolerated step leaves is null.
        written = {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in values.items()}
        self._file.write(json.dumps(written, allow_nan=False) + "\n")
        self._file.flush()
        if self._tensorboard is not None:
            for key, value in values.items():
                if key != "step" and isinstance(value, (int, float)):
                    self._tensorboard.add_scalar(key, value, values["step"])
        if self._wandb is not None:
            self._wandb.log(values, step=values["step"])

    def close(self) -> None:
        self._bar.close()
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


def _step_of(line: str) -> int | None:
    """Return a record's step; a line torn by a kill has none."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return None


def _tensorboard(output: Path) -> Any | None:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        print("run.tensorboard: the package tensorboard is not installed, so no TensorBoard files are written")
        return None
    return SummaryWriter(str(output / "tensorboard"))


def _wandb(project: str, output: Path, config: dict[str, Any], resumed: bool) -> Any:
    try:
        import wandb
    except ImportError:
        raise UserError("run.wandb: the package wandb is not installed; install it or set run.wandb=null") from None
    # What is resumed here is resumed there: W&B knows a run by its id alone.
    name = output / "wandb-id"
    if not (resumed and name.exists()):
        write_file_atomically(name, secrets.token_hex(4) + "\n")
    try:
        return wandb.init(project=project, dir=str(output), config=config, id=name.read_text().strip(), resume="allow")
    except Exception as error:  # no key, no network, no such project: it has a kind for each
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"run.wandb: W&B does not start ({reason}); log in with 'wandb login', set WANDB_MODE=offline, or run.wandb=null"
        ) from None


def peak_memory_bytes(device: torch.device) -> int:
    """Return this process' peak: of device memory on a GPU, resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
