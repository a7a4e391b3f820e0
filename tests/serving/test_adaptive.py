"""vLLM's adaptive verification gets what it sizes a draft by: the scores that decided, or the head's own confidence."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from engines import HERE, environment

pytestmark = pytest.mark.slow

SLOPE, INTERCEPT, TEMPERATURE = 0.5, -0.2, 0.7  # the estimator's before its first fit; the driver's


@pytest.fixture(scope="module")
def steps() -> dict[str, Any]:
    command = [sys.executable, str(HERE / "adaptive_driver.py")]
    process = subprocess.run(command, env=environment(), text=True, capture_output=True)
    lines = [line for line in process.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, process.stderr[-4000:]
    return json.loads(lines[0].removeprefix("RESULT "))


@pytest.mark.parametrize("head", ["lilicorr", "dflash2", "domino"])
def test_the_estimator_predicts_from_the_scores_that_decided(steps: dict[str, Any], head: str) -> None:
    step = steps[head]
    scores = torch.tensor(step["scores"])
    best = (scores / TEMPERATURE).softmax(-1).amax(-1)
    expected = torch.sigmoid(SLOPE * torch.logit(best) + INTERCEPT)
    predicted = torch.tensor(step["predicted"])
    live = torch.tensor(step["rows"]) >= 0
    torch.testing.assert_close(predicted[: len(live)][live], expected[live], atol=1e-4, rtol=1e-3)
    assert bool((predicted[: len(live)][~live] == -1).all()), "a padded block was predicted for"


def test_dsparks_own_confidence_is_used(steps: dict[str, Any]) -> None:
    step = steps["dspark"]
    live = torch.tensor(step["rows"]) >= 0
    torch.testing.assert_close(torch.tensor(step["predicted"])[: len(live)][live], torch.tensor(step["confidence"]))
