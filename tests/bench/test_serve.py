"""Rounds alternate and resume, speed-ups are ratios within a round, the head's cost is a difference of block times."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_lilicorr.bench import cost, report, serve
from vllm_lilicorr.bench.__main__ import main as bench
from vllm_lilicorr.bench._results import Results
from vllm_lilicorr.bench._server import last_error
from vllm_lilicorr.config import ConvConfig, DFlashConfig, DraftConfig
from vllm_lilicorr.errors import UserError
from vllm_lilicorr.model import checkpoint

SPEED = {"none": 100.0, "none again": 102.0, "lilicorr": 130.0, "control": 120.0}
TAU = {"lilicorr": 2.6, "control": 2.0}


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """Servers and a client that only keep a log; throughput is `SPEED`, a tenth higher after a system's first run."""
    log = SimpleNamespace(started=[], asked=[], options=[], stop_after=None)

    started_with = log.options.append

    class Server:
        def __init__(self, target, speculative, options, env, dtype, eager, log):
            self.name = log.name.removeprefix("server-").removesuffix(".log").replace("-", " ")
            self.log_path = log
            started_with(options)

        def __enter__(self):
            log.started.append(self.name)
            return self

        def __exit__(self, *_):
            pass

        def url(self, path):
            return self.name

    def vllm_client(self, arguments):
        values = dict(zip(arguments, arguments[1:]))
        name, count = values["--base-url"], int(values["--num-prompts"])
        if log.stop_after == len(log.asked):
            raise KeyboardInterrupt
        log.asked.append((name, int(values["--max-concurrency"]), float(values["--temperature"]), values["--extra-body"]))
        rounds = sum(one[0] == name for one in log.asked)
        speed = SPEED[name] * (1 + 0.1 * (rounds > 1))
        found = {"output_throughput": speed, "duration": 1.0, "total_output_tokens": 8, "mean_ttft_ms": 1, "mean_tpot_ms": 2}
        if name in TAU:
            found |= {"spec_decode_num_drafts": 100, "spec_decode_accepted_tokens": round(100 * (TAU[name] - 1))}
        return {**found, "completed": count - (name == "failing")}

    logs = tmp_path / "logs"
    logs.mkdir()
    monkeypatch.setattr(serve.tempfile, "tempdir", str(logs))  # after an error they stay
    monkeypatch.setattr(serve, "Server", Server)
    monkeypatch.setattr(serve._Bench, "_vllm_client", vllm_client)
    monkeypatch.setattr(serve._Bench, "_warm_up", lambda self, server: None)
    monkeypatch.setattr(serve._Bench, "dataset", lambda self, prompts: Path("prompts.jsonl"))
    monkeypatch.setattr(serve, "backbone_only", lambda draft, folder: folder)
    return log


def arguments(tiny, output: Path, *more: str) -> list[str]:
    return [
        "--target", str(tiny.target), "--systems", f"lilicorr={tiny.lilicorr}", "--prompts-dir", str(tiny.prompts),
        "--datasets", "gsm8k", "--max-tokens", "16", "--repeats", "2", "--output", str(output), *more,
    ]  # fmt: skip


def test_rounds_run_every_system_and_turn_round(tiny, tmp_path, client, capsys):
    assert bench(["serve", *arguments(tiny, tmp_path, "--concurrency", "1", "4")]) == 0
    assert client.started == ["none", "lilicorr", "none again", "none again", "lilicorr", "none"]
    assert [c for name, c, *_ in client.asked if name == "lilicorr"] == [1, 4, 1, 4]
    assert "lilicorr" in capsys.readouterr().out


def test_together_starts_each_server_once(tiny, tmp_path, client):
    bench(["serve", *arguments(tiny, tmp_path, "--concurrency", "1", "--together")])
    assert client.started == ["none", "lilicorr", "none again"]
    assert [name for name, *_ in client.asked] == ["none", "lilicorr", "none again", "none again", "lilicorr", "none"]


def test_above_temperature_0_a_round_is_a_seed(tiny, tmp_path, client):
    bench(["serve", *arguments(tiny, tmp_path, "--concurrency", "1", "--temperature", "1", "--seeds", "7", "8", "9")])
    bodies = [body for name, _, temperature, body in client.asked if name == "lilicorr" and temperature == 1]
    assert bodies == [f'{{"add_special_tokens": false, "seed": {seed}}}' for seed in (7, 8, 9)]


def test_servers_sample_from_the_whole_distribution_unless_told_otherwise(tiny, tmp_path, client):
    bench(["serve", *arguments(tiny, tmp_path, "--concurrency", "1", "--server-args", "generation-config=auto")])
    for options in client.options:
        given = [value for name, value in zip(options, options[1:]) if name == "--generation-config"]
        assert given == ["vllm", "auto"], "the user's is the last, which counts"


def test_a_checkpoint_is_read_once_for_all_its_parts(tiny, tmp_path, client, monkeypatch):
    read: list[str] = []
    monkeypatch.setattr(serve, "checkpoint_digest", lambda draft: read.append(draft) or "digest")
    bench(["serve", *arguments(tiny, tmp_path, "--concurrency", "1", "4")])
    assert read == [str(tiny.lilicorr)]


def test_what_the_client_sets_in_the_environment_does_not_reach_later_servers(tmp_path, monkeypatch):
    from unittest.mock import MagicMock

    class Benchmarks:
        def __getattr__(self, name):
            if name in ("add_cli_args", "main_async"):
                seen.append(serve.os.environ.get("VLLM_LOGGING_LEVEL"))
                monkeypatch.setitem(serve.os.environ, "SET_BY_IMPORT", "1")
                return MagicMock() if name == "add_cli_args" else answer
            raise AttributeError(name)

    async def answer(arguments):
        return {"completed": 3}

    seen: list[str | None] = []
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    monkeypatch.delenv("SET_BY_IMPORT", raising=False)
    monkeypatch.setattr(serve.atexit, "register", lambda function: None)
    modules = {"vllm": MagicMock(), "vllm.benchmarks": MagicMock(), "vllm.benchmarks.serve": Benchmarks()}
    modules |= {"vllm.utils": MagicMock(), "vllm.utils.argparse_utils": MagicMock()}
    for name, module in modules.items():
        monkeypatch.setitem(serve.sys.modules, name, module)
    before = dict(serve.os.environ)
    assert serve._Bench(SimpleNamespace(), tmp_path, [], None)._vllm_client([]) == {"completed": 3}
    assert set(seen) == {"ERROR"} and dict(serve.os.environ) == before


def test_an_interrupted_grid_goes_on_where_it_stopped(tiny, tmp_path, client):
    client.stop_after = 3
    command = ["serve", *arguments(tiny, tmp_path, "--concurrency", "1", "4")]
    with pytest.raises(KeyboardInterrupt):
        bench(command)
    assert len(Results.read(tmp_path).parts) == 3
    client.stop_after, client.started[:] = None, []
    bench(command)
    assert client.started[0] == "lilicorr", "no speculation was done"
    assert len(client.asked) == len(Results.read(tmp_path).parts) == 3 * 2 * 2
    client.started.clear()
    bench(command)
    assert not client.started


def test_failed_requests_fail_the_run(tiny, tmp_path, client):
    SPEED["failing"] = 1.0
    command = arguments(tiny, tmp_path)
    command[3] = command[3].replace("lilicorr=", "failing=")
    with pytest.raises(UserError, match="1 of 3 requests of gsm8k failed; the server's log is .*server-failing.log"):
        bench(["serve", *command])


def test_a_prompt_that_does_not_fit_is_an_error_before_a_server_starts(tiny, tmp_path, client, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(serve, "Server", None)
    with pytest.raises(UserError, match="gsm8k, prompt 1: has 13 tokens, and with --max-tokens 16 passes --max-model-len 20"):
        bench(["serve", *arguments(tiny, tmp_path, "--max-model-len", "20")])


def test_a_system_is_a_checkpoint_and_keys_of_its_configuration(tmp_path):
    found = serve.parse_system("fast=some/draft,path_rule=exact,num_speculative_tokens=3,disable_by_batch_size=null")
    assert found.speculative(tmp_path) == {
        "model": "some/draft", "path_rule": "exact", "num_speculative_tokens": 3, "disable_by_batch_size": None
    }  # fmt: skip
    assert serve.System("none").speculative(tmp_path) is None
    for text in ("draft", "=draft", "a=", "none=draft", "a/b=draft", "a=draft,greedy"):
        with pytest.raises(UserError, match="must be"):
            serve.parse_system(text)


def test_two_systems_of_one_name_are_refused(tiny, tmp_path):
    with pytest.raises(UserError, match="two are called 'lilicorr'"):
        bench(["serve", *arguments(tiny, tmp_path), "--systems", f"lilicorr={tiny.lilicorr}", f"lilicorr={tiny.dflash}"])


@pytest.mark.parametrize("name", ["a/b", ""])
def test_a_grids_name_is_one_step_of_a_key(tiny, tmp_path, client, name):
    with pytest.raises(UserError, match=f"--name {name}: must be a name without '/'"):
        bench(["serve", *arguments(tiny, tmp_path, "--name", name)])


def test_only_lilicorr_without_convolution_is_its_own_control(tiny, tmp_path, client, monkeypatch):
    command = arguments(tiny, tmp_path)
    command[3] = f"dflash={tiny.dflash}"
    with pytest.raises(UserError, match="is DFlashDraftModel, and only a LiLiCorrDraftModel .* --control NAME"):
        bench(["cost", *command])
    convolved = replace(DraftConfig.load(tiny.lilicorr), conv=ConvConfig(2, 16))
    monkeypatch.setattr(DraftConfig, "load", lambda folder: convolved)
    with pytest.raises(UserError, match="is LiLiCorrDraftModel with a convolution"):
        bench(["cost", *arguments(tiny, tmp_path)])
    assert not client.started


def test_the_backbone_of_a_hub_id_is_a_dflash_drafter(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "resolve_folder", {"owner/draft": tiny.lilicorr}.get)
    folder = serve.backbone_only("owner/draft", tmp_path / "plain")
    monkeypatch.undo()
    draft = checkpoint.load_draft(folder)
    assert draft.config.architecture == "DFlashDraftModel" and draft.config.head == DFlashConfig()


def test_step_times_are_differences_of_two_readings():
    before = {"steps": 100, "seconds": {"drafting": 1.0}}
    after = {"steps": 300, "seconds": {"drafting": 2.5, "candidates": 0.5}}
    assert serve.difference(after, before) == {"steps": 200, "drafting": 1.5, "candidates": 0.5}
    assert serve.difference(after, after) is None and serve.difference({}, {}) is None


def test_a_decode_step_is_split_into_what_was_timed():
    old = {"drafting": 20.0, "candidates": 4.0, "head and walk": 3.0, "everything else": 80.0, "steps": 1000}
    new = {**old, "walk": 1.0, "verification": 70.0}
    cell = {"new": {"round0": {"step_seconds": new}, "round1": {"step_seconds": new}}, "old": {"round0": {"step_seconds": old}}}
    text = report._step_table({("T0", "gsm8k", 1): {**cell, "none": {"round0": {"step_seconds": None}}}})
    lines = [[cell.strip() for cell in line.strip("| ").split("|")] for line in text.splitlines() if line.startswith("|")]
    assert lines[0][2:] == [
        "Drafter", "Candidates", "Head", "Walk", "Verification", "Rest", "Step", "Head and walk", "and candidates"
    ]  # fmt: skip
    assert [line for line in lines if line[0] == "new"] == [
        ["new", "1", "13.0", "4.0", "2.0", "1.0", "70.0", "10.0", "100.0", "3.0 %", "7.0 %"]
    ]  # fmt: skip
    assert [line for line in lines if line[0] == "old"] == [
        ["old", "1", "13.0", "4.0", "3.0", "-", "-", "80.0", "100.0", "3.0 %", "7.0 %"]
    ]  # fmt: skip


def test_cost_measures_the_first_systems_backbone_as_control(tiny, tmp_path, client, capsys):
    bench(["cost", *arguments(tiny, tmp_path)])
    assert sorted(set(client.started)) == ["control", "lilicorr", "none", "none again"]
    (found,) = report.costs(Results.read(tmp_path)).values()
    # 2.6 / 130 and 2.0 / 120 in the first round, a tenth less in the second: the median of two is their mean.
    expected = 1e3 * (2.6 / 130 - 2.0 / 120) * (1 + 1 / 1.1) / 2
    assert found[0] == "control" and found[1]["lilicorr"]["head"] == pytest.approx(expected)
    assert "By subtraction" in capsys.readouterr().out


def test_cost_takes_an_earlier_grid_and_asks_for_one_that_is_there(tiny, tmp_path, client):
    command = arguments(tiny, tmp_path, "--concurrency", "1", "--name", "mine")
    command[4:4] = [f"control={tiny.dflash}"]
    bench(["serve", *command])
    client.started.clear()
    bench(["cost", "--grid", "mine", "--output", str(tmp_path)])
    assert not client.started and list(report.costs(Results.read(tmp_path))) == ["mine"]
    with pytest.raises(UserError, match="--grid other: .* holds no such runs"):
        bench(["cost", "--grid", "other", "--output", str(tmp_path)])
    with pytest.raises(UserError, match="has no such system; did you mean 'control'"):
        bench(["cost", "--grid", "mine", "--control", "controll", "--output", str(tmp_path)])
    with pytest.raises(UserError, match="needs --target and --systems, or --grid"):
        cost.measure(SimpleNamespace(grid=None, target=None, systems=None), Results(tmp_path))


def test_a_servers_last_word_is_its_error():
    log = "INFO ready\nTraceback\n    raise ValueError('x')\nValueError: no memory left\nINFO stopping\n"
    assert last_error(log) == "ValueError: no memory left"
    assert last_error("") == "it said nothing"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_real_server_is_measured_by_vllms_client(tiny, tmp_path, monkeypatch, capsys):
    """One small grid through `vllm serve`, its client and its metrics, in a process of its own as a user starts it."""
    import os
    import subprocess
    import sys

    pytest.importorskip("vllm")
    command = [
        sys.executable, "-m", "vllm_lilicorr.bench", "serve",
        "--target", str(tiny.target), "--systems", f"lilicorr={tiny.lilicorr}",
        "--prompts-dir", str(tiny.prompts), "--datasets", "gsm8k", "--concurrency", "2", "--repeats", "1", "--max-tokens", "200",
        "--ignore-eos", "--max-model-len", "256", "--dtype", "float32", "--output", str(tmp_path),
        "--server-args", "max-num-batched-tokens=256",
    ]  # fmt: skip
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
        try:
            shown, said = process.communicate(timeout=1500)
        finally:  # servers have sessions of their own: only the benchmark itself ends them
            if process.poll() is None:
                process.terminate()
                process.communicate(timeout=120)
    assert process.returncode == 0, said[-3000:]
    (runs,) = report.grids(Results.read(tmp_path)).values()
    (cell,) = runs.values()
    assert all(found["round0"]["output_tokens"] == 600 for found in cell.values())
    drafted = cell["lilicorr"]["round0"]
    assert drafted["tau"] > 1 and len(drafted["by_position"]) == 4 and drafted["step_seconds"]["steps"] >= 100
    assert cell["none"]["round0"]["drafts"] is None
    assert "Where a decode step's time goes" in shown
