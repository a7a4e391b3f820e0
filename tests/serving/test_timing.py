"""Where a step's time goes, on a clock that is set by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from test_drafting import HEADS, Served

from vllm_lilicorr.serving import timing
from vllm_lilicorr.serving.timing import Timing


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    return now


def test_a_step_is_split_into_drafting_verification_and_the_rest(tmp_path: Path, clock: list[float]) -> None:
    sums, target = Timing(str(tmp_path / "timing.json")), torch.nn.Identity()
    sums.watch(target)

    def step(width: int) -> None:
        clock[0] += 2.0  # the scheduler
        target(torch.zeros(1))
        clock[0] += 1.0
        sums.enter()
        clock[0] += 0.25
        with sums.part("head and walk"):
            clock[0] += 0.25
            with sums.part("walk"):
                clock[0] += 0.5
        sums.leave(3, width)

    step(100)
    step(100)  # a prompt
    step(4)
    step(4)
    sums.write()
    found = json.loads((tmp_path / "timing.json").read_text())
    assert (found["steps"], found["blocks"]) == (2, 6)
    assert found["seconds"] == {
        "drafting": 2.0, "everything else": 6.0, "verification": 2.0, "walk": 1.0, "head and walk": 1.5
    }  # fmt: skip


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("plain", ["0", "1"])
def test_every_head_says_what_of_it_is_the_walk(name: str, plain: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LILICORR_PLAIN_HEAD", plain)
    monkeypatch.setenv("LILICORR_TIMING", str(tmp_path / "timing.json"))
    monkeypatch.setattr(timing.atexit, "register", lambda function: None)
    served = Served(name)
    drafting = served.drafting()
    drafting.timing.enter()
    drafting.propose(served.block, "greedy")
    parts = drafting.timing._step
    assert 0 < parts["walk"] < parts["head and walk"] and parts["candidates"] > 0
