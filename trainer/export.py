"""Export a run's checkpoint in the public format: `python trainer/export.py --run OUTPUT [--checkpoint NAME] --out DIR`.

A run exports itself to OUTPUT/export when it ends; this command does it for any checkpoint that was kept.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from vllm_lilicorr.config import DraftConfig
from vllm_lilicorr.errors import UserError, run_command
from vllm_lilicorr.model import Draft
from vllm_lilicorr.model.checkpoint import save_draft
from vllm_lilicorr.trainer.checkpoints import latest

PREFIX = "draft."


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", required=True, type=Path, help="run.output of the training run")
    parser.add_argument("--checkpoint", help="name of the checkpoint folder (default: the latest)")
    parser.add_argument("--out", required=True, type=Path, help="folder of the exported checkpoint")
    args = parser.parse_args(argv)
    folder = args.run / "checkpoints"
    name = args.checkpoint or latest(folder)
    if name is None or not (folder / name).is_dir():
        raise UserError(f"{folder}: holds no checkpoint{f' {name}' if name else ''}; give run.output of a run that saved one")
    export_checkpoint(folder, name, args.out)
    print(f"exported {folder / name} to {args.out}")
    return 0


def export_checkpoint(folder: Path, name: str, out: Path) -> None:
    """Write checkpoint `name` of `folder` to `out`, its weights taken from the fp32 master copy."""
    described = json.loads((folder.parent / "draft.json").read_text(encoding="utf-8"))
    draft = Draft(DraftConfig.from_dict(described, str(folder.parent / "draft.json")))
    needed = {PREFIX + key for key in draft.state_dict()}
    state = _master_weights(folder, name)
    if needed - state.keys():
        # What is not trained has no master copy and stands in the module's own weights.
        state = _module_weights(folder, name) | state
    draft.load_state_dict({key.removeprefix(PREFIX): value for key, value in state.items() if key in needed})
    save_draft(draft, out)


def _master_weights(folder: Path, name: str) -> dict[str, torch.Tensor]:
    if any((folder / name).glob("*_optim_states.pt")):
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        return get_fp32_state_dict_from_zero_checkpoint(str(folder), tag=name)
    # Stage 0 keeps no partitions: the module's own weights are the master copy rounded as the export rounds them.
    return _module_weights(folder, name)


def _module_weights(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return torch.load(folder / name / "mp_rank_00_model_states.pt", map_location="cpu", weights_only=False)["module"]


def export_engine(engine: Any, draft: Draft, out: Path) -> None:
    """Write the drafter an engine is training to `out`; all ranks call it together, rank 0 writes."""
    import deepspeed
    import torch.distributed as dist

    stage3 = engine.zero_optimization_stage() == 3
    with deepspeed.zero.GatheredParameters(list(draft.parameters()), enabled=stage3):
        if dist.get_rank() == 0:
            save_draft(draft, out)
    dist.barrier()


if __name__ == "__main__":
    run_command(main)
