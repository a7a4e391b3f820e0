"""`python kernels/gpu_check.py` as far as it can be tried without a GPU: what it runs, what it reports, what it leaves behind."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from vllm_lilicorr.kernels import gpu_check

from .conftest import DEVICE, MODE

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(MODE == "interpreter", reason="a kernel at a time would take minutes; the calls are the same on torch's twins")
def test_every_operation_is_exercised(capsys):
    gpu_check.exercise(DEVICE)
    assert capsys.readouterr().out == "exercised\n"


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """Stand in for Python and compute-sanitizer with a script that prints its arguments and fails where $FAIL is among them."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("python", "compute-sanitizer"):
        script = folder / name
        script.write_text('#!/bin/sh\necho "$0 $*"\ncase "$*" in *"$FAIL"*) exit 3;; esac\n')
        script.chmod(0o755)
    monkeypatch.setattr(gpu_check, "ROOT", ROOT)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--out", str(tmp_path / "report.txt")])
    return tmp_path / "report.txt"


PARTS = ["machine", "tests on the GPU", "head, 8B", "memcheck", "racecheck", "head, 8B, compiled", "head, other geometries"]


@pytest.mark.parametrize("failing", [None, "tests/kernels", "racecheck", "--compile"])
def test_every_part_runs_and_the_file_says_which_failed(stub, monkeypatch, failing):
    monkeypatch.setenv("FAIL", failing or "nothing fails")
    assert gpu_check.main() == (failing is not None)
    titles = [line.removeprefix("===== ") for line in stub.read_text().splitlines() if line.startswith("=====")]
    assert [title.split(": exit")[0] for title in titles[:-1]] == PARTS
    assert sum(": exit 3" in title for title in titles) == (failing is not None)
    assert titles[-1] == ("FAILED or incomplete" if failing else "all parts passed")
    text = stub.read_text()
    assert f"{ROOT / 'tests/kernels'}\n" in text and "--tool memcheck" in text and text.count("--exercise") == 2


def test_without_a_gpu_nothing_else_is_run(stub, monkeypatch):
    monkeypatch.setenv("FAIL", "torch.cuda.is_available")
    assert gpu_check.main() == 1
    assert "nothing else was run" in stub.read_text() and "tests on the GPU" not in stub.read_text()


@pytest.mark.slow
def test_a_part_that_is_cut_off_ends_with_all_it_started(tmp_path):
    alive = tmp_path / "alive"
    child = f"import pathlib, time\nwhile True: pathlib.Path({str(alive)!r}).touch(); time.sleep(0.05)"
    parent = f"import subprocess, sys, time\nprint('begun', flush=True)\nsubprocess.Popen([sys.executable, '-c', {child!r}])\ntime.sleep(60)"
    report = gpu_check.Report(tmp_path / "report.txt", minutes=1)
    report.run("endless", [sys.executable, "-c", parent], 5, {"PYTHONPATH": str(tmp_path)})
    assert report.failed and "===== endless: exit CUT OFF after 5 s" in report.path.read_text() and "begun" in report.path.read_text()
    assert alive.exists()
    alive.unlink()
    time.sleep(0.5)
    assert not alive.exists()


def test_a_part_without_time_is_reported(tmp_path):
    report = gpu_check.Report(tmp_path / "report.txt", minutes=0.05)
    report.run("late", [sys.executable, "-c", ""], 60, {"PYTHONPATH": str(tmp_path)})
    assert report.failed and "late: NOT RUN, no time was left" in report.path.read_text()
