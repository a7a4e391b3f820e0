from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_lilicorr.model import Draft
from vllm_lilicorr.reference import ReferenceDecoder, acceptance_length
from vllm_lilicorr.target import load_target
from vllm_lilicorr.trainer.config import TrainConfig
from vllm_lilicorr.trainer.corpus import Conversation, Corpus, Origin
from vllm_lilicorr.trainer.data import collate, draw_anchors
from vllm_lilicorr.trainer.evaluation import EvaluationConfig, Evaluator, simulate, turn_labels
from vllm_lilicorr.trainer.objectives import OBJECTIVES, ObjectiveConfig
from vllm_lilicorr.trainer.objectives.config import DominoLoss
from vllm_lilicorr.trainer.states import OnlineStates, load_vocabulary, read_target_config


@pytest.mark.parametrize("head", list(OBJECTIVES))
def test_tau_equals_what_the_reference_decoder_measures(head, tiny_target, tiny_corpus, train_settings, tmp_path):
    config = TrainConfig.load(train_settings(tiny_target, tiny_corpus, tmp_path, draft={"head": head}))
    origin, corpus = Origin.of(tiny_target), Corpus(tiny_corpus)
    draft = Draft(config.draft_config(read_target_config(tiny_target), "tiny", origin.tokenizer_hash))
    vocabulary = load_vocabulary(tiny_target, torch.float32, torch.device("cpu"))
    loss = ObjectiveConfig(domino=DominoLoss(base=0.5, base_until=None))
    objective = OBJECTIVES[head](draft, loss, vocabulary)
    train_briefly(objective, corpus, tiny_target)
    target = load_target(tiny_target, draft.config.target_layer_ids)
    held_out = np.arange(len(corpus))
    evaluator = Evaluator(corpus, held_out, OnlineStates(target), 512, draft.config.num_slots, EvaluationConfig(anchors=7))
    results = evaluator.run(objective, torch.device("cpu"), everything=True)

    lengths = set()
    for rule in objective.rules:
        decoder = ReferenceDecoder(target, draft.eval(), rule, stop_ids=[2])
        accepted = []
        for i in held_out:
            (start, end), ids = corpus[int(i)].spans[0], corpus[int(i)].ids.tolist()
            decoded = decoder.decode([ids[:start]], max_tokens=end - start)[0]
            assert decoded.output_ids == ids[start:end], "the corpus is this target's own greedy answer"
            accepted += decoded.accepted
        lengths |= set(accepted)
        assert (results[rule].accepted, results[rule].blocks) == (sum(accepted), len(accepted)), rule
        assert results[rule].tau == acceptance_length(accepted)
    # Which of those between occur depends on how a processor rounds.
    most = draft.config.num_slots
    assert {0, most} <= lengths and len(lengths) >= most, f"accepted lengths from none to all occur, found {sorted(lengths)}"
    assert objective.bounded == ("coverage" in results)
    if objective.bounded:
        assert results["coverage"].tau >= max(results[rule].tau for rule in objective.rules)


def train_briefly(objective, corpus, tiny_target):
    """Forty steps, so that drafts are right often and not always."""
    source = OnlineStates(load_target(tiny_target, objective.draft.config.target_layer_ids))
    optimizer = torch.optim.AdamW(objective.parameters(), lr=3e-3, weight_decay=0.0)
    for step in range(40):
        indices = [(3 * step + j) % 12 for j in range(3)]
        rows = [corpus[i] for i in indices]
        anchors = [draw_anchors(0, step, row, len(row.ids), 16) for row in rows]
        loss, _ = objective(collate(rows, anchors, source.of(indices, rows, 512), 512))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@given(st.lists(st.integers(0, 4), max_size=30))
def test_a_simulated_turn_commits_every_token_once(accepted):
    result = simulate(np.array(accepted, np.int64))
    positions = []
    at = 0
    while at < len(accepted):
        positions.append(at)
        at += accepted[at] + 1
    assert result.blocks == len(positions) and result.accepted == sum(accepted[p] for p in positions)
    assert result.accepted + result.blocks >= len(accepted)


def test_labels_run_past_the_turns_end_into_the_targets_own_continuation():
    conversation = Conversation((0, 0), np.array([9, 1, 2, 3, 7, 7]), ((1, 4),))
    assert turn_labels(conversation, (1, 4), [40, 50], 3).tolist() == [[2, 3, 40], [3, 40, 50]]
