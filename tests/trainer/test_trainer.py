"""One rank's behaviour around the steps: what it writes, when it stops, what it refuses."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vllm_lilicorr.errors import UserError
from vllm_lilicorr.model.checkpoint import load_draft
from vllm_lilicorr.trainer import export as export_command
from vllm_lilicorr.trainer.config import TrainConfig

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def make(tiny_target, tiny_corpus, train_settings, tmp_path):
    """Return a function that opens a Trainer on tmp_path/run with overrides."""
    from vllm_lilicorr.trainer.loop import Trainer

    path = train_settings(tiny_target, tiny_corpus, tmp_path / "run", run={"save_every": 2}, data={"holdout": 2})

    def open_trainer(*overrides: str, **options) -> Trainer:
        return Trainer(TrainConfig.load(path, list(overrides)), **options)

    open_trainer.output = tmp_path / "run"  # type: ignore[attr-defined]
    return open_trainer


def records(output: Path) -> list[dict]:
    """Read as strict readers of JSON do, who know no NaN."""

    def refused(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    return [json.loads(line, parse_constant=refused) for line in (output / "metrics.jsonl").read_text().splitlines()]


def run(trainer) -> None:
    with trainer:
        trainer.run()


def names(output: Path) -> list[str]:
    """Checkpoints, finished or not; DeepSpeed also leaves its conversion scripts there."""
    return sorted(path.name for path in (output / "checkpoints").iterdir() if path.suffix != ".py")


def test_a_run_logs_every_term_saves_evaluates_and_exports(make, tiny_target, capsys):
    run(make("run.max_steps=5", "evaluation.every=2"))
    steps = [record for record in records(make.output) if "loss" in record]
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5]
    wanted = {
        "step", "loss", "dflash", "ce", "dist", "lr", "grad_norm", "tokens_per_s", "blocks_per_s", "memory_bytes",
        "oracle_prefix", "selected_prefix", "top1_prefix", "slot_accuracy", "score_spread",
    }  # fmt: skip
    assert all(wanted <= record.keys() for record in steps)
    for record in steps:
        assert record["loss"] == pytest.approx(record["dflash"] + 0.25 * (record["ce"] + record["dist"]), rel=1e-5)
    evaluations = [record for record in records(make.output) if "tau_greedy" in record]
    assert [record["step"] for record in evaluations] == [2, 4, 5]
    assert evaluations[-1]["tau_coverage"] >= evaluations[-1]["tau_greedy"] >= 1.0
    assert names(make.output) == ["latest", "step-00000004", "step-00000005"], "the last two stay"
    assert (make.output / "checkpoints/latest").read_text() == "step-00000005\n"
    resolved = TrainConfig.load(make.output / "config.yaml")
    assert f"# hash: {resolved.hash()}" in (make.output / "config.yaml").read_text()

    from vllm_lilicorr import check

    assert check.main([str(make.output / "export"), "--target", str(tiny_target)]) == 0
    exported = load_draft(make.output / "export").state_dict()
    export_command.main(["--run", str(make.output), "--out", str(make.output / "again")])
    for name, tensor in load_draft(make.output / "again").state_dict().items():
        assert torch.equal(tensor, exported[name]), name


def test_stop_after_keeps_the_schedule_and_the_same_command_goes_on(make):
    run(make("run.max_steps=6", "run.stop_after=3"))
    run(make("run.max_steps=6"))
    run(make("run.max_steps=6"))  # finished: nothing more to train
    steps = [record for record in records(make.output) if "loss" in record]
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5, 6]
    assert [record["lr"] for record in steps] == pytest.approx([3e-3 * f for f in (1, 1, 0.8, 0.6, 0.4, 0.2)])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_step_saves_and_ends_cleanly(make, number):
    trainer = make("run.max_steps=6", "run.save_every=100")
    reduce, sent = trainer._reduce, []

    def signalled(*arguments):
        if trainer.step == 2 and not sent:
            sent.append(os.kill(os.getpid(), number))
        return reduce(*arguments)

    trainer._reduce = signalled
    run(trainer)
    assert names(make.output) == ["latest", "step-00000003"] and not (make.output / "export").exists()
    assert make("run.max_steps=6", "run.save_every=100").step == 3


def test_a_loss_that_is_not_the_sum_of_its_logged_terms_stops_the_run(make):
    trainer = make("run.max_steps=2")
    forward = trainer.objective.forward

    def more(batch, step=0):
        loss, sums = forward(batch, step)
        return loss + (0.01 if step == 1 else 0.0), sums

    trainer.objective.forward = more
    with pytest.raises(RuntimeError, match=r"the loss \S+ is not the sum of its terms"):
        run(trainer)
    assert trainer.step == 1


def poisoned(trainer, at: int, what: str) -> None:
    """Make a term, or only the gradient, of step `at` not finite."""
    forward = trainer.objective.forward

    def bad(batch, step=0):
        loss, sums = forward(batch, step)
        if step == at - 1 and what == "gradient":
            loss.register_hook(lambda grad: grad * float("inf"))
        elif step == at - 1:
            sums[what] = (sums[what][0] * float("nan"), sums[what][1])
            loss = loss * float("nan")
        return loss, sums

    trainer.objective.forward = bad


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("what", ["dist", "gradient"])
def test_a_nonfinite_step_stops_the_run_naming_step_term_and_conversations(make, what, precision):
    trainer = make("run.max_steps=6", f"run.precision={precision}")
    poisoned(trainer, 3, what)
    expected = "loss term dist is nan" if what == "dist" else "the gradient is not finite"
    with pytest.raises(UserError, match=rf"step 3: {expected}, on conversations \d+.*--skip-nonfinite"):
        run(trainer)
    assert (make.output / "checkpoints/latest").read_text() == "step-00000002\n"


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("what", ["dist", "gradient"])
def test_a_tolerated_step_changes_no_weight(make, what, precision, stage):
    trainer = make(
        "run.max_steps=4", f"run.precision={precision}", f"deepspeed.config={ROOT}/configs/deepspeed/zero{stage}.json",
        skip_nonfinite=1,
    )  # fmt: skip
    poisoned(trainer, 2, what)
    with trainer:
        seen = []
        for _ in range(3):
            trainer.train_step()
            trainer.step += 1
            seen.append({name: p.detach().clone() for name, p in trainer.draft.named_parameters()})
        assert all(torch.equal(seen[0][name], seen[1][name]) for name in seen[0])
        assert any(not torch.equal(seen[1][name], seen[2][name]) for name in seen[0])
        assert all(p.isfinite().all() for p in seen[2].values())


@pytest.mark.parametrize("what", ["dist", "gradient"])
def test_a_tolerated_step_is_logged_as_null_and_the_run_resumes_over_it(make, what):
    trainer = make("run.max_steps=3", "run.stop_after=2", skip_nonfinite=1)
    poisoned(trainer, 2, what)
    run(trainer)
    run(make("run.max_steps=3"))
    bad = {
        record["step"]: {name for name, value in record.items() if value is None}
        for record in records(make.output)
        if "loss" in record
    }
    assert bad == {1: set(), 2: {"grad_norm"} | ({"loss", "dist"} if what == "dist" else set()), 3: set()}


@contextlib.contextmanager
def full_disk(room: int):
    """No file may grow past `room` bytes, as on a disk that fills up while it is written."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_stops_the_run_with_the_last_checkpoint_in_force(make):
    run(make("run.max_steps=4", "run.stop_after=2"))
    trainer = make("run.max_steps=4")
    with full_disk(100_000), pytest.raises(UserError, match=r"step-00000004: the checkpoint cannot be written .* free space"):
        run(trainer)
    assert names(make.output) == ["latest", "step-00000002"]
    assert make("run.max_steps=4").step == 2


def test_a_half_written_checkpoint_is_never_in_force(make):
    run(make("run.max_steps=4", "run.stop_after=2"))
    shutil.copytree(make.output / "checkpoints/step-00000002", make.output / "checkpoints/.writing-step-00000004")
    trainer = make("run.max_steps=4")
    assert trainer.step == 2
    run(trainer)
    assert not list((make.output / "checkpoints").glob(".writing-*"))


def test_records_of_steps_that_will_be_repeated_are_dropped(make):
    run(make("run.max_steps=4", "run.stop_after=2"))
    with (make.output / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "loss": 9.0}\n{"step": 4, "lo')
    run(make("run.max_steps=4"))
    assert [r["step"] for r in records(make.output) if "loss" in r] == [1, 2, 3, 4] and 9.0 not in [
        r.get("loss") for r in records(make.output)
    ]


def test_resuming_with_other_numbers_ranks_or_corpus_is_refused(make):
    run(make("run.max_steps=4", "run.stop_after=2"))
    with pytest.raises(UserError, match=r"another configuration \(optimizer.lr was 0.003, is 0.1\)"):
        make("run.max_steps=4", "optimizer.lr=0.1")
    path = make.output / "checkpoints/step-00000002/run.json"
    saved = json.loads(path.read_text())
    for key, value, sentence in (("world_size", 8, "written by 8 ranks and this run has 1"), ("corpus", "x", "another corpus")):
        path.write_text(json.dumps(saved | {key: value}))
        with pytest.raises(UserError, match=sentence):
            make("run.max_steps=4")


def test_the_checkpoint_in_force_stays_where_latest_was_set_back(make):
    run(make("run.max_steps=6", "run.save_every=1", "run.keep_last=4"))
    (make.output / "checkpoints/latest").write_text("step-00000003\n")
    run(make("run.max_steps=6", "run.save_every=1", "run.keep_last=1", "run.stop_after=4"))
    assert names(make.output) == ["latest", "step-00000004", "step-00000005", "step-00000006"]
    run(make("run.max_steps=6", "run.save_every=1", "run.keep_last=1"))
    assert names(make.output) == ["latest", "step-00000006"]


@pytest.mark.slow
def test_a_run_resumes_from_the_universal_format_and_then_from_its_own(make, tmp_path):
    options = ("run.max_steps=5", "run.save_every=1", "deepspeed.universal=true")
    run(make(*options, f"run.output={tmp_path}/straight"))
    run(make("run.max_steps=5", "run.stop_after=2"))
    folder = make.output / "checkpoints"
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", str(folder / "step-00000002")]
    subprocess.run([*command, "--output_folder", str(folder / "universal")], check=True, capture_output=True)
    shutil.copy(folder / "step-00000002/run.json", folder / "universal")
    (folder / "latest").write_text("universal\n")
    with pytest.raises(UserError, match=r"universal format; set deepspeed\.universal=true"):
        make("run.max_steps=5")
    run(make(*options, "run.stop_after=3"))
    run(make(*options))
    losses = [[r["loss"] for r in records(output) if "loss" in r] for output in (tmp_path / "straight", make.output)]
    assert len(losses[1]) == 5 and losses[0] == pytest.approx(losses[1], rel=1e-6)
    saved = folder / "step-00000005/run.json"
    saved.write_text(json.dumps(json.loads(saved.read_text()) | {"world_size": 8}))
    with pytest.raises(UserError, match="written by 8 ranks and this run has 1"):
        make(*options)


def test_every_value_reaches_tensorboard_and_wandb_and_a_resumed_run_stays_one_run(make, monkeypatch):
    """TensorBoard's own files; a stand-in for W&B, that says what it is given and which run it is."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logged, begun = [], []
    there = SimpleNamespace(log=lambda values, step: logged.append((step, values)), finish=lambda: None)
    wandb = SimpleNamespace(init=lambda **options: begun.append(options) or there)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    options = ("run.max_steps=3", "run.tensorboard=true", "run.wandb=drafters", "evaluation.every=1")
    run(make(*options, "run.stop_after=2"))
    run(make(*options))
    lines = records(make.output)
    assert logged == [(line["step"], line) for line in lines] and {"tau_greedy", "grad_norm"} <= {*lines[0], *lines[1]}
    board = EventAccumulator(str(make.output / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    written = {name: [(event.step, event.value) for event in board.Scalars(name)] for name in board.Tags()["scalars"]}
    assert written.keys() == {name for line in lines for name in line} - {"step"}
    for name, points in written.items():
        theirs = [(line["step"], pytest.approx(line[name], rel=1e-6)) for line in lines if name in line]
        assert points == theirs, name
    first, second = begun
    assert first["project"] == "drafters" and first["config"]["optimizer"]["lr"] == 3e-3
    assert first["id"] == second["id"] and second["resume"] == "allow"
    shutil.rmtree(make.output / "checkpoints")
    wandb.init = lambda **options: 1 / 0
    with pytest.raises(UserError, match=r"run\.wandb: W&B does not start \(division by zero\); log in"):
        make(*options)
    assert (make.output / "wandb-id").read_text().strip() != first["id"], "what begins anew is another run"
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"run\.wandb: the package wandb is not installed"):
        make(*options)


def test_sizes_that_do_not_divide_are_refused(make):
    with pytest.raises(UserError, match="batch_size: 4 is no multiple of micro_batch_size 3 x 1 ranks"):
        make("run.micro_batch_size=3")


def test_warm_start_takes_the_backbone_from_dflash_and_everything_from_lilicorr(make, tmp_path):
    run(make("run.max_steps=2", "draft.head=dflash", f"run.output={tmp_path}/plain"))
    plain = load_draft(tmp_path / "plain/export", dtype=torch.float32).state_dict()
    warm = make(f"run.warm_start={tmp_path}/plain/export")
    for name, tensor in warm.draft.state_dict().items():
        assert not name.startswith("backbone") or torch.equal(tensor.float(), plain[name]), name
    run(make("run.max_steps=2", f"run.output={tmp_path}/lilicorr"))
    lilicorr = load_draft(tmp_path / "lilicorr/export", dtype=torch.float32).state_dict()
    again = make(f"run.warm_start={tmp_path}/lilicorr/export", f"run.output={tmp_path}/again")
    for name, tensor in again.draft.state_dict().items():
        assert torch.equal(tensor.float(), lilicorr[name]), name


def test_warm_start_from_another_geometry_names_the_fields(make, tmp_path):
    run(make("run.max_steps=1", f"run.output={tmp_path}/other", "draft.block_size=6", "head.lilicorr.factor_dim=4"))
    with pytest.raises(UserError, match=r"block_size \(6, this run 5\).*factor_dim \(4, this run 8\)"):
        make(f"run.warm_start={tmp_path}/other/export")


def test_activation_checkpointing_and_accumulation_change_no_loss(make, tmp_path):
    options = ("run.max_steps=2", "run.precision=fp32")
    run(make(*options, f"run.output={tmp_path}/a"))
    run(make(*options, f"run.output={tmp_path}/b", "run.activation_checkpointing=true"))
    losses = [[r["loss"] for r in records(tmp_path / name) if "loss" in r] for name in "ab"]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize("head", ["dflash", "dflash2", "dspark", "domino"])
def test_arms_start_from_the_same_backbone_and_see_the_same_data(make, tmp_path, head):
    lilicorr = make(f"run.output={tmp_path}/a")
    dflash = make(f"run.output={tmp_path}/b", *arm(head))
    theirs = dflash.draft.backbone.state_dict()
    for name, tensor in lilicorr.draft.backbone.state_dict().items():
        assert torch.equal(tensor, theirs[name]), name
    epoch, conversations = lilicorr.schedule.batch(3)
    ours, theirs = lilicorr._batch(epoch, conversations, 0), dflash._batch(*dflash.schedule.batch(3), 0)
    assert torch.equal(ours.ids, theirs.ids) and torch.equal(ours.anchors, theirs.anchors)


ARMS = {
    "lilicorr": [],
    "dflash": [],
    "dflash2": [],
    "dspark": ["draft.block_size=4"],
    "domino": ["draft.block_size=4"],
    "lilicorr+conv": ["draft.conv=true"],
}


def arm(name: str) -> list[str]:
    return [f"draft.head={name.partition('+')[0]}", *ARMS[name]]


@pytest.mark.parametrize("name", list(ARMS))
def test_every_arm_trains_resumes_evaluates_and_exports(make, name, tiny_target, capsys):
    options = [*arm(name), "run.max_steps=4", "objective.train_vocab=32", "objective.head_anchors=4"]
    run(make(*options, "run.stop_after=2"))
    run(make(*options))
    steps = [record for record in records(make.output) if "loss" in record]
    assert [record["step"] for record in steps] == [1, 2, 3, 4]
    with make(*options) as trainer:
        assert trainer.step == 4 and trainer.draft.config.num_slots == 4
        for record in steps:
            terms = trainer.objective.weights(record["step"] - 1)
            assert record["loss"] == pytest.approx(sum(w * record[term] for term, w in terms.items()), rel=1e-4)
        evaluated = [record for record in records(make.output) if "tau_argmax" in record][-1]
        assert {f"tau_{rule}" for rule in trainer.objective.rules} <= evaluated.keys()
        assert ("tau_coverage" in evaluated) == trainer.objective.bounded
        for name_, parameter in trainer.draft.named_parameters():
            assert parameter.isfinite().all(), name_

    from vllm_lilicorr import check

    assert check.main([str(make.output / "export"), "--target", str(tiny_target)]) == 0
    exported = load_draft(make.output / "export").state_dict()
    export_command.main(["--run", str(make.output), "--out", str(make.output / "again")])
    for tensor_name, tensor in load_draft(make.output / "again").state_dict().items():
        assert torch.equal(tensor, exported[tensor_name]), tensor_name


@pytest.mark.parametrize("name", ["dflash2", "dspark", "domino"])
def test_warm_start_takes_backbone_and_head_of_the_same_kind(make, name, tmp_path):
    run(make(*arm(name), "run.max_steps=1", f"run.output={tmp_path}/first"))
    first = load_draft(tmp_path / "first/export", dtype=torch.float32).state_dict()
    with make(*arm(name), f"run.warm_start={tmp_path}/first/export") as again:
        for tensor_name, tensor in again.draft.state_dict().items():
            assert torch.equal(tensor.float(), first[tensor_name]), tensor_name


def test_a_fresh_convolution_changes_nothing_at_step_zero(make, tmp_path):
    """LiLiCorr + conv begins at exactly the plain drafter: the same weights elsewhere, the same losses, the same drafts."""
    outcomes = []
    for conv in ("null", "true"):
        trainer = make(f"draft.conv={conv}", f"run.output={tmp_path}/{conv}")
        batch = trainer._batch(*trainer.schedule.batch(0), 0)
        loss, sums = trainer.objective(batch)
        drafts, oracle = trainer.objective.drafts(trainer.objective.draft_blocks(batch))
        outcomes.append((trainer.draft, [loss, oracle, *drafts.values(), *(value for pair in sums.values() for value in pair)]))
    (plain, expected), (convolved, found) = outcomes
    assert convolved.config.conv is not None and plain.config.conv is None
    theirs = convolved.state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in plain.state_dict().items())
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    loss = found[0]
    loss.backward()
    projections = {name: p for name, p in convolved.named_parameters() if "kernel_projection" in name}
    assert len(projections) == 2 and all(not p.any() and p.grad.any() for p in projections.values()), "zero, and it learns"


def test_a_convolution_that_a_checkpoint_lacks_starts_as_the_identity(make, tmp_path):
    run(make("run.max_steps=1", f"run.output={tmp_path}/plain"))
    with make(f"run.warm_start={tmp_path}/plain/export", f"run.output={tmp_path}/conv", "draft.conv=true") as warm:
        state = warm.draft.state_dict()
    for name, tensor in load_draft(tmp_path / "plain/export", dtype=torch.float32).state_dict().items():
        assert torch.equal(state[name].float(), tensor), name
    assert all(not tensor.any() for name, tensor in state.items() if "kernel_projection" in name)
    run(make("run.max_steps=1", f"run.output={tmp_path}/conv", "draft.conv=true"))
    with pytest.raises(UserError, match=r"conv \(ConvConfig\(kernel_size=2, group_size=16\), this run None\)"):
        make(f"run.warm_start={tmp_path}/conv/export")


@pytest.mark.parametrize("stage", [0, 1])
def test_a_frozen_backbone_keeps_the_checkpoints_weights_and_the_head_learns(make, tmp_path, stage):
    run(make("run.max_steps=2", "draft.head=dflash", f"run.output={tmp_path}/plain"))
    plain = load_draft(tmp_path / "plain/export").state_dict()
    frozen = [
        f"run.warm_start={tmp_path}/plain/export", "draft.freeze_backbone=true", "run.max_steps=4",
        f"deepspeed.config={ROOT}/configs/deepspeed/zero{stage}.json",
    ]  # fmt: skip
    with make(*frozen, f"run.output={tmp_path}/fresh") as trainer:
        fresh = {name: tensor.clone() for name, tensor in trainer.draft.state_dict().items()}
    run(make(*frozen, "run.stop_after=2"))
    run(make(*frozen))
    export_command.main(["--run", str(make.output), "--out", str(make.output / "again")])
    for folder in ("export", "again"):
        trained = load_draft(make.output / folder).state_dict()
        assert all(torch.equal(trained[name], tensor) for name, tensor in plain.items() if name.startswith("backbone"))
        assert not torch.equal(trained["head.out_head.weight"], fresh["head.out_head.weight"].bfloat16())


IDENTITIES_ONLY = "draft.without=[pass_hidden_proj, feature_mlp, slot_embedding, rank_embedding, context_proj]"


def test_without_tower_and_context_a_pairs_score_depends_on_its_two_tokens_alone(make, tmp_path):
    options = ("run.max_steps=4", "head.lilicorr.num_layers=0", IDENTITIES_ONLY)
    run(make(*options, "run.stop_after=2"))
    run(make(*options))
    export_command.main(["--run", str(make.output), "--out", str(make.output / "again")])
    draft = load_draft(make.output / "export", dtype=torch.float32)
    again = load_draft(make.output / "again", dtype=torch.float32).state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in draft.state_dict().items())
    with make("head.lilicorr.num_layers=0", f"run.output={tmp_path}/fresh") as trainer:
        fresh = trainer.draft.head.out_head.weight.clone()
    assert not torch.equal(draft.head.out_head.weight, fresh.bfloat16().float()), "what is left of the head learns"

    slots, topk, hidden = draft.config.num_slots, draft.config.head.candidate_topk, draft.config.hidden_size
    tokens = torch.randn(1, slots, topk, hidden)

    def pairs(tokens: torch.Tensor) -> torch.Tensor:
        log_probs = torch.randn(1, slots, topk).log_softmax(-1).sort(-1, descending=True).values
        context = torch.randn(1, slots, hidden), torch.randn(1, hidden)
        return draft.head(tokens, log_probs, *context, torch.tensor([True]))[1]

    with torch.no_grad():
        scores, elsewhere = pairs(tokens), pairs(tokens)
        assert torch.equal(scores, elsewhere) and scores.std() > 0
        moved = pairs(tokens.roll((1, 1), (1, 2)))  # the same tokens, in other slots and ranks
        torch.testing.assert_close(moved[:, 1:], scores[:, :-1].roll((1, 1), (2, 3)))
        assert not torch.allclose(pairs(torch.randn_like(tokens)), scores)


def test_a_part_that_the_head_has_not_cannot_be_left_out(make):
    with pytest.raises(UserError, match="draft.without: this head has no 'pass_hiden_proj'.*did you mean 'pass_hidden_proj'"):
        make("draft.without=[pass_hiden_proj]")
    with pytest.raises(UserError, match="no 'embed' to leave out; it has anchor_norm, anchor_out_head, context_proj"):
        make("draft.without=[embed]")
    with pytest.raises(UserError, match="no 'rank_embedding' to leave out; it has hidden_projection, predecessor_codebook"):
        make("draft.head=dflash2", "draft.without=[rank_embedding]")


def test_a_step_count_that_a_checkpoint_brings_goes_where_the_fused_step_reads_it(tmp_path):
    from vllm_lilicorr.trainer import checkpoints

    def load(fused: bool | None) -> str:
        parameter = torch.empty(2, device="meta")  # a GPU's, were there one
        state = {parameter: {"step": torch.tensor(3.0)}}
        optimizer = SimpleNamespace(param_groups=[{"params": [], "fused": fused}], state=state)
        engine = SimpleNamespace(load_checkpoint=lambda folder, tag: (folder, {}), basic_optimizer=optimizer)
        checkpoints.load(engine, tmp_path, "universal")
        return state[parameter]["step"].device.type

    assert (load(True), load(None)) == ("meta", "cpu")


def test_a_run_of_an_earlier_version_resumes(make):
    """Its saved configuration lacks the keys that came later, and other heads' sections decide nothing."""
    run(make("run.max_steps=4", "run.stop_after=2"))
    path = make.output / "checkpoints/step-00000002/run.json"
    saved = json.loads(path.read_text())
    for key in ("conv", "conv_kernel_size", "conv_group_size", "freeze_backbone", "without"):
        del saved["config"]["draft"][key]
    for key in ("loss", "dflash2", "dspark", "domino"):
        del saved["config"]["objective"][key]
    for key in ("dflash2", "dspark", "domino"):
        del saved["config"]["head"][key]
    path.write_text(json.dumps(saved | {"config_hash": "0" * 16}))
    assert make("run.max_steps=4").step == 2
    with pytest.raises(UserError, match=r"draft\.conv was null, is true"):
        make("run.max_steps=4", "draft.conv=true")


@pytest.mark.slow
def test_stock_vllms_head_loads_the_export_and_gives_our_scores(make):
    """The head of an exported run, read from its published tensor names, in vLLM's own implementation."""
    pytest.importorskip("vllm")
    import importlib.util

    import torch.distributed as dist
    from safetensors.torch import load_file

    run(make("run.max_steps=3"))
    dist.destroy_process_group()  # vLLM wants its own
    spec = importlib.util.spec_from_file_location("stock", ROOT / "tests/core/stock.py")
    stock = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stock)
    draft = load_draft(make.output / "export", dtype=torch.float32)
    published = load_file(make.output / "export/model.safetensors")
    assert {
        name.removeprefix("lilicorr.") for name in published if name.startswith("lilicorr.")
    } == draft.head.state_dict().keys()
    config, n = draft.config, 3
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    slots, topk, hidden = config.num_slots, config.head.candidate_topk, config.hidden_size
    log_probs = normal(n, slots, topk).log_softmax(-1).sort(-1, descending=True).values
    inputs = (
        normal(n, slots, topk, hidden),
        log_probs,
        normal(n, slots, hidden),
        normal(n, hidden),
        torch.tensor([True, False, True]),
    )
    with stock.vllm_parallel_state(), torch.no_grad():
        names = ("token_embeddings", "candidate_log_probs", "pass_hidden", "anchor_hidden", "anchor_valid")
        theirs = stock.stock_head(config, draft.head).score(**dict(zip(names, inputs, strict=True)))
        for a, b in zip(draft.head(*inputs), theirs, strict=True):
            assert float((a - config.head.logit_scale * b).abs().max()) <= 1e-5
