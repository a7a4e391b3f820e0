"""Drafter checkpoints: the public folder of `config.json` and `model.safetensors` (docs/checkpoint-format.md).

Loading goes config -> names -> tensors -> module, each step readable alone; nothing is built until every tensor's name and
shape has been checked against the configuration, so nothing is ever half-loaded.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..config import HEAD_CONFIGS, DraftConfig
from ..errors import UserError
from ..hub import local_folder
from ..io import write_folder_atomically
from .card import model_card
from .draft import Draft
from .heads import HEADS

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"

# Older exports index the head's MLPs as sequences; ours are written by name.
_SEQUENCE_NAMES = (
    (re.compile(r"^lilicorr\.feature_mlp\.0\."), "lilicorr.feature_norm."),
    (re.compile(r"^lilicorr\.feature_mlp\.1\."), "lilicorr.feature_mlp.up_proj."),
    (re.compile(r"^lilicorr\.feature_mlp\.3\."), "lilicorr.feature_mlp.down_proj."),
    (re.compile(r"^(lilicorr\.layers\.\d+\.mlp)\.0\."), r"\1.up_proj."),
    (re.compile(r"^(lilicorr\.layers\.\d+\.mlp)\.2\."), r"\1.down_proj."),
)


def load_draft(
    path: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.bfloat16, config: DraftConfig | None = None
) -> Draft:
    """Return the drafter in folder `path`, or on the hub if `path` is a hub id (`owner/name`) and no such folder exists.

    Raises UserError, one sentence each: not a folder, missing or broken files, pickle files only, missing, unexpected or
    misshapen tensors (named), and a LiLiCorr head under an architecture that would ignore it.
    """
    folder = resolve_folder(path)
    config = config or DraftConfig.load(folder)
    shapes = check_tensors(folder, config)
    tensors = {canonical_name(name): (name, file) for name, file in _tensor_files(folder).items()}
    with torch.device("meta"):
        draft = Draft(config)
    state = {}
    names = published_names(draft)
    for file in sorted({file for _, file in tensors.values()}):
        with _opened(file) as opened:
            for name, (stored, where) in tensors.items():
                if where == file:
                    state[names[name]] = opened.get_tensor(stored).to(device=device, dtype=dtype)
    assert state.keys() == {names[name] for name in shapes}
    draft.load_state_dict(state, assign=True)
    return draft.eval()


def save_draft(draft: Draft, path: str | Path) -> None:
    """Write the drafter to folder `path` in the public format, in bf16, with its model card.

    Atomic: a kill at any moment leaves the old checkpoint or the new one. Raises UserError when the disk refuses, or when
    the folder holds anything that is no drafter checkpoint; what stands there is then untouched.
    """
    state = draft.state_dict()
    tensors = {
        published: state[ours].detach().to(device="cpu", dtype=torch.bfloat16).contiguous().clone()
        for published, ours in published_names(draft).items()
    }
    with write_folder_atomically(path, _is_checkpoint) as folder:
        _write_tensors(tensors, folder / WEIGHTS)
        (folder / "config.json").write_text(draft.config.to_json(), encoding="utf-8")
        (folder / "README.md").write_text(model_card(draft.config, count_parameters(draft)), encoding="utf-8")


def _is_checkpoint(folder: Path) -> bool:
    """Whether the folder holds a drafter and nothing that saving one would not write."""
    names = {entry.name for entry in folder.iterdir()}
    shards = {name for name in names if re.fullmatch(r"model-\d+-of-\d+\.safetensors", name)}
    try:
        drafter = "dflash_config" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False
    return drafter and names - shards <= {"config.json", WEIGHTS, INDEX, "README.md"}


def _write_tensors(tensors: dict[str, Tensor], file: Path) -> None:
    # Created first so that it has the permissions of any other file; safetensors alone would make it private.
    file.touch()
    mode = file.stat().st_mode
    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as error:
        # safetensors hides the operating system's error in its text ("... (os error 28)").
        number = re.search(r"os error (\d+)", str(error))
        code = int(number[1]) if number else errno.EIO
        raise OSError(code, os.strerror(code), str(file)) from error
    file.chmod(mode)


def resolve_folder(path: str | Path) -> Path:
    """Return the local folder of `path`, downloading only when it is a hub id (`owner/name`) and no local path."""
    return local_folder(path, f"the folder that holds config.json and {WEIGHTS}", ["*.json", "*.safetensors", "README.md"])


def check_tensors(folder: str | Path, config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Return the published name and shape of every tensor of the checkpoint, having checked them against `config`.

    Reads headers only, never weights. Raises UserError as `load_draft` does.
    """
    folder = Path(folder)
    found: dict[str, tuple[int, ...]] = {}
    files = _tensor_files(folder)
    for file in sorted(set(files.values())):
        with _opened(file) as opened:
            for name in (name for name, where in files.items() if where == file):
                if name not in opened.keys():
                    raise UserError(f"{file}: has no tensor {name}, which {INDEX} places there; copy the checkpoint again")
                piece = opened.get_slice(name)
                if piece.get_dtype() not in ("BF16", "F16", "F32", "F64"):
                    raise UserError(
                        f"{file}: tensor {name} has dtype {piece.get_dtype()}; a drafter is read in BF16, F16, F32 or F64, "
                        "export it unquantised"
                    )
                canonical = canonical_name(name)
                if canonical in found:
                    raise UserError(f"{file}: holds {canonical} twice under different names; export it again")
                found[canonical] = tuple(piece.get_shape())
    with torch.device("meta"):
        draft = Draft(config)
    state = draft.state_dict()
    expected = {name: tuple(state[ours].shape) for name, ours in published_names(draft).items()}
    _compare(folder, config, expected, found)
    return found


def published_names(draft: Draft) -> dict[str, str]:
    """Return {name in the public format: name in `draft.state_dict()`}."""
    prefixes = {"backbone.": "", "head.": draft.head.prefix}
    return {
        prefix + name.removeprefix(part): name
        for name in draft.state_dict()
        for part, prefix in prefixes.items()
        if name.startswith(part)
    }


def canonical_name(name: str) -> str:
    """Return the named form of a tensor name, whatever of the known spellings it is in."""
    name = name.removeprefix("model.")
    for pattern, replacement in _SEQUENCE_NAMES:
        name = pattern.sub(replacement, name)
    return name


def count_parameters(draft: Draft) -> dict[str, int]:
    """Return the parameters of the backbone, the head, and both."""
    backbone, head = (sum(p.numel() for p in part.parameters()) for part in (draft.backbone, draft.head))
    return {"backbone": backbone, "head": head, "total": backbone + head}


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Return {tensor name as stored: file}, of one file or of a sharded set with its index."""
    index, single = folder / INDEX, folder / WEIGHTS
    if single.exists():
        with _opened(single) as opened:
            return {name: single for name in opened.keys()}
    if not index.exists():
        pickles = sorted(p.name for p in folder.glob("*") if p.suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl"))
        if pickles:
            raise UserError(
                f"{folder}: holds {pickles[0]} but no {WEIGHTS}; pickle files can run code and are refused, "
                "convert it to safetensors"
            )
        raise UserError(f"{folder}: has no {WEIGHTS}; copy the checkpoint again")
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {str(name): folder / Path(str(file)).name for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError):
        raise UserError(f"{index}: is not a safetensors index with a weight_map; copy the checkpoint again") from None
    for file in sorted(set(files.values())):
        if not file.exists():
            raise UserError(f"{file}: is named by {INDEX} and missing; copy the checkpoint again")
    for file in sorted(set(files.values())):
        with _opened(file) as opened:
            stray = sorted(name for name in opened.keys() if name not in files)
        if stray:
            raise UserError(f"{file}: holds {_listed(stray)}, unknown to {INDEX}; copy the checkpoint again")
    return files


def _opened(file: Path):  # type: ignore[no-untyped-def]  # safetensors' own context manager has no exported type
    if not file.is_file() or not os.access(file, os.R_OK):
        raise UserError(f"{file}: cannot be read as a file; mend its permissions or copy the checkpoint again")
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{file}: is truncated or no safetensors file ({reason}); copy the checkpoint again") from None


def _compare(
    folder: Path, config: DraftConfig, expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]
) -> None:
    foreign = _foreign_head(config, found)
    if foreign:
        raise UserError(
            f"{folder}: architectures is {config.architecture}, but the file holds {_listed(foreign[1])}, tensors of a "
            f'{foreign[0]}: engines would silently ignore the head; set architectures to ["{foreign[0]}"] in config.json'
        )
    missing = sorted(expected.keys() - found.keys())
    if missing:
        raise UserError(f"{folder}: lacks {_listed(missing)}, which config.json calls for; export or copy it again")
    unexpected = sorted(found.keys() - expected.keys())
    if unexpected:
        raise UserError(f"{folder}: holds {_listed(unexpected)}, unknown to a {config.architecture}; export it again")
    for name in sorted(expected):
        if expected[name] != found[name]:
            raise UserError(
                f"{folder}: tensor {name} has shape {list(found[name])}, but config.json calls for {list(expected[name])}; "
                "one of the two files belongs to another checkpoint"
            )


def _foreign_head(config: DraftConfig, found: Iterable[str]) -> tuple[str, list[str]] | None:
    """Return (architecture, tensors) of a head that is in the file and not in the configuration."""
    for name, head_config in HEAD_CONFIGS.items():
        prefix = getattr(HEADS[head_config], "prefix", "")
        tensors = sorted(tensor for tensor in found if prefix and tensor.startswith(prefix))
        if tensors and name != config.architecture:
            return name, tensors
    return None


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def with_target(draft: Draft, target_name: str, tokenizer_hash: str | None) -> Draft:
    """Return `draft` with the target it was trained for recorded in its configuration."""
    draft.config = replace(draft.config, target_name=target_name, tokenizer_hash=tokenizer_hash)
    return draft
