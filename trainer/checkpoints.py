"""Checkpoints of a run: atomic, exact, the last n kept.

DeepSpeed writes the tensors (fp32 master weights and moments, partitioned as they are); this module decides when a
folder counts. A checkpoint is written under a hidden name, flushed, and renamed by rank 0 once every rank has finished;
then `latest` is replaced atomically. A kill or a full disk at any moment leaves the last complete one in force.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.checkpoint.constants import (
    UNIVERSAL_CHECKPOINT_INFO,
    UNIVERSAL_CHECKPOINT_VERSION_KEY,
    UNIVERSAL_CHECKPOINT_VERSION_VALUE,
)

from vllm_lilicorr.errors import UserError
from vllm_lilicorr.io import fsync_path, write_file_atomically

LATEST = "latest"
STATE = "run.json"
_UNIVERSAL = {UNIVERSAL_CHECKPOINT_INFO: {UNIVERSAL_CHECKPOINT_VERSION_KEY: UNIVERSAL_CHECKPOINT_VERSION_VALUE}}
"""Without it DeepSpeed's converter to the universal format refuses the checkpoint."""
_NAME = re.compile(r"step-(\d{8})")


class SaveFailed(UserError):
    """This rank could not write its part; the other ranks do not know."""

    one_rank = True


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def latest(folder: Path) -> str | None:
    """Return the name of the checkpoint in force, if any; raises UserError when it is gone."""
    path = folder / LATEST
    if not path.exists():
        return None
    name = path.read_text().strip()
    if not (folder / name).is_dir():
        raise UserError(f"{path}: names {name}, which is not there; write the name of an existing checkpoint into it")
    return name


def is_universal(folder: Path, name: str) -> bool:
    """Return whether checkpoint `name` is in DeepSpeed's universal format."""
    return (folder / name / "zero").is_dir()


def save(engine: Any, folder: Path, step: int, state: dict[str, Any], keep_last: int) -> None:
    """Write the checkpoint of `step` and remove all but the last `keep_last`; all ranks call it together.

    Raises SaveFailed when the disk refuses; `latest` then still names the checkpoint before.
    """
    name = checkpoint_name(step)
    temporary = f".writing-{name}"
    rank = dist.get_rank()
    with _as_sentence(folder / name):
        if rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            for leftover in folder.glob(".writing-*"):
                shutil.rmtree(leftover)
        dist.barrier()
        try:
            engine.save_checkpoint(str(folder), tag=temporary, client_state=_UNIVERSAL, save_latest=False)
            if rank == 0:
                (folder / temporary / STATE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
            for file in (folder / temporary).iterdir():
                if file.is_file():
                    fsync_path(file)
        except BaseException:
            shutil.rmtree(folder / temporary, ignore_errors=True)
            raise
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folder / name, ignore_errors=True)
            os.rename(folder / temporary, folder / name)
            fsync_path(folder)
            write_file_atomically(folder / LATEST, name + "\n")
            # Later ones stand there where `latest` was set back by hand; they are not what is being counted.
            steps = sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.name <= name)
            for old in steps[:-keep_last]:
                shutil.rmtree(old, ignore_errors=True)
        dist.barrier()


@contextlib.contextmanager
def _as_sentence(path: Path):  # type: ignore[no-untyped-def]
    try:
        yield
    except (OSError, RuntimeError) as error:
        # torch's writer reports a full disk as a RuntimeError.
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise SaveFailed(
            f"{path}: the checkpoint cannot be written ({reason}); the one before it stays in force, free space and start again"
        ) from error


def read_state(folder: Path, name: str) -> dict[str, Any]:
    """Return what the run said of itself when it wrote checkpoint `name`."""
    try:
        return json.loads((folder / name / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder / name / STATE}: cannot be read ({error}); name an earlier checkpoint in {folder / LATEST}"
        ) from None


def load(engine: Any, folder: Path, name: str) -> None:
    """Restore the engine from checkpoint `name`, fp32 master weights and moments bit for bit; all ranks call it together."""
    path, _ = engine.load_checkpoint(str(folder), tag=name)
    if path is None:
        raise UserError(
            f"{folder / name}: DeepSpeed cannot load it; remove the folder and name an earlier one in {folder / LATEST}"
        )
    optimizer = engine.basic_optimizer
    if any(group.get("fused") for group in optimizer.param_groups):
        for parameter, moments in optimizer.state.items():
            # DeepSpeed brings a universal checkpoint's step count on the CPU; the fused step of a GPU reads it as its own memory.
            if torch.is_tensor(moments.get("step")):
                moments["step"] = moments["step"].to(parameter.device)
