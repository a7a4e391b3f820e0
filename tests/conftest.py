"""What all tests share: reproducible settings, and the real chat target."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

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


LONGEST = (
    "serving/test_sampling", "core/test_reference", "serving/test_engines", "serving/test_methods", "serving/test_demo",
    "trainer/test_run", "serving/test_http", "serving/test_configuration", "kernels/test_interpreter", "bench/test_serve",
    "core/test_packaging", "trainer/test_regenerate",
)  # fmt: skip
"""The files that take longest, in that order: shared out first, file by file (a file's expensive fixtures are
made once), so that the processes of `make test` end together."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {f"tests/{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.nodeid.split("::")[0], len(places)))


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
