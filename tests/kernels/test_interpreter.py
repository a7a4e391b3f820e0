"""Without a GPU, the kernels themselves are tested in Triton's interpreter, which a process chooses before it imports Triton."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import MODE, SEED


@pytest.mark.slow
@pytest.mark.skipif(MODE != "torch", reason=f"this process already runs the kernels ({MODE})")
def test_every_kernel_test_passes_in_the_interpreter():
    pytest.importorskip("triton", reason="Triton is not installed, so its kernels cannot be interpreted")
    environment = os.environ | {"TRITON_INTERPRET": "1", "LILICORR_TEST_SEED": str(SEED)}
    environment.pop("PYTEST_ADDOPTS", None)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning", str(Path(__file__).parent)],
        env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-20_000:] + run.stderr[-2_000:]
    assert " passed" in run.stdout

@pytest.mark.skipif(MODE != "interpreter", reason="says what the child process above does")
def test_the_interpreter_really_interprets():
    """A kernel that is called here runs as Python: otherwise the other tests would quietly test the torch twins."""
    import torch
    from triton.runtime.interpreter import InterpretedFunction

    from vllm_lilicorr.kernels import bias_silu

    assert isinstance(bias_silu._bias_silu_kernel, InterpretedFunction)
    calls = []
    launch = bias_silu._bias_silu_triton
    bias_silu._bias_silu_triton = lambda *args: calls.append(args) or launch(*args)
    try:
        bias_silu.bias_silu(torch.zeros(1, 4), torch.zeros(1, 4))
    finally:
        bias_silu._bias_silu_triton = launch
    assert calls
