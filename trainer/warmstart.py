"""Begin from a published checkpoint: one with the same head, or with any other (the head is then new)."""

from __future__ import annotations

import torch

from vllm_lilicorr.config import DraftConfig
from vllm_lilicorr.errors import UserError
from vllm_lilicorr.model import Draft
from vllm_lilicorr.model.checkpoint import load_draft, resolve_folder

GEOMETRY = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "vocab_size", "rms_norm_eps", "rope_theta", "attention_bias", "block_size", "num_target_layers", "mask_token_id",
    "target_layer_ids",
)  # fmt: skip


def warm_start(draft: Draft, path: str) -> list[str]:
    """Load the checkpoint at `path` into `draft` and return which parts came from it.

    Raises UserError naming every field whose value differs, of the backbone and, with a head of the same kind, of the head.
    """
    folder = resolve_folder(path)
    theirs = DraftConfig.load(folder)
    ours = draft.config
    differing = [
        f"{name} ({getattr(theirs, name)}, this run {getattr(ours, name)})"
        for name in GEOMETRY
        if getattr(theirs, name) != getattr(ours, name)
    ]
    if theirs.conv not in (None, ours.conv):
        differing.append(f"conv ({theirs.conv}, this run {ours.conv})")
    same_head = type(theirs.head) is type(ours.head)
    if same_head and theirs.head != ours.head:
        differing += [
            f"{name} ({getattr(theirs.head, name)}, this run {getattr(ours.head, name)})"
            for name in vars(ours.head)
            if getattr(theirs.head, name) != getattr(ours.head, name)
        ]
    if differing:
        raise UserError(
            f"run.warm_start: {folder} has another geometry in {', '.join(differing)}; make draft and head agree with it"
        )
    loaded = load_draft(folder, dtype=torch.float32, config=theirs)
    # A convolution that the checkpoint has not starts as the identity.
    draft.backbone.load_state_dict(loaded.backbone.state_dict(), strict=theirs.conv == ours.conv)
    if not same_head:
        return ["backbone"]
    draft.head.load_state_dict(loaded.head.state_dict())
    return ["backbone", "head"]
