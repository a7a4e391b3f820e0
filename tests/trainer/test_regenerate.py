from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from tqdm import tqdm

from vllm_lilicorr.chat import render
from vllm_lilicorr.errors import UserError
from vllm_lilicorr.target import load_tokenizer
from vllm_lilicorr.trainer import engines, regenerate
from vllm_lilicorr.trainer.corpus import Corpus
from vllm_lilicorr.trainer.regenerate import Journal, Unusable, parse_row

ROOT = Path(__file__).resolve().parents[2]
SOURCE = [
    {"turns": ["Hi", "Again"]},
    {"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}, {"role": "assistant", "content": "old"}]},
    {"messages": [{"role": "user", "content": "no answer here"}]},
    {"prompt": "x"},
    {"turns": []},
    {"turns": ["y" * 600]},
    {"messages": [{"role": "user", "content": 7}]},
    {"messages": [{"role": "user", "content": "  "}, {"role": "assistant", "content": "old"}]},
    *({"prompt": f"question {i}"} for i in range(12)),
]


class FakeEngine:
    """Answers by a hash of the prompt, a few requests a step, latest first: rows finish out of order."""

    def __init__(self, *_: object, max_length: int = 512, delay: float = 0.0) -> None:
        self.max_length, self.delay, self.waiting = max_length, delay, []

    def submit(self, key, prompt, max_tokens):
        self.waiting.append((key, prompt, max_tokens))

    def finished(self):
        time.sleep(self.delay)
        done, self.waiting = self.waiting[-2:], self.waiting[:-2]
        return [(key, answer(prompt)[:limit], "stop") for key, prompt, limit in done]

    def close(self):
        pass


def answer(prompt):
    digest = hashlib.sha256(np.array(prompt).tobytes()).digest()
    return [70 + byte % 26 for byte in digest[: 3 + digest[0] % 5]] + [2]


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in SOURCE) + "\nnot json\n")
    return path


def run(monkeypatch, target, source, out, *arguments):
    monkeypatch.setattr(regenerate, "make_engine", FakeEngine)
    assert regenerate.main(["--target", str(target), "--prompts", str(source), "--out", str(out), *arguments]) == 0
    return out


def rows(corpus):
    return {corpus[i].key: (corpus[i].ids.tolist(), corpus[i].spans) for i in range(len(corpus))}


def test_every_assistant_turn_is_regenerated_and_unusable_rows_are_counted(monkeypatch, tiny_target, source, tmp_path):
    corpus = Corpus(run(monkeypatch, tiny_target, source, tmp_path / "out"))
    assert corpus.reports[0]["unusable"] == {"empty": 2, "malformed": 2, "no assistant turn": 1, "too long": 1}
    found = rows(corpus)
    assert {key[0] for key in found} == {0, 1, 3, *range(8, 20)}
    tokenizer = load_tokenizer(tiny_target)
    prompt = render(tokenizer, [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}])
    assert found[1, 0] == (prompt + answer(prompt), ((len(prompt), len(prompt) + len(answer(prompt))),))
    first = render(tokenizer, [{"role": "user", "content": "Hi"}])
    ids, spans = found[0, 0]
    reply = tokenizer.decode(answer(first), skip_special_tokens=True)
    second = render(
        tokenizer,
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": reply}, {"role": "user", "content": "Again"}],
    )
    assert ids == second + answer(second), "one sequence, for the later prompt continues the earlier answer"
    assert spans == ((len(first), len(first) + len(answer(first))), (len(second), len(ids)))


def test_shards_together_are_the_unsharded_corpus(monkeypatch, tiny_target, source, tmp_path):
    whole = rows(Corpus(run(monkeypatch, tiny_target, source, tmp_path / "whole")))
    for i in (2, 0, 1):
        run(monkeypatch, tiny_target, source, tmp_path / "three", "--shard", f"{i}/3")
    assert rows(Corpus(tmp_path / "three")) == whole


def test_a_prompt_that_does_not_continue_the_sequence_begins_a_new_part(tiny_target):
    tokenizer = load_tokenizer(tiny_target)
    pending = regenerate.Pending(5, parse_row({"turns": ["a", "b"]}))
    first = pending.next_prompt(tokenizer)
    pending.answer(first, [80, 81, 2], "stop", tokenizer)
    second = pending.next_prompt(tokenizer)
    changed = [9, *second[1:]]
    pending.answer(changed, [82, 2], "length", tokenizer)
    assert [part["ids"] for part in pending.parts] == [[*first, 80, 81, 2], [*changed, 82, 2]]
    assert pending.parts[1]["spans"] == [[len(changed), len(changed) + 2]] and pending.next_prompt(tokenizer) is None


def test_a_torn_journal_line_is_made_again(tmp_path):
    path = tmp_path / "j"
    journal = Journal(path)
    journal.add({"row": 3, "parts": []})
    journal.close()
    path.write_bytes(path.read_bytes() + b'{"row": 4, "parts": [{"ids": [1, 2')
    again = Journal(path)
    assert set(again.records) == {3}
    again.add({"row": 4, "unusable": "empty"})
    again.close()
    assert set(Journal(path).records) == {3, 4}


DRIVER = """
import sys
sys.path.insert(0, {tests!r})
import test_regenerate as t
from vllm_lilicorr.trainer import regenerate
regenerate.make_engine = lambda *a: t.FakeEngine(delay=0.05)
regenerate.main(sys.argv[1:])
"""


def test_killed_anywhere_it_neither_loses_nor_repeats_a_row(monkeypatch, tiny_target, source, tmp_path):
    expected = rows(Corpus(run(monkeypatch, tiny_target, source, tmp_path / "straight")))
    arguments = ["--target", str(tiny_target), "--prompts", str(source), "--out", str(tmp_path / "killed"), "--max-num-seqs", "2"]
    script = DRIVER.format(tests=str(Path(__file__).parent))
    journal = tmp_path / "killed/shard-00000-of-00001.journal.jsonl"
    for lines in (6,):
        process = subprocess.Popen([sys.executable, "-c", script, *arguments], stderr=subprocess.DEVNULL)
        while not (journal.exists() and journal.read_bytes().count(b"\n") >= lines):
            assert process.poll() is None, "it ended before it could be killed"
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
        made = [json.loads(line)["row"] for line in journal.read_bytes().split(b"\n")[:-1]]
        assert len(made) == len(set(made)) < len(SOURCE)
    assert subprocess.run([sys.executable, "-c", script, *arguments], stderr=subprocess.DEVNULL).returncode == 0
    assert rows(Corpus(tmp_path / "killed")) == expected and not journal.exists()


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (None, "malformed"),
        ({"question": "x"}, "malformed"),
        ({"turns": "x"}, "malformed"),
        ({"turns": ["a", " "]}, "empty"),
        ({"messages": []}, "empty"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "malformed"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "malformed"),
        ({"messages": [{"role": "user", "content": "x"}]}, "no assistant turn"),
        ({"prompt": "half a pair \ud83d"}, "malformed"),
    ],
)
def test_reasons_of_unusable_rows(row, reason):
    with pytest.raises(Unusable, match=reason):
        parse_row(row)


def test_turns_behind_the_last_answer_are_left_out():
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    assert [m["role"] for m in parse_row({"messages": messages})] == ["user", "assistant"]


def test_a_source_that_is_not_there_is_named(monkeypatch, tiny_target, tmp_path):
    with pytest.raises(UserError, match="missing.jsonl does not exist"):
        run(monkeypatch, tiny_target, tmp_path / "missing.jsonl", tmp_path / "out")
    assert not (tmp_path / "out").exists(), "the right source may still be given"
    with pytest.raises(UserError, match="--shard: '4/4' must be i/n"):
        run(monkeypatch, tiny_target, tmp_path / "x", tmp_path / "out", "--shard", "4/4")


def test_rows_that_json_or_the_chat_template_refuse_are_counted_and_stop_nothing(monkeypatch, tiny_target, tmp_path):
    target = tmp_path / "strict"
    shutil.copytree(tiny_target, target)
    late = "{% if m['role'] == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}"
    template = target / "chat_template.jinja"
    template.write_text(f"{{% for m in messages %}}{late}{{% endfor %}}{template.read_text()}")
    messages = [{"role": role, "content": "x"} for role in ("user", "assistant", "system", "user", "assistant")]
    lines = ['\ufeff{"prompt": "behind a byte order mark"}', json.dumps({"messages": messages}), "[" * 100_000, '{"prompt": "y"}']
    (tmp_path / "source.jsonl").write_text("\n".join(lines))
    corpus = Corpus(run(monkeypatch, target, tmp_path / "source.jsonl", tmp_path / "out"))
    assert corpus.reports[0]["unusable"] == {"malformed": 1, "refused by the chat template": 1}
    assert {key[0] for key in rows(corpus)} == {0, 3}
    template.write_text("{{ raise_exception('no') }}")
    with pytest.raises(UserError, match="chat template refuses"):
        run(monkeypatch, target, tmp_path / "source.jsonl", tmp_path / "again")


def test_a_dataset_is_read_split_by_split_and_its_size_known_beforehand(monkeypatch, tiny_target, tmp_path):
    """A stand-in for the hub: what is asked of `datasets`, and that progress knows its end."""
    splits = {"code": [{"prompt": "a"}, {"prompt": "b"}], "chat": [{"prompt": "c"}]}
    described = {name: SimpleNamespace(num_examples=len(held)) for name, held in splits.items()}
    hub = SimpleNamespace(
        load_dataset=lambda source, split: {"some/set": splits}[source][split],
        load_dataset_builder=lambda source: SimpleNamespace(info=SimpleNamespace(splits={"some/set": described}[source])),
    )
    monkeypatch.setitem(sys.modules, "datasets", hub)
    totals = []
    monkeypatch.setattr(regenerate, "tqdm", lambda total, **options: totals.append(total) or tqdm(total=total, **options))
    corpus = Corpus(run(monkeypatch, tiny_target, "some/set", tmp_path / "out", "--splits", "code,chat"))
    tokenizer = load_tokenizer(tiny_target)
    for row, text in enumerate("abc"):
        prompt = render(tokenizer, [{"role": "user", "content": text}])
        assert rows(corpus)[row, 0][0][: len(prompt)] == prompt
    run(monkeypatch, tiny_target, "some/set", tmp_path / "half", "--splits", "code,chat", "--shard", "1/2")
    run(monkeypatch, tiny_target, "some/set", tmp_path / "few", "--splits", "code,chat", "--limit", "2")
    assert totals == [3, 1, 2]
    with pytest.raises(UserError, match="some/set is no local file, and its split 'math' cannot be loaded"):
        run(monkeypatch, tiny_target, "some/set", tmp_path / "none", "--splits", "math")


class StandIn:
    """vLLM's asynchronous engine as far as it is used: answers by a hash of the prompt, and fails as it is told."""

    def __init__(self, arguments):
        self.arguments, self.model_config = arguments, SimpleNamespace(max_model_len=512)
        self.errored, self.dead_error, self.shut = False, RuntimeError("an engine is dead"), False

    async def generate(self, prompt, sampling, key):
        ids = answer(prompt["prompt_token_ids"])[: sampling.max_tokens]
        if key in ("dies", "silent"):
            self.errored = True
        if key == "dies":
            await asyncio.sleep(0.1)
            raise self.dead_error
        if key == "silent":
            await asyncio.sleep(60)
        reason = "abort" if key == "broken off" else "stop"
        yield SimpleNamespace(finished=False)
        yield SimpleNamespace(finished=True, request_id=key, outputs=[SimpleNamespace(token_ids=ids, finish_reason=reason)])

    def shutdown(self):
        self.shut = True


@pytest.fixture
def parallel(monkeypatch):
    """Return a DataParallelEngine on the stand-in, with the options of a command line."""
    sampling = SimpleNamespace(RequestOutputKind=SimpleNamespace(FINAL_ONLY="final"))
    modules = {
        "vllm": SimpleNamespace(SamplingParams=lambda **options: SimpleNamespace(**options), TokensPrompt=dict),
        "vllm.sampling_params": sampling,
        "vllm.engine.arg_utils": SimpleNamespace(AsyncEngineArgs=lambda **options: options),
        "vllm.v1.engine.async_llm": SimpleNamespace(AsyncLLM=SimpleNamespace(from_engine_args=StandIn)),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(engines.DataParallelEngine, "PATIENCE", 0.2)
    options = {"data_parallel_size": 2, "tensor_parallel_size": 1, "max_num_seqs": 2, "dtype": "float32"}
    args = argparse.Namespace(**options, enforce_eager=True, max_model_len=None, gpu_memory_utilization=None)
    engine = engines.make_engine("target", args)
    assert engine._engine.arguments.items() >= (options | {"model": "target", "seed": 0}).items()
    yield engine
    engine.close()


def test_an_engine_that_cannot_start_is_one_sentence(monkeypatch):
    def refuse(target, args):
        raise ValueError("World size (8) is larger\nthan the number of devices (1)")

    monkeypatch.setattr(engines, "OfflineEngine", refuse)
    with pytest.raises(UserError, match=r"cannot start an engine for T \(World size \(8\) is larger than the number of devices"):
        engines.make_engine("T", argparse.Namespace(data_parallel_size=1))


def collect(engine, keys):
    for key in keys:
        engine.submit(key, [len(key)], 100)
    ended = []
    while len(ended) < len(keys):
        ended += engine.finished()
    return ended


def test_answers_of_data_parallel_engines_arrive_as_they_end(parallel):
    assert parallel.max_length == 512
    assert sorted(collect(parallel, ["a", "bb"])) == [("a", answer([1]), "stop"), ("bb", answer([2]), "stop")]


@pytest.mark.parametrize(
    ("last", "reason"),
    [("dies", "an engine is dead"), ("silent", "an engine is dead"), ("broken off", "it broke off an answer: abort")],
)
def test_what_ended_before_an_engine_died_is_kept_and_its_death_is_one_sentence(parallel, last, reason):
    for key in ("a", "bb", last):
        parallel.submit(key, [len(key)], 100)
    ended = []
    with pytest.raises(UserError, match=rf"vLLM stopped answering \({reason}\), .* the same command continues"):
        while True:
            ended += parallel.finished()
    assert sorted(key for key, _, _ in ended) == ["a", "bb"]


def test_an_answer_that_ended_beside_a_failure_is_returned_before_it_is_raised(parallel):
    for ended in (("a", [1], "stop"), RuntimeError("the first"), ("b", [2], "stop"), RuntimeError("the second")):
        parallel._ended.put(ended)
    assert parallel.finished() == [("a", [1], "stop"), ("b", [2], "stop")]
    for _ in range(2):
        with pytest.raises(UserError, match="the first"):
            parallel.finished()


def test_an_engine_that_dies_ends_the_command_with_its_finished_rows_kept(monkeypatch, tiny_target, source, tmp_path):
    class Mortal(FakeEngine):
        closed = False

        def finished(self):
            if len(self.waiting) < 3:
                raise UserError("vLLM stopped answering")
            return super().finished()

        def close(self):
            Mortal.closed = True

    monkeypatch.setattr(regenerate, "make_engine", Mortal)
    arguments = ["--target", str(tiny_target), "--prompts", str(source), "--out", str(tmp_path / "out")]
    with pytest.raises(UserError, match="stopped answering"):
        regenerate.main(arguments)
    assert Mortal.closed
    made = Journal(tmp_path / "out/shard-00000-of-00001.journal.jsonl").records
    assert sum("parts" in record for record in made.values()) > 5
    whole = run(monkeypatch, tiny_target, source, tmp_path / "straight")
    assert rows(Corpus(run(monkeypatch, tiny_target, source, tmp_path / "out"))) == rows(Corpus(whole))


@pytest.mark.skipif(sys.platform != "linux", reason="handles on processes are Linux's")
def test_the_processes_below_a_killed_command_are_killed_too(tmp_path):
    """What vLLM's engines do not do by themselves."""
    script = (
        "import subprocess, sys, time\nfrom vllm_lilicorr.trainer.engines import Guard\n"
        "below = [subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']) for _ in range(2)]\n"
        "ended = subprocess.Popen(['true'])\ntime.sleep(0.5)\n"
        "guard = Guard()\nprint(*(process.pid for process in below), flush=True)\ntime.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        below = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        running = [process for process in psutil.Process(parent.pid).children() if process.status() != psutil.STATUS_ZOMBIE]
        guards = [process for process in running if process not in below]
        parent.kill()
    assert len(below) == 2 and len(guards) == 1
    assert psutil.wait_procs(below + guards, timeout=20)[1] == []


@pytest.mark.slow
def test_vllm_writes_what_greedy_decoding_in_transformers_writes(tiny_target, source, tmp_path):
    """The real engine in fp32, two turns a conversation; where it first differs, the target's top two are a near-tie."""
    out = tmp_path / "out"
    assert start(tiny_target, source, out, "--max-tokens", "16", "--max-num-seqs", "8").wait(600) == 0, errors(out)
    from vllm_lilicorr.target import load_target

    target, corpus = load_target(tiny_target), Corpus(out)
    assert len({corpus[i].key[0] for i in range(len(corpus))}) == 15
    for i in range(len(corpus)):
        ids = torch.from_numpy(corpus[i].ids.astype(np.int64))[None]
        logits = target.logits(target.forward(ids, torch.arange(ids.shape[1])[None]).final)[0]
        for start_, end in corpus[i].spans:
            assert 0 < end - start_ <= 16
            gap = logits[start_ - 1 : end - 1].amax(-1) - logits[start_ - 1 : end - 1].gather(1, ids[0, start_:end, None])[:, 0]
            assert gap.max() < 1e-3, "every token is the target's most probable one"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_data_parallel_engines_write_what_one_engine_writes_whatever_interrupts_them(tiny_target, tmp_path):
    """An engine killed, Ctrl-C, the command killed: each time no process stays, and the next start goes on from there."""
    source = tmp_path / "source.jsonl"
    source.write_text("".join(json.dumps({"turns": [f"question {i}", "and then?"]}) + "\n" for i in range(120)))
    arguments = ("--max-tokens", "120", "--max-num-seqs", "2")
    one, two = tmp_path / "one", tmp_path / "two"
    assert start(tiny_target, source, one, *arguments).wait(600) == 0, errors(one)

    def interrupted(lines: int, how: Callable[[psutil.Process, list[psutil.Process]], object]) -> int:
        """Return the status of the command, stopped once its journal has this many lines; every process of it is gone."""
        process = start(tiny_target, source, two, *arguments, "--data-parallel-size", "2")
        journal = two / "shard-00000-of-00001.journal.jsonl"
        while not (journal.exists() and journal.read_bytes().count(b"\n") >= lines):
            assert process.poll() is None, errors(two)
            time.sleep(0.01)
        parent = psutil.Process(process.pid)
        below = parent.children(recursive=True)
        how(parent, below)
        status = process.wait(120)
        assert psutil.wait_procs(below, timeout=30)[1] == []
        made = [json.loads(line)["row"] for line in journal.read_bytes().split(b"\n")[:-1]]
        assert lines <= len(made) == len(set(made)) < 120, "no row was made twice"
        return status

    def engines(processes: list[psutil.Process]) -> list[psutil.Process]:
        return [process for process in processes if "EngineCore" in " ".join(process.cmdline())]

    assert interrupted(5, lambda parent, below: engines(below)[1].kill()) == 1
    assert re.search(r"^error: vLLM stopped answering \(.+\), its own messages stand above; the rows", errors(two), re.MULTILINE)
    assert interrupted(30, lambda parent, below: os.killpg(parent.pid, signal.SIGINT)) == 130
    assert interrupted(55, lambda parent, below: engines(below)[0].terminate()) == 1, "no answer that was broken off is kept"
    assert interrupted(80, lambda parent, below: parent.kill()) == -signal.SIGKILL
    assert start(tiny_target, source, two, *arguments, "--data-parallel-size", "2").wait(600) == 0, errors(two)
    assert rows(Corpus(two)) == rows(Corpus(one))
    corpus = Corpus(two)
    assert {reason for i in range(len(corpus)) for reason in corpus[i].finish_reasons} <= {"stop", "length"}


def start(target, source, out, *arguments):
    """Return the command with the real engine in fp32 on the CPU, started; what it says goes beside `out`."""
    pytest.importorskip("vllm")
    command = [sys.executable, str(ROOT / "trainer/regenerate.py"), "--target", str(target), "--prompts", str(source)]
    command += ["--out", str(out), "--dtype", "float32", "--enforce-eager", *arguments]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|0"}
    with Path(f"{out}.log").open("w") as log:
        return subprocess.Popen(
            command, stdout=log, stderr=log, env=environment, start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # what runs in a shell's background ignores Ctrl-C
        )  # fmt: skip


def errors(out):
    return Path(f"{out}.log").read_text()[-4000:]
