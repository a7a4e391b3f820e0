from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # the helpers beside the tests

import pairs  # noqa: E402
from make_vllm033 import cache_folder  # noqa: E402

import vllm_lilicorr.model  # noqa: E402


def _cached(name: str, make: object) -> Path:
    """Return the folder `make(folder)` fills, from an earlier run if neither the helper nor the model has changed since."""
    digest = hashlib.sha256()
    for path in (Path(pairs.__file__), *sorted(Path(vllm_lilicorr.model.__file__).parent.rglob("*.py"))):
        digest.update(path.read_bytes())
    folder = cache_folder().parent / f"{name}-{digest.hexdigest()[:16]}"
    if not folder.exists():
        scratch = folder.with_name(f".{folder.name}.{os.getpid()}")
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            make(scratch)  # type: ignore[operator]
        finally:
            torch.set_num_threads(threads)
        scratch.rename(folder)
    return folder


@pytest.fixture(scope="session")
def pair() -> tuple[Path, Path]:
    """A small target and a drafter trained for it: (target folder, drafter folder)."""

    def make(root: Path) -> None:
        target = pairs.make_target(root / "target")
        pairs.train_draft(target, root / "draft", pairs.draft_config(target))

    root = _cached("pair", make)
    return root / "target", root / "draft"


@pytest.fixture(scope="session")
def short_draft(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same drafter, but only good for 128 positions."""
    return pairs.with_config(pair[1], tmp_path_factory.mktemp("short") / "draft", max_position_embeddings=128)
