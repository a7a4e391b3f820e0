"""What the V2 runner reads beside drafts: what adaptive verification sizes them by, and the logits they were drawn from."""

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
    drafted, padded = _kinds(step)
    torch.testing.assert_close(predicted[: len(drafted)][drafted], expected[drafted], atol=1e-4, rtol=1e-3)
    assert bool((predicted[: len(padded)][padded] == -1).all()), "a padded block was predicted for"


def test_dsparks_own_confidence_is_used(steps: dict[str, Any]) -> None:
    step = steps["dspark"]
    drafted, _ = _kinds(step)
    torch.testing.assert_close(torch.tensor(step["predicted"])[: len(drafted)][drafted], torch.tensor(step["confidence"]))


@pytest.mark.parametrize("head", ["lilicorr", "dflash2", "domino", "dspark"])
def test_a_block_past_the_limit_is_not_verified_and_teaches_the_estimator_nothing(steps: dict[str, Any], head: str) -> None:
    step = steps[head]
    assert step["predicted"][step["past"]] == [0.0] * len(step["predicted"][0])
    assert step["features"][step["rows"][step["past"]]] == [0.0] * len(step["features"][0]), "the estimator's, as it was made"


def test_dsparks_draws_leave_the_logits_they_were_drawn_from_to_the_verifier(steps: dict[str, Any]) -> None:
    step = steps["sampled"]
    rows, tokens, table, logits = (torch.tensor(step[name]) for name in ("rows", "tokens", "table", "logits"))
    drafted, padded = _kinds(step)
    torch.testing.assert_close(table[rows[drafted]], logits[drafted])
    others = [row for row in range(len(table)) if row not in step["rows"]]
    assert bool((table[others] == -7).all()), "padding wrote to a state"
    out = torch.tensor(step["tokens_out"])
    assert torch.equal(out[: len(rows)][drafted], tokens[drafted]) and bool((out[: len(rows)][padded] == -1).all())
    # The withheld block: the mask token, with certainty at every temperature vLLM accepts.
    mask = tokens[step["past"], 0]
    assert bool((tokens[step["past"]] == mask).all())
    for temperature in (0.01, 1.0, 100.0):
        probs = (table[rows[step["past"]]] / temperature).softmax(-1)
        torch.testing.assert_close(probs, torch.nn.functional.one_hot(mask, probs.shape[-1]).float().expand_as(probs))


@pytest.mark.parametrize("slot", [0, 1])
def test_dspark_draws_on_this_runner_from_the_distribution_of_its_logits(steps: dict[str, Any], slot: int) -> None:
    """By chi-square, rare tokens together. What is emitted, in an engine: test_sampling.py, with --every-combination."""
    counts, probs = (torch.tensor(steps["drawn"][name][slot], dtype=torch.float64) for name in ("counts", "expected"))
    expected = probs * counts.sum()
    often = expected > 5
    cells = [torch.cat((x[often], x[~often].sum()[None])) for x in (counts, expected)]
    statistic = ((cells[0] - cells[1]) ** 2 / cells[1]).sum()
    p = float(torch.special.gammaincc(torch.tensor((len(cells[0]) - 1) / 2).double(), statistic / 2))
    print(f"slot {slot}: {int(often.sum())} tokens, p = {p:.3f}")
    assert int(often.sum()) > 5 and p > 1e-4


def test_debugging_variables_are_refused_where_drafts_are_made_in_a_captured_graph(steps: dict[str, Any]) -> None:
    for case, text in steps["refused"].items():
        name, device, mode = case.split()
        captured = device == "cuda" and mode.startswith("FULL") and name != "LILICORR_TIMING"
        assert bool(text) == captured, case
        assert not captured or (name in text and "--enforce-eager" in text and "\n" not in text)


def _kinds(step: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which blocks [N] were drafted and which are padding; one is neither: it was withheld."""
    padded = torch.tensor(step["rows"]) < 0
    return ~padded & (torch.arange(len(padded)) != step["past"]), padded
