"""Acceptance by simulation is what decoding accepts, block for block; runs resume; arms are told apart."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from vllm_lilicorr.bench import _datasets, _stats, acceptance
from vllm_lilicorr.bench.__main__ import main as bench
from vllm_lilicorr.bench._results import Results
from vllm_lilicorr.bench.acceptance import Setup, Task, Worker
from vllm_lilicorr.chat import render
from vllm_lilicorr.errors import UserError
from vllm_lilicorr.model.checkpoint import load_draft
from vllm_lilicorr.reference import ReferenceDecoder
from vllm_lilicorr.target import load_target

MAX_TOKENS = 24
LATTICE, SEQUENTIAL = ("greedy", "exact", "exact-normalized", "argmax"), ("greedy", "argmax")
HEADS = {"lilicorr": LATTICE, "dflash": ("argmax",), "dflash2": LATTICE, "dspark": SEQUENTIAL, "domino": SEQUENTIAL}


def make_setup(tiny, **changes) -> Setup:
    drafts = {name: str(getattr(tiny, name)) for name in HEADS}
    values = dict(
        target=str(tiny.target), drafts=drafts, dtype="float32", device="cpu", threads=1, batch_size=4, max_tokens=MAX_TOKENS,
        max_prompt_tokens=None, num_slots=None,
    )  # fmt: skip
    return Setup(**(values | changes))


def task(tiny, *names, **changes) -> Task:
    (prompts, *_), _ = _datasets.load(["gsm8k"], tiny.prompts, None)
    return Task(prompts, {name: (name, {}) for name in names}, **changes)


def reference_blocks(tiny, name: str, rule: str, num_slots: int | None = None, max_tokens: int = MAX_TOKENS) -> list[list[int]]:
    """Return the accepted drafts of every block of each conversation, one prompt decoded at a time."""
    from vllm_lilicorr.reference import decode_conversation, stop_token_ids
    from vllm_lilicorr.target import load_tokenizer

    draft = load_draft(getattr(tiny, name), dtype=acceptance.Worker(make_setup(tiny)).dtype)
    target, tokenizer = load_target(tiny.target, draft.config.target_layer_ids), load_tokenizer(tiny.target)
    (prompts, *_), _ = _datasets.load(["gsm8k"], tiny.prompts, None)
    decoder = ReferenceDecoder(target, draft, rule, stop_ids=sorted(stop_token_ids(target, tokenizer)), num_slots=num_slots)
    return [decode_conversation(decoder, tokenizer, one, max_tokens).accepted for one in prompts.conversations]


@pytest.mark.parametrize("num_slots", [None, 2])
def test_simulation_accepts_what_decoding_accepts_under_every_rule(tiny, num_slots):
    found = Worker(make_setup(tiny, num_slots=num_slots)).do(task(tiny, *HEADS))
    slots = num_slots or 4
    for name, rules in HEADS.items():
        assert found[name]["rules"].keys() - {"coverage"} == set(rules)
        for rule in rules:
            expected = [np.bincount(a, minlength=slots + 1).tolist() for a in reference_blocks(tiny, name, rule, num_slots)]
            assert found[name]["rules"][rule] == expected, (name, rule)
    accepted = np.sum(found["lilicorr"]["rules"]["greedy"], 0)
    assert (accepted > 0).sum() >= 2, "the tiny drafter must be right at times for this to say anything"
    assert found["lilicorr"]["answered"] == 3 and found["lilicorr"]["tokens"] == 4 * MAX_TOKENS
    assert {name for name in found if found[name]["convolution"]} == {"dflash2"}


def test_coverage_bounds_every_rule_and_needs_candidates(tiny):
    found = Worker(make_setup(tiny)).do(task(tiny, "lilicorr", "dflash"))
    taus = {rule: _stats.tau(np.array(h)) for rule, h in found["lilicorr"]["rules"].items()}
    assert taus["coverage"] >= max(taus.values()) and taus["coverage"] > taus["argmax"]
    assert set(found["dflash"]["rules"]) == {"argmax"}
    assert found["lilicorr"]["architecture"] == "LiLiCorrDraftModel"


def test_past_the_drafters_limit_there_are_no_blocks(tiny, tmp_path):
    import pairs

    limit = 30
    short = pairs.with_config(tiny.lilicorr, tmp_path / "short", max_position_embeddings=limit)
    found = Worker(make_setup(tiny, drafts={"lilicorr": str(short)})).do(task(tiny, "lilicorr"))
    tiny_short = dataclasses.replace(tiny, lilicorr=short)
    expected = [np.bincount(a, minlength=5).tolist() for a in reference_blocks(tiny_short, "lilicorr", "greedy")]
    assert found["lilicorr"]["rules"]["greedy"] == expected
    assert np.sum(expected) < np.sum(Worker(make_setup(tiny)).do(task(tiny, "lilicorr"))["lilicorr"]["rules"]["greedy"])


def test_an_answer_ends_with_its_stop_token_or_its_limit():
    assert acceptance.answer_length([5, 6, 7, 8], {7}, 10) == 3
    assert acceptance.answer_length([5, 6, 7, 8], {7}, 2) == 2
    assert acceptance.answer_length([5, 6, 7, 8], set(), 3) == 3
    assert acceptance.answer_length([5, 6], set(), 3) == 2


@pytest.mark.parametrize("most", [1, 3, 100])
def test_batches_keep_rows_and_tokens_within_their_bounds(most, monkeypatch):
    monkeypatch.setattr(acceptance, "BATCH_TOKENS", 40)
    rows = [(index, [0] * length) for index, length in enumerate((1, 2, 2, 7, 9, 9, 10, 50, 60))]
    found = list(acceptance.batches(rows, most))
    assert [row for batch in found for row in batch] == rows
    assert all(len(batch) <= most and (len(batch) == 1 or len(batch) * len(batch[-1][1]) <= 40) for batch in found)
    assert not list(acceptance.batches([], most))
    if most == 100:
        assert [len(batch) for batch in found] == [4, 3, 1, 1]


def test_prompts_that_are_too_long_are_left_out_and_counted(tiny):
    found = Worker(make_setup(tiny, max_prompt_tokens=20)).do(task(tiny, "dflash"))["dflash"]
    assert (found["answered"], found["prompts"]) == (2, 3) and sum(found["rules"]["argmax"][2]) == 0


def test_blocks_follow_their_accepted_lengths_and_draftless_steps_are_none():
    assert list(acceptance.blocks_of([2, 9, 9, 0, 1, 9, -1, 3])) == [2, 0, 1, 3]
    assert list(acceptance.blocks_of([])) == []


def test_sampled_runs_repeat_with_their_seed(tiny):
    worker = Worker(make_setup(tiny))
    runs = [
        worker.do(task(tiny, "lilicorr", temperature=1.0, proposal=proposal, seed=seed))["lilicorr"]
        for proposal, seed in (("sampled", 1), ("sampled", 1), ("sampled", 2), ("point", 1))
    ]
    assert runs[0] == runs[1] != runs[2] and runs[3] != runs[0]
    assert [list(run["rules"]) for run in runs] == [["sampled"]] * 3 + [["greedy"]]


@pytest.mark.parametrize("name", HEADS)
def test_above_temperature_zero_a_drafter_has_its_own_rule_and_draws_where_it_can(tiny, name):
    kinds = acceptance.proposals(str(getattr(tiny, name)))
    draws = {"sampled": "sampled"} if name in ("lilicorr", "dflash2", "dspark") else {}
    assert kinds == {"point": HEADS[name][0]} | draws
    for kind, rule in kinds.items():
        found = Worker(make_setup(tiny)).do(task(tiny, name, temperature=1.0, proposal=kind, seed=1))[name]
        assert list(found["rules"]) == [rule] and found["answered"] == 3 and np.sum(found["rules"][rule]) > 0


def arguments(tiny, output: Path, *more: str) -> list[str]:
    return [
        "acceptance", "--target", str(tiny.target), "--draft", f"lilicorr={tiny.lilicorr}", f"dflash={tiny.dflash}",
        "--prompts-dir", str(tiny.prompts), "--max-tokens", "12", "--seeds", "1", "2", "--output", str(output), *more,
    ]  # fmt: skip


def test_one_command_measures_everything_and_prints_it(tiny, tmp_path, capsys):
    assert bench(arguments(tiny, tmp_path, "--datasets", "gsm8k", "mt-bench", "mbpp")) == 0
    shown = capsys.readouterr()
    assert "missing: mbpp" in shown.err and "MT-Bench" in shown.out and "lilicorr, sampled" in shown.out
    results = Results.read(tmp_path)
    keys = {key for key in results.parts if "/gsm8k/" in key}
    runs = [f"T1/gsm8k/{arm}/seed{seed}" for arm in ("lilicorr/sampled", "lilicorr/point", "dflash/point") for seed in (1, 2)]
    assert keys == {f"acceptance/{rest}" for rest in ("T0/gsm8k/lilicorr", "T0/gsm8k/dflash", *runs)}
    assert len(results.parts) == 2 * len(keys)


def test_an_interrupted_run_goes_on_where_it_stopped(tiny, tmp_path, monkeypatch):
    done: list[str] = []
    work = Worker.do

    def counted(self, task):
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(str(task))
        return work(self, task)

    monkeypatch.setattr(Worker, "do", counted)
    with pytest.raises(KeyboardInterrupt):
        bench(arguments(tiny, tmp_path, "--datasets", "gsm8k"))
    first = json.loads((tmp_path / "results.json").read_text())["parts"]
    assert len(first) == 4  # the greedy task has two drafters
    done.append("a fourth, so that the interruption is over")
    bench(arguments(tiny, tmp_path, "--datasets", "gsm8k"))
    assert len(done) == len(set(done)) == 3 + 1 + 4
    whole = json.loads((tmp_path / "results.json").read_text())["parts"]
    assert {key: whole[key] for key in first} == first and len(whole) == 8
    monkeypatch.setattr(Worker, "__init__", None)  # nothing is even loaded
    bench(arguments(tiny, tmp_path, "--datasets", "gsm8k"))


def test_a_drafter_retrained_at_the_same_place_is_measured_again(tiny, tmp_path):
    import shutil

    from safetensors.torch import load_file, save_file

    moved = tmp_path / "draft"
    shutil.copytree(tiny.dflash, moved)
    command = arguments(tiny, tmp_path / "out", "--datasets", "gsm8k", "--temperature", "0")
    command[command.index(f"dflash={tiny.dflash}")] = f"dflash={moved}"
    bench(command)
    before = json.loads((tmp_path / "out/results.json").read_text())["parts"]
    weights = load_file(moved / "model.safetensors")
    save_file({name: -tensor for name, tensor in weights.items()}, moved / "model.safetensors", {"format": "pt"})
    bench(command)
    after = json.loads((tmp_path / "out/results.json").read_text())["parts"]
    assert after["acceptance/T0/gsm8k/lilicorr"] == before["acceptance/T0/gsm8k/lilicorr"]
    assert after["acceptance/T0/gsm8k/dflash"] != before["acceptance/T0/gsm8k/dflash"]


@pytest.mark.slow
def test_processes_share_the_work_and_change_nothing(tiny, tmp_path):
    bench(arguments(tiny, tmp_path / "one", "--temperature", "0"))
    bench(arguments(tiny, tmp_path / "two", "--temperature", "0", "--processes", "2"))
    one, two = (json.loads((tmp_path / name / "results.json").read_text())["parts"] for name in ("one", "two"))
    assert {key: part["result"] for key, part in one.items()} == {key: part["result"] for key, part in two.items()}


@pytest.mark.parametrize(
    ("draft", "sentence"),
    [
        (["a=x", "a=y"], "the name 'a' is taken"),
        (["a/b=x"], "must be a checkpoint, or NAME=CHECKPOINT"),
        (["=x"], "must be a checkpoint, or NAME=CHECKPOINT"),
    ],
)
def test_names_of_drafters_are_unambiguous(draft, sentence):
    with pytest.raises(UserError, match=sentence):
        acceptance.named(draft)


def test_what_cannot_work_is_refused_before_decoding(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(Worker, "__init__", None)
    with pytest.raises(UserError, match="--num-slots is 9, but lilicorr drafts at most 4"):
        bench(arguments(tiny, tmp_path, "--num-slots", "9"))
    with pytest.raises(UserError, match="--batch-size must be at least 1"):
        bench(arguments(tiny, tmp_path, "--batch-size", "0"))


def test_a_configuration_files_numbers_are_checked_too(tiny, tmp_path):
    config = tmp_path / "bench.yaml"
    section = f"{{target: {tiny.target}, draft: [a={tiny.dflash}], num-prompts: 0}}"
    config.write_text(f"output: {tmp_path / 'out'}\nacceptance: {section}\n")
    with pytest.raises(UserError, match="--num-prompts must be at least 1"):
        bench(["run", "--config", str(config)])


def test_prompts_are_rendered_as_the_reference_renders_them(tiny):
    worker = Worker(make_setup(tiny))
    seen: list[list[int]] = []

    def decode(batch):
        seen.extend(batch)
        return (acceptance.Answer(prompt, worker.tokenizer.encode("a")) for prompt in batch)

    (prompts, *_), _ = _datasets.load(["gsm8k"], tiny.prompts, None)
    answers = worker._ask(prompts.conversations, decode)
    assert [len(turns) for turns in answers] == [1, 2, 1]
    said = ("user", "two"), ("assistant", "a"), ("user", "and then?")
    expected = [{"role": role, "content": content} for role, content in said]
    assert answers[1][1].prompt == render(worker.tokenizer, expected) == seen[-1]
