"""Real engines, both runners, both releases: what is served equals the target, and what is drafted equals the reference."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pairs
import pytest
import torch
from engines import RELEASES, Run, compare_drafts, compare_outputs, run
from safetensors.torch import load_file, save_file

from vllm_lilicorr.bench.serve import backbone_only
from vllm_lilicorr.model.checkpoint import load_draft
from vllm_lilicorr.near_tie import Comparison
from vllm_lilicorr.reference import ReferenceDecoder, acceptance_length
from vllm_lilicorr.target import load_target

pytestmark = pytest.mark.slow

LIMIT, SLOTS = 128, 7
GREEDY = {"temperature": 0, "ignore_eos": True}
ALONE, TOGETHER, AFTER = 0, 1, 2
SHORT, LONG, MIDDLE = pairs.PROMPTS[:3], pairs.PROMPTS[3], pairs.PROMPTS[4]


@pytest.fixture(scope="module", params=[f"{runner}-{release}" for runner, release in itertools.product(("v1", "v2"), RELEASES)])
def combination(request: pytest.FixtureRequest) -> dict[str, Any]:
    runner, release = request.param.split("-")
    # On the V2 runner the head's own kernels would be interpreted too, which takes minutes: there the readable head drafts, and
    # one short test below runs the kernels inside the engine.
    env = {"LILICORR_PLAIN_HEAD": "1"} if runner == "v2" else {}
    return {"runner": runner, "release": release, "env": env}


@pytest.fixture(scope="module")
def mixed(pair: tuple[Path, Path], short_draft: Path, combination: dict[str, Any]) -> Run:
    """Three short requests alone; together with one that outgrows the drafter; and alone again. Prompts are prefilled in
    chunks, and their blocks are cached."""
    short = [{**GREEDY, "max_tokens": 24}] * 3
    phases = [
        {"prompts": SHORT, "params": short, "serial": True},
        {"prompts": [LONG, *SHORT], "params": [{**GREEDY, "max_tokens": 48}, *short]},
        {"prompts": SHORT, "params": short, "serial": True},
    ]
    return run(
        pair[0], short_draft, phases, **combination, block_size=32, max_num_seqs=4, max_num_batched_tokens=96,
        enable_prefix_caching=True, enable_chunked_prefill=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def to_the_end(pair: tuple[Path, Path], combination: dict[str, Any]) -> Run:
    """A request that runs into the target's maximum length, which lies below the drafter's, beside a short one."""
    params = [{**GREEDY, "max_tokens": 200}, {**GREEDY, "max_tokens": 16}]
    prompts = [MIDDLE, SHORT[2]]
    phases = [{"prompts": prompts[1:], "params": params[1:]}, {"prompts": prompts, "params": params}]
    return run(pair[0], pair[1], phases, **combination, block_size=32, max_model_len=96, max_num_seqs=2)


def _phases(done: Run) -> list[tuple[str, list[int], list[int]]]:
    return [
        (f"phase {number}, request {i}", prompt, output)
        for number, phase in enumerate(done.phases)
        for i, (prompt, output) in enumerate(zip(phase["prompts"], done.tokens(number), strict=True))
    ]


def test_our_proposer_runs_on_the_runner_that_was_asked_for(mixed: Run, combination: dict[str, Any]) -> None:
    if combination["runner"] == "v1":
        assert mixed.result["drafter"] == "DraftProposer" and "gpu.model_runner" not in mixed.result["runner"]
    else:
        assert mixed.result["drafter"] == f"Speculator{combination['release'].replace('.', '')}"


def test_served_tokens_are_the_targets_own(pair: tuple[Path, Path], mixed: Run, to_the_end: Run) -> None:
    tally = compare_outputs(pair[0], _phases(mixed) + _phases(to_the_end))
    tally.check()
    assert tally.compared > 250


@pytest.mark.parametrize("phase", [ALONE, TOGETHER, AFTER])
def test_drafts_equal_the_references(pair: tuple[Path, Path], short_draft: Path, mixed: Run, phase: int) -> None:
    tally = compare_drafts(pair[0], short_draft, mixed, phase)
    tally.check()
    assert tally.compared > 150


def test_drafts_equal_the_references_up_to_the_targets_end(pair: tuple[Path, Path], to_the_end: Run) -> None:
    compare_drafts(pair[0], pair[1], to_the_end, 1).check()


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_drafting_in_less_than_float32_changes_drafts_at_most(pair: tuple[Path, Path], dtype: str) -> None:
    done = run(*pair, [{"prompts": SHORT, "params": [{**GREEDY, "max_tokens": 24}] * 3}], speculative={"draft_dtype": dtype})
    tally = compare_outputs(pair[0], _phases(done))
    tally.check()
    assert tally.compared == 72 and done.acceptance_length() > 1.5


def test_a_confidence_threshold_ends_blocks_early_and_changes_no_token(pair: tuple[Path, Path]) -> None:
    phases = [{"prompts": SHORT, "params": [{**GREEDY, "max_tokens": 24}] * 3, "serial": True}]
    whole, cut = (run(*pair, phases, speculative={"confidence_threshold": threshold}) for threshold in (0.0, 0.5))
    tally = compare_outputs(pair[0], _phases(cut))
    tally.check()
    assert tally.compared == 72
    lengths = set()
    for i in range(3):
        blocks = {block["anchor"]: block["drafts"] for block in whole.blocks(0, i)}
        for block in cut.blocks(0, i):
            lengths.add(len(block["drafts"]))
            if block["anchor"] in blocks:
                assert block["drafts"] == blocks[block["anchor"]][: len(block["drafts"])]
    assert min(lengths) == 1 and max(lengths) > 1
    assert {len(block["drafts"]) for i in range(3) for block in whole.blocks(0, i)} == {SLOTS}


def test_acceptance_length_is_the_references(pair: tuple[Path, Path], short_draft: Path, mixed: Run) -> None:
    draft = load_draft(short_draft)
    decoder = ReferenceDecoder(load_target(pair[0], draft.config.target_layer_ids), draft.float(), "greedy")
    accepted = [n for prompt in SHORT for n in decoder.decode([prompt], 24)[0].accepted]
    served = [b["accepted"] for i in range(3) for b in mixed.blocks(ALONE, i) if b["accepted"] is not None]
    # vLLM's last block of a request may be cut by max_tokens and then verifies fewer drafts than the reference's.
    assert acceptance_length(served) == pytest.approx(acceptance_length(accepted), rel=0.05)
    assert acceptance_length(served) > 1.5, "a drafter that is never right exercises nothing"


@pytest.mark.parametrize("phase", [TOGETHER, AFTER])
def test_a_request_past_the_limit_changes_no_other_requests_drafts(mixed: Run, phase: int) -> None:
    tally = Comparison()
    for i in range(3):
        alone = mixed.blocks(ALONE, i)
        other = mixed.blocks(phase, i + (phase == TOGETHER))
        assert [b["anchor"] for b in alone] == [b["anchor"] for b in other]
        for ours, theirs in zip(alone, other, strict=True):
            # One batch or another: the same arithmetic in another order, so candidates may trade places at a tie.
            tally.add(f"request {i} at {ours['anchor']}", ours["drafts"], theirs["drafts"], [0.0] * SLOTS)
    tally.check()


def test_a_request_past_the_limit_goes_on_without_drafts(mixed: Run) -> None:
    blocks = mixed.blocks(TOGETHER, 0)
    drafted = [block["anchor"] for block in blocks if block["drafts"]]
    bare = [block["anchor"] for block in blocks if not block["drafts"]]
    assert drafted and max(drafted) + 1 + SLOTS <= LIMIT
    assert bare and min(bare) + 1 + SLOTS > LIMIT
    assert len(mixed.tokens(TOGETHER)[0]) == 48
    assert max(bare) >= LIMIT, "the request never reached the limit"


def test_a_request_ends_at_the_targets_maximum_length(to_the_end: Run) -> None:
    assert len(to_the_end.tokens(1)[0]) == 96 - 50
    assert to_the_end.tokens(1)[1] == to_the_end.tokens(0)[0]


def test_a_second_pass_reuses_cached_blocks(mixed: Run) -> None:
    assert mixed.cached(ALONE) == [0, 0, 0]
    assert mixed.cached(AFTER)[1] >= 32


def test_the_heads_kernels_draft_the_same_inside_the_v2_runner(pair: tuple[Path, Path]) -> None:
    phases = [{"prompts": [SHORT[2]], "params": {**GREEDY, "max_tokens": 10}}]
    done = run(*pair, phases, runner="v2", max_num_seqs=1, max_model_len=64)
    compare_drafts(*pair, done, 0).check()
    compare_outputs(pair[0], _phases(done)).check()


SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
CONSTRAINED = {"temperature": 0, "max_tokens": 48, "json_schema": SCHEMA}
STRUCTURED = {"prompts": pairs.PROMPTS[:4], "params": [CONSTRAINED, {**GREEDY, "max_tokens": 24}] * 2}
UNDRAFTED = [{"prompts": SHORT, "params": {**GREEDY, "max_tokens": 16}}, STRUCTURED]
DEBUG = {"LILICORR_DEBUG": "1"}


@pytest.mark.parametrize("speculation", ["none", "stock DFlash"])
def test_vllm_without_our_drafters_is_what_it_was(pair: tuple[Path, Path], tmp_path: Path, speculation: str) -> None:
    draft, spec, phases = None, None, UNDRAFTED
    if speculation != "none":
        draft, spec = backbone_only(pair[1], tmp_path / "plain"), {"method": "dflash", "num_speculative_tokens": SLOTS}
        phases = UNDRAFTED[:1]
    ours, theirs = (run(pair[0], draft, phases, speculative=spec, env={**DEBUG, **env}) for env in ({}, {"VLLM_PLUGINS": ""}))
    for phase in range(len(phases)):
        assert ours.tokens(phase) == theirs.tokens(phase)
    assert ours.result["metrics"] == theirs.result["metrics"]
    assert ours.result["drafter"] == theirs.result["drafter"] == ("NoneType" if draft is None else "DFlashProposer")
    assert not ours.trace


def test_adapters_change_the_targets_text_and_not_where_drafts_come_from(pair: tuple[Path, Path], tmp_path: Path) -> None:
    adapter, adapted = make_adapter(pair[0], tmp_path)
    # One after the other: vLLM's CPU build gives the adapter to every request of a batch that mixes them, with or without drafts.
    params = {**GREEDY, "max_tokens": 24}
    phases = [{"prompts": SHORT, "params": params}, {"prompts": SHORT, "params": params, "adapters": [str(adapter)] * 3}]
    done = run(*pair, phases, enable_lora=True, max_lora_rank=8)
    assert done.tokens(0) != done.tokens(1), "the adapter changes nothing"
    for phase, target in enumerate((pair[0], adapted)):
        outputs = zip(SHORT, done.tokens(phase), strict=True)
        compare_outputs(target, [(f"phase {phase}", prompt, output) for prompt, output in outputs]).check()
    assert done.result["metrics"]["num_accepted_tokens"]


def make_adapter(target: Path, folder: Path, rank: int = 4) -> tuple[Path, Path]:
    """Return a random LoRA adapter of the target's query and value projections, and the target with it merged in."""
    adapter, merged = folder / "adapter", folder / "merged"
    shutil.copytree(target, merged)
    weights, tensors, generator = load_file(target / "model.safetensors"), {}, torch.Generator().manual_seed(3)
    for name in [name for name in weights if name.endswith(("q_proj.weight", "v_proj.weight"))]:
        rows, columns = weights[name].shape
        down, up = (torch.randn(shape, generator=generator) * 0.2 for shape in ((rank, columns), (rows, rank)))
        weights[name] = weights[name] + (up @ down).to(weights[name].dtype)
        part = "base_model.model." + name.removesuffix(".weight")
        tensors |= {f"{part}.lora_A.weight": down, f"{part}.lora_B.weight": up}
    save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})
    adapter.mkdir()
    save_file(tensors, adapter / "adapter_model.safetensors")
    description = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (adapter / "adapter_config.json").write_text(json.dumps(description))
    return adapter, merged


def test_structured_output_is_what_it_is_without_drafts(pair: tuple[Path, Path]) -> None:
    drafted = run(*pair, [STRUCTURED])
    plain = run(pair[0], None, UNDRAFTED, env=DEBUG)  # the engine of the test above
    assert drafted.tokens(0) == plain.tokens(1)
