from __future__ import annotations

import hashlib
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tqdm import tqdm

from vllm_lilicorr.chat import render
from vllm_lilicorr.errors import UserError
from vllm_lilicorr.target import load_tokenizer
from vllm_lilicorr.trainer import regenerate
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


def answer(prompt):
    digest = hashlib.sha256(np.array(prompt).tobytes()).digest()
    return [70 + byte % 26 for byte in digest[: 3 + digest[0] % 5]] + [2]


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in SOURCE) + "\nnot json\n")
    return path


def run(monkeypatch, target, source, out, *arguments):
    monkeypatch.setattr(regenerate, "OfflineEngine", FakeEngine)
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
regenerate.OfflineEngine = lambda *a: t.FakeEngine(delay=0.05)
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


@pytest.mark.slow
def test_vllm_writes_what_greedy_decoding_in_transformers_writes(tiny_target, source, tmp_path):
    """The real engine in fp32, two turns a conversation; where it first differs, the target's top two are a near-tie."""
    pytest.importorskip("vllm")
    import os

    command = [sys.executable, str(ROOT / "trainer/regenerate.py"), "--target", str(tiny_target), "--prompts", str(source)]
    command += [
        "--out",
        str(tmp_path / "out"),
        "--max-tokens",
        "16",
        "--dtype",
        "float32",
        "--enforce-eager",
        "--max-num-seqs",
        "8",
    ]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "0"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    from vllm_lilicorr.target import load_target

    target, corpus = load_target(tiny_target), Corpus(tmp_path / "out")
    assert len({corpus[i].key[0] for i in range(len(corpus))}) == 15
    for i in range(len(corpus)):
        ids = torch.from_numpy(corpus[i].ids.astype(np.int64))[None]
        logits = target.logits(target.forward(ids, torch.arange(ids.shape[1])[None]).final)[0]
        for start, end in corpus[i].spans:
            assert 0 < end - start <= 16
            gap = logits[start - 1 : end - 1].amax(-1) - logits[start - 1 : end - 1].gather(1, ids[0, start:end, None])[:, 0]
            assert gap.max() < 1e-3, "every token is the target's most probable one"
