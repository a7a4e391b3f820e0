"""Show what a drafter checkpoint holds and whether it fits a target.

python -m vllm_lilicorr.check CKPT [--target DIR] [--json]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from .config import DraftConfig
from .errors import run_command
from .model import Draft
from .model.checkpoint import check_tensors, count_parameters, resolve_folder
from .target import TargetShape, check_fits, load_tokenizer


def describe(config: DraftConfig) -> dict[str, Any]:
    """Return architecture, parameters by part and geometry of a drafter, without allocating its weights."""
    with torch.device("meta"):
        parameters = count_parameters(Draft(config))
    geometry = {
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope_theta,
        "block_size": config.block_size,
        "num_slots": config.num_slots,
        "num_target_layers": config.num_target_layers,
        "target_layer_ids": list(config.target_layer_ids),
        "mask_token_id": config.mask_token_id,
        "conv": asdict(config.conv) if config.conv else None,
        "head": asdict(config.head),
    }
    return {"architecture": config.architecture, "parameters": parameters, "geometry": geometry}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m vllm_lilicorr.check", description="Check a drafter checkpoint, and that it fits a target."
    )
    parser.add_argument("checkpoint", help="folder with config.json and model.safetensors, or a hub id")
    parser.add_argument("--target", help="the target's Hugging Face folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)

    folder = resolve_folder(args.checkpoint)
    config = DraftConfig.load(folder)
    tensors = check_tensors(folder, config)
    found = describe(config)
    if args.target is not None:
        for warning in check_fits(config, TargetShape.load(args.target), load_tokenizer(args.target)):
            print(f"warning: {warning}", file=sys.stderr)
        found["target"] = args.target
    if args.json:
        print(json.dumps(found))
        return 0
    print(f"{found['architecture']} in {folder}: {len(tensors)} tensors, all as config.json calls for")
    for part, count in found["parameters"].items():
        print(f"  {part + ' parameters':<26}{count:>15,}")
    for key, value in found["geometry"].items():
        if key == "head":
            for name, entry in value.items():
                print(f"  {'head.' + name:<26}{entry:>15}")
        else:
            print(f"  {key:<26}{str(value):>15}")
    if args.target is not None:
        print(f"fits {args.target}")
    return 0


if __name__ == "__main__":
    run_command(main)
