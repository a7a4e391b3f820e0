"""What all tests share: reproducible settings, and the real chat target."""

from __future__ import annotations

import fcntl
import os
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
