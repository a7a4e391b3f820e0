"""Finds the files that come with the package: configurations, prompts, drafters.

    python -m vllm_lilicorr.files                             their names
    python -m vllm_lilicorr.files configs/lilicorr.json       where that one lies
    cp "$(python -m vllm_lilicorr.files configs/lilicorr.json)" .

The same from a wheel and from a checkout, where some of them lie beside the package. Imports no torch.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from .errors import UserError, nearest, run_command

PACKAGE = Path(__file__).resolve().parent


def folders() -> dict[str, Path]:
    """Return {name: path} of the folders: kinds of files, and drafter checkpoints."""
    drafters = sorted(config.parent for config in PACKAGE.glob("assets/*/config.json"))
    return {
        "configs": _beside("configs"),
        "prompts": PACKAGE / "assets/prompts",
        "training-prompts": _beside("trainer") / "prompts",
        **{folder.name: folder for folder in drafters},
    }


def names() -> dict[str, Path]:
    """Return {name: path} of everything that comes with the package: the files, and each drafter as one folder."""
    found = {}
    for name, folder in folders().items():
        if (folder / "config.json").exists():
            found[name] = folder
            continue
        files = sorted(path for path in folder.rglob("*") if path.suffix in (".json", ".jsonl", ".yaml"))
        found |= {f"{name}/{path.relative_to(folder).as_posix()}": path for path in files}
    return found


def find(name: str) -> Path:
    """Return the path of the file or folder `name`. Raises UserError, with the nearest known name, where there is none."""
    known = folders() | names()
    if name not in known:
        raise UserError(
            f"no file named '{name}' comes with vllm-lilicorr{nearest(name, known)}; "
            "'python -m vllm_lilicorr.files' lists them"
        )
    return known[name]


def _beside(folder: str) -> Path:
    """Return a source folder that an installed package holds and a checkout has beside the package."""
    return PACKAGE / folder if (PACKAGE / folder).is_dir() else PACKAGE.parent / folder


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m vllm_lilicorr.files", description="Print where a file that comes with the package lies, or all names."
    )
    parser.add_argument("name", nargs="?", help="a file, a folder of files, or a drafter; without it the names are listed")
    name = parser.parse_args(argv).name
    if name is not None:
        print(os.fspath(find(name)))
        return 0
    for known in names():
        print(known)
    return 0


if __name__ == "__main__":
    run_command(main)
