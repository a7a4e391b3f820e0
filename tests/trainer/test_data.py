from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_lilicorr.errors import UserError
from vllm_lilicorr.trainer.corpus import Conversation, Corpus, Origin, shard_name, write_meta, write_shard
from vllm_lilicorr.trainer.data import DataConfig, Schedule, draw_anchors, eligible_anchors, split

ORIGIN = Origin("t", "a" * 64, "b" * 16)


@given(
    spans=st.lists(st.integers(0, 12), min_size=2, max_size=8).map(lambda cuts: sorted(set(cuts))),
    length=st.integers(1, 14), limit=st.integers(1, 6), seed=st.integers(0, 99), epoch=st.integers(0, 3),
)  # fmt: skip
def test_anchors_are_turn_tokens_with_a_supervised_token_behind(spans, length, limit, seed, epoch):
    turns = tuple(zip(spans[::2], spans[1::2]))
    conversation = Conversation((4, 0), np.arange(14, dtype=np.int32), turns)
    expected = [(p, min(e, length)) for s, e in turns for p in range(s, min(e, length) - 1)]
    positions, ends = eligible_anchors(turns, length)
    assert list(zip(positions.tolist(), ends.tolist())) == expected
    drawn = draw_anchors(seed, epoch, conversation, length, limit)
    assert len(drawn.positions) == min(limit, len(expected))
    assert set(zip(drawn.positions.tolist(), drawn.ends.tolist())) <= set(expected)
    assert (np.diff(drawn.positions) > 0).all() and sorted(drawn.rank.tolist()) == list(range(len(drawn.rank)))
    again = draw_anchors(seed, epoch, conversation, length, limit)
    assert np.array_equal(drawn.positions, again.positions) and np.array_equal(drawn.rank, again.rank)


def test_anchors_depend_on_seed_epoch_and_conversation_and_are_uniform():
    def draw(seed, epoch, key):
        conversation = Conversation(key, np.zeros(100, np.int32), ((0, 100),))
        return tuple(draw_anchors(seed, epoch, conversation, 100, 10).positions)

    assert len({draw(0, 0, (0, 0)), draw(1, 0, (0, 0)), draw(0, 1, (0, 0)), draw(0, 0, (1, 0)), draw(0, 0, (0, 1))}) == 5
    counts = Counter(position for epoch in range(2000) for position in draw(0, epoch, (0, 0)))
    expected = 2000 * 10 / 99
    assert sum((counts[p] - expected) ** 2 / expected for p in range(99)) < 99 + 5 * (2 * 99) ** 0.5


def test_a_schedule_visits_everything_once_an_epoch_and_drops_the_rest():
    schedule = Schedule(np.arange(100, 123), 4, seed=3)
    epochs = [np.concatenate([schedule.batch(epoch * 5 + i)[1] for i in range(5)]) for epoch in range(3)]
    for epoch, visited in enumerate(epochs):
        assert len(set(visited.tolist())) == 20 and schedule.batch(epoch * 5)[0] == epoch
    assert epochs[0].tolist() != epochs[1].tolist()
    assert np.array_equal(Schedule(np.arange(100, 123), 4, seed=3).batch(7)[1], schedule.batch(7)[1]), (
        "any step, without the ones before"
    )
    with pytest.raises(UserError, match="batch_size: 4 exceeds the 3"):
        Schedule(np.arange(3), 4, seed=0)


def conversation(row, length=9, start=3, part=0):
    return Conversation((row, part), np.arange(row, row + length, dtype=np.int32), ((start, length),), ("stop",))


def write(folder: Path, shards: int, rows: int) -> None:
    write_meta(folder, ORIGIN, {"temperature": 0.0}, "here", shards)
    for i in range(shards):
        write_shard(folder, i, shards, [conversation(row) for row in range(i, rows, shards)], Counter({"empty": i}))


def test_shards_merge_losslessly(tmp_path):
    write(tmp_path, 3, 20)
    corpus = Corpus(tmp_path)
    assert len(corpus) == 20 and corpus.tokens == 180
    assert sorted(corpus[i].key[0] for i in range(20)) == list(range(20))
    for i in range(20):
        expected = conversation(corpus[i].key[0])
        assert np.array_equal(corpus[i].ids, expected.ids) and corpus[i].spans == expected.spans
    import datasets

    shard = datasets.Dataset.from_file(str(tmp_path / f"{shard_name(1, 3)}.arrow"))
    assert shard[0]["row"] == 1 and shard[0]["input_ids"] == list(range(1, 10))


def test_a_corpus_with_a_missing_shard_says_which(tmp_path):
    write(tmp_path, 3, 20)
    (tmp_path / f"{shard_name(1, 3)}.json").unlink()
    with pytest.raises(UserError, match=r"1 of 3 shards are not finished .*--shard 1/3"):
        Corpus(tmp_path)


def test_a_corpus_of_another_target_tokenizer_or_sampling_is_refused(tmp_path):
    write(tmp_path, 1, 4)
    with pytest.raises(UserError, match="tokenizer"):
        Corpus(tmp_path).origin.check(Origin("u", "c" * 64, "b" * 16), "the corpus")
    with pytest.raises(UserError, match="whose weights are not"):
        Corpus(tmp_path).origin.check(Origin("t", "a" * 64, "d" * 16), "the corpus")
    with pytest.raises(UserError, match="holds a corpus with sampling"):
        write_meta(tmp_path, ORIGIN, {"temperature": 1.0}, "here", 1)
    Corpus(tmp_path).origin.check(Origin("a copy elsewhere", "a" * 64, "b" * 16), "the corpus")
    assert json.loads((tmp_path / "corpus.json").read_text())["origin"]["target_name"] == "t"


def test_held_out_conversations_keep_their_parts_together_and_unanswerable_ones_are_left_out(tmp_path):
    write_meta(tmp_path, ORIGIN, {}, "here", 1)
    rows = [conversation(r, part=p) for r in range(12) for p in range(2)] + [
        conversation(50, start=8),
        conversation(51, length=30, start=25),
    ]
    write_shard(tmp_path, 0, 1, rows, Counter())
    corpus = Corpus(tmp_path)
    train, held, left_out = split(corpus, DataConfig(path="x", max_length=20, holdout=3))
    key = lambda indices: {corpus[int(i)].key[0] for i in indices}  # noqa: E731
    assert len(train) == 18 and len(held) == 6 and left_out == 2
    assert not key(train) & key(held) and len(key(held)) == 3
    with pytest.raises(UserError, match="data.holdout: 12"):
        split(corpus, DataConfig(path="x", max_length=20, holdout=12))
