"""What all tests share: reproducible settings, and the real chat target."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Before torch is imported anywhere; child processes inherit it. Sums depend on how many threads share them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hypothesis
import pytest

ROOT = Path(__file__).resolve().parents[1]

# The same examples in every run; HYPOTHESIS_PROFILE=explore looks for new ones.
hypothesis.settings.register_profile("repeat", derandomize=True, deadline=None)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=1000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeat"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest share first: the serving tests, which all go to one process (see below)."""
    items.sort(key=lambda item: not item.nodeid.startswith("tests/serving/"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Share tests out by file, so that a file's expensive fixtures are made once, and all of serving as one.

    Two engines side by side would each measure and take the same memory. (xdist's own way to say this, xdist_group, has
    no effect from pytest 9.2 on.)
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "tests/serving" if nodeid.startswith("tests/serving/") else nodeid.split("::")[0]

    return ByFile(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--prompts-dir",
        type=Path,
        help="folder of benchmark prompts (gsm8k.jsonl, ...); tests that need one of them skip by name without it",
    )
    parser.addoption(
        "--every-combination",
        action="store_true",
        help="serve every method on every runner and release, half an hour more on two cores (without it: LiLiCorr on all of "
        "them, the others on both runners, one release each)",
    )


@pytest.fixture
def benchmark(request: pytest.FixtureRequest) -> Callable[[str], Path]:
    """Return a function from a benchmark's name to its file in --prompts-dir; it skips the test where that is absent."""
    folder: Path | None = request.config.getoption("--prompts-dir")

    def find(name: str) -> Path:
        if folder is None:
            pytest.skip(f"{name}: no --prompts-dir was given")
        if not (folder / f"{name}.jsonl").exists():
            pytest.skip(f"{name}: {folder} has no {name}.jsonl")
        return folder / f"{name}.jsonl"

    return find


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Return the folder of SmolLM2-135M-Instruct ($SMOLLM2, else models/smollm2-135m-instruct), made on first use."""
    from vllm_lilicorr.smollm2 import make

    folder = Path(os.environ.get("SMOLLM2", ROOT / "models/smollm2-135m-instruct"))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:  # test processes run side by side
        fcntl.flock(lock, fcntl.LOCK_EX)
        make(folder)
    return folder
