from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the helpers beside the tests

import pairs  # noqa: E402


@pytest.fixture(scope="session")
def pair() -> tuple[Path, Path]:
    """A small target and a drafter trained for it: (target folder, drafter folder)."""
    return pairs.cached_pair()


@pytest.fixture(scope="session")
def short_draft(pair: tuple[Path, Path]) -> Path:
    """The same drafter, but only good for 128 positions."""
    return pairs._made(pair[1].with_name("short"), lambda folder: pairs.with_config(pair[1], folder, max_position_embeddings=128))


@pytest.fixture(scope="session", autouse=True)
def second_release(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fetch vLLM 0.33, 340 MB, while the tests that do without it run; those that need it wait for it."""
    if not any("0.33" in item.nodeid for item in request.session.items):
        yield
        return
    command = [sys.executable, str(Path(__file__).with_name("make_vllm033.py"))]
    fetching = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    yield
    fetching.wait()
