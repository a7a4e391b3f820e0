"""Every other method in real engines, on both runners and releases: tokens are the target's, drafts the reference's."""

from __future__ import annotations

import itertools
from typing import Any

import pairs
import pytest
from engines import RELEASES, Run, compare_drafts, compare_outputs, run

pytestmark = pytest.mark.slow

LIMIT, SLOTS = 128, 7
METHODS = ("lilicorr-conv", "dflash2", "dspark", "domino")
GREEDY = {"temperature": 0, "ignore_eos": True}
SHORT, LONG = pairs.PROMPTS[:3], pairs.PROMPTS[3]
ALONE, TOGETHER = 0, 1


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each method on both runners and, over the two, on both releases; with --every-combination on all four."""
    if "case" in metafunc.fixturenames:
        every = metafunc.config.getoption("--every-combination")
        cases = [
            f"{method}-{runner}-{release}"
            for (i, method), (j, runner), (k, release) in itertools.product(
                enumerate(METHODS), enumerate(("v1", "v2")), enumerate(RELEASES)
            )
            if every or (i + j + k) % 2 == 0
        ]
        metafunc.parametrize("case", cases, indirect=True, scope="module")


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest) -> dict[str, Any]:
    """A small target, a drafter of the method that is good for LIMIT positions, and where they are served."""
    method, runner, release = request.param.rsplit("-", 2)
    target, draft = pairs.cached_pair(method)
    short = pairs._made(
        draft.with_name(f"short-{method}"), lambda folder: pairs.with_config(draft, folder, max_position_embeddings=LIMIT)
    )
    shifted = pairs.HEADS[method][0].shifted
    # The readable lattice heads where Triton is interpreted, as in test_engines.py. The slot loops have few kernels.
    env = {"LILICORR_PLAIN_HEAD": "1"} if runner == "v2" and not shifted else {}
    return {"target": target, "draft": short, "shifted": shifted, "engine": {"runner": runner, "release": release, "env": env}}


@pytest.fixture(scope="module")
def done(case: dict[str, Any]) -> Run:
    """Short requests, chunked prefills among them; then the same beside one that outgrows the drafter."""
    short = [{**GREEDY, "max_tokens": 16}] * 3
    phases = [
        {"prompts": SHORT, "params": short},
        {"prompts": [LONG, *SHORT], "params": [{**GREEDY, "max_tokens": 40}, *short]},
    ]
    return run(
        case["target"], case["draft"], phases, **case["engine"], block_size=32, max_num_seqs=4, max_num_batched_tokens=96,
        enable_prefix_caching=True, enable_chunked_prefill=True,
    )  # fmt: skip


def test_our_classes_draft(done: Run, case: dict[str, Any]) -> None:
    release = case["engine"]["release"].replace(".", "")
    assert done.result["drafter"] == {"v1": "DraftProposer", "v2": f"Speculator{release}"}[case["engine"]["runner"]]


def test_served_tokens_are_the_targets_own(done: Run, case: dict[str, Any]) -> None:
    outputs = [
        (f"phase {number}, request {i}", prompt, output)
        for number, phase in enumerate(done.phases)
        for i, (prompt, output) in enumerate(zip(phase["prompts"], done.tokens(number), strict=True))
    ]
    tally = compare_outputs(case["target"], outputs)
    tally.check()
    assert tally.compared >= 16 * 6 + 40


@pytest.mark.parametrize("phase", [ALONE, TOGETHER])
def test_drafts_equal_the_references(done: Run, case: dict[str, Any], phase: int) -> None:
    tally = compare_drafts(case["target"], case["draft"], done, phase)
    tally.check()
    assert tally.compared > 80


def test_drafts_are_right_often(done: Run) -> None:
    assert done.acceptance_length() > 1.3, "a drafter that is never right exercises nothing"


def test_a_block_reaches_to_the_drafters_limit_and_not_past_it(done: Run, case: dict[str, Any]) -> None:
    rows = SLOTS if case["shifted"] else SLOTS + 1
    blocks = done.blocks(TOGETHER, 0)
    drafted = [block["anchor"] for block in blocks if block["drafts"]]
    bare = [block["anchor"] for block in blocks if not block["drafts"]]
    assert drafted and max(drafted) + rows <= LIMIT
    assert bare and min(bare) + rows > LIMIT
