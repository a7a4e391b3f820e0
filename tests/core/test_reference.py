"""The reference decoder loses nothing: token for token at temperature 0, in distribution at temperature 1."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from vllm_lilicorr.chat import read_prompts, render
from vllm_lilicorr.config import LiLiCorrConfig, default_target_layer_ids
from vllm_lilicorr.errors import UserError
from vllm_lilicorr.io import check_writable_file
from vllm_lilicorr.model import Draft
from vllm_lilicorr.near_tie import Comparison
from vllm_lilicorr.reference import ReferenceDecoder, Sampling, acceptance_length, drafts_at, rejection_accept
from vllm_lilicorr.target import Target, load_target, load_tokenizer

from .conftest import HEADS, make_config, make_draft, make_target

PROMPTS = Path(__file__).parents[2] / "vllm_lilicorr/assets/prompts"
RULES = ("argmax", "greedy", "exact")


class OftenRight(Draft):
    """A drafter whose own proposal is overwritten by the target's continuation for a run of leading slots that changes from
    block to block, so that every accepted length occurs."""

    def foresee(self, prompts, continuations):
        self.known = [(len(prompt), list(answer)) for prompt, answer in zip(prompts, continuations)]

    def propose(self, anchor_ids, anchor_positions, *args, **kwargs):
        proposal = super().propose(anchor_ids, anchor_positions, *args, **kwargs)
        tokens = proposal.tokens.clone()
        for row, ((length, answer), position) in enumerate(zip(self.known, anchor_positions.flatten().tolist())):
            right = answer[position - length + 1 :][: run_length(position, tokens.shape[1])]
            tokens[row, : len(right)] = torch.tensor(right, dtype=tokens.dtype)
        return replace(proposal, tokens=tokens)


def run_length(position, slots):
    return (position * 2654435761 >> 9) % (slots + 1)


def often_right(draft):
    draft.__class__ = OftenRight
    return draft


def compare(reference, others, name):
    comparison = Comparison()
    for i, (a, b) in enumerate(zip(reference, others)):
        comparison.add(f"{name}, prompt {i}", a.output_ids, b.output_ids, a.margins)
    comparison.check()
    return comparison


def random_prompts(count, vocab=96, seed=0, lengths=(3, 17)):
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(*lengths, (count,), generator=generator).tolist()
    return [torch.randint(vocab, (size,), generator=generator).tolist() for size in sizes]


# --- temperature 0 ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("right", [False, True])
def test_every_rule_decodes_what_the_target_decodes(head, right):
    config = make_config(head)
    target, draft = make_target(config), make_draft(config)
    prompts = random_prompts(12)
    plain = ReferenceDecoder(target).decode(prompts, 40)
    if right:
        often_right(draft).foresee(prompts, [decoded.output_ids for decoded in plain])
    for rule in draft.head.rules:
        if rule == "sampled":
            continue
        decoded = ReferenceDecoder(target, draft, rule).decode(prompts, 40)
        compare(plain, decoded, rule)
        if right:
            assert {length for d in decoded for length in d.accepted} == set(range(config.num_slots + 1))


def test_one_prompt_alone_decodes_as_in_a_batch():
    config = make_config()
    target, draft = make_target(config), make_draft(config)
    prompts = random_prompts(6)
    plain = ReferenceDecoder(target).decode(prompts, 30)
    often_right(draft).foresee(prompts, [decoded.output_ids for decoded in plain])
    together = ReferenceDecoder(target, draft, "greedy").decode(prompts, 30)
    comparison = Comparison()
    for i, (prompt, expected) in enumerate(zip(prompts, together)):
        draft.foresee([prompt], [plain[i].output_ids])
        (alone,) = ReferenceDecoder(target, draft, "greedy").decode([prompt], 30)
        same = comparison.add(f"prompt {i}", expected.output_ids, alone.output_ids, expected.margins)
        for a, b in zip(expected.blocks, alone.blocks):
            same = same and comparison.add(f"prompt {i}, anchor {a.anchor}", a.draft, b.draft, [a.margin] * len(a.draft))
        assert not same or alone.accepted == expected.accepted
    comparison.check()


def test_drafts_along_a_sequence_are_the_drafts_of_decoding_it():
    config = make_config()
    target, draft = make_target(config), make_draft(config)
    prompt = random_prompts(1)[0]
    plain = ReferenceDecoder(target).decode([prompt], 40)
    often_right(draft).foresee([prompt], [plain[0].output_ids])
    (decoded,) = ReferenceDecoder(target, draft, "greedy").decode([prompt], 40)
    draft.__class__ = Draft
    sequence = prompt + decoded.output_ids
    anchors = [block.anchor for block in decoded.blocks if block.anchor < len(sequence)]
    proposal = drafts_at(target, draft, sequence, anchors, "greedy", chunk=5)
    comparison = Comparison()
    for block, tokens in zip(decoded.blocks, proposal.tokens.tolist()):
        own = slice(run_length(block.anchor, len(tokens)), None)
        comparison.add(f"anchor {block.anchor}", block.draft[own], tokens[own], [block.margin] * len(tokens))
    comparison.check()


@pytest.mark.parametrize("slots", [1, 3])
def test_fewer_slots_lose_nothing_either(slots):
    config = make_config()
    target, draft = make_target(config), make_draft(config)
    prompts = random_prompts(4)
    plain = ReferenceDecoder(target).decode(prompts, 20)
    often_right(draft).foresee(prompts, [decoded.output_ids for decoded in plain])
    decoded = ReferenceDecoder(target, draft, "greedy", num_slots=slots).decode(prompts, 20)
    compare(plain, decoded, f"{slots} slots")
    assert {length for d in decoded for length in d.accepted} == set(range(slots + 1))


def test_stop_tokens_and_limits_end_where_plain_decoding_ends():
    config = make_config()
    target, draft = make_target(config), make_draft(config)
    prompts = random_prompts(8)
    unstopped = [decoded.output_ids for decoded in ReferenceDecoder(target).decode(prompts, 30)]
    often_right(draft).foresee(prompts, unstopped)
    stop = {unstopped[0][7], unstopped[3][4]}
    for limit in (1, 2, 29):
        plain = ReferenceDecoder(target, stop_ids=stop).decode(prompts, limit)
        decoded = ReferenceDecoder(target, draft, "greedy", stop_ids=stop).decode(prompts, limit)
        compare(plain, decoded, f"limit {limit}")
    assert any(d.output_ids[-1] in stop and len(d.output_ids) < 29 for d in plain)
    # Acceptance is what the verifier accepted, whatever truncated the output behind it.
    assert any(sum(d.accepted) + len(d.blocks) + 1 > len(d.output_ids) for d in decoded)


@pytest.mark.parametrize(("drafters", "targets"), [(24, 40), (40, 24), (24, 24), (4, 40)])
def test_maximum_lengths_end_drafting_and_decoding_where_plain_decoding_ends(drafters, targets):
    config = make_config(max_position_embeddings=drafters)
    target, draft = make_target(config, max_positions=targets), make_draft(config)
    prompts = random_prompts(5, lengths=(3, 9))
    plain = ReferenceDecoder(target).decode(prompts, 100)
    often_right(draft).foresee(prompts, [decoded.output_ids for decoded in plain])
    decoded = ReferenceDecoder(target, draft, "greedy").decode(prompts, 100)
    compare(plain, decoded, f"drafter {drafters}, target {targets}")
    for prompt, d in zip(prompts, decoded):
        assert len(prompt) + len(d.output_ids) == targets
        assert all(block.anchor + config.block_size <= drafters for block in d.blocks)
    assert any(d.blocks for d in decoded) == (drafters >= 9)


# --- temperature 1 ---------------------------------------------------------------------------------------------------

VOCAB, DRAWS = 5, 20_000


class BadlyWrong(Draft):
    """A drafter that is sure of what the target finds least likely."""

    def slot_hidden(self, *args, **kwargs):
        return -8.0 * super().slot_hidden(*args, **kwargs)


class Falsified(Draft):
    """A drafter that reports another distribution to the verifier than the one it drew from."""

    def propose(self, *args, **kwargs):
        proposal = super().propose(*args, **kwargs)
        return replace(proposal, probs=proposal.probs.roll(1, -1))


def vocabulary_of_five():
    config = make_config(
        LiLiCorrConfig(
            candidate_topk=4,
            hidden_size=32,
            num_layers=1,
            num_heads=4,
            mlp_ratio=2.0,
            factor_dim=16,
            vector_eps=1e-4,
            logit_scale=2.0,
        ),
        vocab_size=VOCAB,
        mask_token_id=4,
        block_size=4,
    )
    return config, make_target(config, logit_spread=1.2)


def exact_joint(target, prompt):
    """The target's own distribution [5, 5, 5] of the first three tokens."""

    def after(prefixes):
        ids = torch.tensor([prompt + list(prefix) for prefix in prefixes])
        positions = torch.arange(ids.shape[1]).expand_as(ids)
        return target.logits(target.forward(ids, positions).final[:, -1]).double().softmax(-1)

    tokens = range(VOCAB)
    first, second = after([()])[0], after([(a,) for a in tokens])
    third = after(list(itertools.product(tokens, tokens))).view(VOCAB, VOCAB, VOCAB)
    return first[:, None, None] * second[:, :, None] * third


def p_value(counts, expected):
    """Chi-square, cells expected below 5 pooled."""
    from torch.distributions import Chi2

    counts, expected = counts.flatten(), expected.flatten()
    small = expected < 5
    counts = torch.cat([counts[~small], counts[small].sum()[None]])
    expected = torch.cat([expected[~small], expected[small].sum()[None]])
    keep = expected > 0
    statistic = ((counts - expected)[keep] ** 2 / expected[keep]).sum()
    degrees = int(keep.sum()) - 1
    return float(torch.special.gammaincc(torch.tensor(degrees / 2.0), statistic / 2)), Chi2(degrees)


def emitted(kind, rule, seed=11, head=None):
    config, target = vocabulary_of_five()
    draft = make_draft(replace(config, head=head) if head else config, spread=0.4)
    draft.__class__ = kind
    prompt = [0, 3, 1]
    decoded = ReferenceDecoder(target, draft, rule, Sampling(1.0, seed)).decode([prompt] * DRAWS, 3)
    counts = torch.zeros(VOCAB, VOCAB, VOCAB, dtype=torch.float64)
    for d in decoded:
        counts[tuple(d.output_ids)] += 1
    rejected = any(length < config.num_slots for d in decoded for length in d.accepted)
    accepted = any(length > 0 for d in decoded for length in d.accepted)
    return p_value(counts, DRAWS * exact_joint(target, prompt))[0], accepted, rejected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "rule"), [(Draft, "sampled"), (Draft, "argmax"), (Draft, "greedy"), (BadlyWrong, "sampled"), (BadlyWrong, "argmax")]
)
def test_the_first_three_tokens_are_distributed_as_the_targets(kind, rule):
    p, accepted, rejected = emitted(kind, rule)
    print(f"{kind.__name__} {rule}: p = {p:.4f}")
    assert accepted and rejected, "the rejection test was not exercised both ways"
    assert p > 1e-3


@pytest.mark.slow
def test_a_falsified_proposal_is_noticed():
    p, _, _ = emitted(Falsified, "sampled")
    assert p < 1e-6


def test_what_the_target_gives_no_probability_never_passes():
    probs = torch.tensor([[[0.0, 1.0], [0.5, 0.5]]])
    for uniform in (0.0, 0.999):
        assert rejection_accept(probs, torch.tensor([[0]]), None, torch.full((1, 1), uniform)).item() == 0
        assert rejection_accept(probs, torch.tensor([[1]]), None, torch.full((1, 1), uniform)).item() == 1


@pytest.mark.parametrize("temperature", [1e-39, 1e-6])
def test_a_temperature_near_zero_decodes_greedily(temperature):
    config = make_config()
    target, draft = make_target(config), make_draft(config)
    prompts = random_prompts(3)
    plain = ReferenceDecoder(target).decode(prompts, 12)
    warm = ReferenceDecoder(target, draft, "sampled", Sampling(temperature)).decode(prompts, 12)
    compare(plain, warm, f"temperature {temperature}")


def test_a_comparison_of_nothing_fails():
    with pytest.raises(AssertionError, match="nothing was compared"):
        Comparison().check()


def test_an_output_that_cannot_be_written_is_refused_before_decoding(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path, "", tmp_path / "file" / "out.jsonl"):
        with pytest.raises(UserError):
            check_writable_file(path)
    check_writable_file(tmp_path / "new" / "out.jsonl")


def test_drafting_does_not_consume_the_targets_random_stream():
    config, target = vocabulary_of_five()
    draft = make_draft(config)
    decoders = [ReferenceDecoder(target, draft, rule, Sampling(1.0, 3)) for rule in ("sampled", "argmax")]
    before = [decoder.verify_stream.get_state() for decoder in decoders]
    for decoder in decoders:
        state = decoder._prefill([[1, 2]], 5)
        decoder._propose(state)
    after = [decoder.verify_stream.get_state() for decoder in decoders]
    assert torch.equal(before[0], before[1]) and torch.equal(after[0], after[1])
    assert not torch.equal(decoders[0].draft_stream.get_state(), decoders[1].draft_stream.get_state())


def test_a_seed_repeats_a_run_and_another_does_not():
    config, target = vocabulary_of_five()
    draft = make_draft(config)

    def run(seed):
        decoder = ReferenceDecoder(target, draft, "sampled", Sampling(1.0, seed))
        return [d.output_ids for d in decoder.decode([[1, 2], [3, 0, 2]], 30)]

    assert run(1) == run(1) != run(2)


def test_acceptance_length_is_block_weighted():
    assert acceptance_length([3, 0, 0]) == 2.0


# --- the command, and the real target --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"turns": ["a"]', "line 2, column 16: is not JSON"),
        ('{"turns": []}', "line 2: turns must be"),
        ('{"text": "a"}', "line 2: has none of the keys"),
        ("[1]", "line 2: must be an object"),
        ('{"messages": [{"role": "user"}]}', "line 2: every message"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "line 2: messages must hold a non-empty user turn"),
        ('{"prompt": " "}', "line 2: prompt must be"),
        (r'{"prompt": "\ud800"}', "line 2: holds half a surrogate pair"),
        ("[" * 100_000, "line 2: is not usable JSON"),
        ('{"prompt": ' + "9" * 5000 + "}", "line 2: is not usable JSON"),
    ],
)
def test_a_bad_prompt_line_is_reported_with_its_number(tmp_path, line, expected):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(UserError, match=expected):
        read_prompts(path)
    assert len(read_prompts(path, limit=1)) == 1


def test_messages_keep_their_history_and_lose_a_trailing_answer(tmp_path):
    messages = [{"role": role, "content": role} for role in ("system", "user", "assistant", "user", "assistant")]
    (tmp_path / "p.jsonl").write_text(json.dumps({"messages": messages}))
    (conversation,) = read_prompts(tmp_path / "p.jsonl")
    assert [m["role"] for m in conversation.messages] == ["system", "user", "assistant"]
    assert conversation.turns == ("user",)


def test_rules_are_refused_where_they_make_no_sense():
    config = make_config("dflash")
    target = make_target(config)
    with pytest.raises(UserError, match="needs a drafter"):
        ReferenceDecoder(target, None, "greedy")
    with pytest.raises(UserError, match="it has argmax"):
        ReferenceDecoder(target, make_draft(config), "greedy")
    with pytest.raises(UserError, match="does not fit"):
        ReferenceDecoder(target).decode([[1] * 256], 1)


def smollm2_drafter():
    config = make_config(
        LiLiCorrConfig(
            candidate_topk=8,
            hidden_size=128,
            num_layers=2,
            num_heads=4,
            mlp_ratio=2.0,
            factor_dim=128,
            vector_eps=1e-4,
            logit_scale=8.0,
        ),
        hidden_size=576,
        num_hidden_layers=1,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        intermediate_size=512,
        vocab_size=49152,
        rms_norm_eps=1e-5,
        max_position_embeddings=8192,
        rope_theta=1e5,
        block_size=8,
        num_target_layers=30,
        mask_token_id=5,
        target_layer_ids=default_target_layer_ids(30),
    )
    return make_draft(config, spread=0.05)


class PrefillsOnce(Target):
    """A target that keeps its pass over the prompts, which is the first of every decoding and half of a short one's work."""

    def forward(self, ids, positions, mask=None, cache=None):
        if cache.get_seq_length():
            return super().forward(ids, positions, mask, cache)
        if self.kept is None or not torch.equal(ids, self.kept[0]):
            states = super().forward(ids, positions, mask, cache)
            self.kept = ids, states, [(layer.keys, layer.values) for layer in cache.layers]
            return states
        _, states, layers = self.kept
        for index, (keys, values) in enumerate(layers):
            cache.update(keys, values, index)
        return states


def decode_under_every_rule(target, tokenizer, conversations, max_tokens):
    """Compare every rule with the target alone, with a random drafter and with one that is often right."""
    target.__class__, target.kept = PrefillsOnce, None
    prompts = [render(tokenizer, [{"role": "user", "content": c.turns[0]}]) for c in conversations]
    plain = ReferenceDecoder(target).decode(prompts, max_tokens)
    draft = smollm2_drafter()
    for rule in RULES:
        # It is never right, so the number of its slots only sets what verification costs.
        decoded = ReferenceDecoder(target, draft, rule, num_slots=1).decode(prompts, max_tokens)
        compare(plain, decoded, f"random drafter, {rule}")
    often_right(draft).foresee(prompts, [decoded.output_ids for decoded in plain])
    lengths = set()
    for rule in RULES:
        decoded = ReferenceDecoder(target, draft, rule).decode(prompts, max_tokens)
        compare(plain, decoded, f"often right, {rule}")
        lengths |= {length for d in decoded for length in d.accepted}
    return lengths


@pytest.fixture
def smollm2_target(smollm2):
    return load_target(smollm2, default_target_layer_ids(30)), load_tokenizer(smollm2)


@pytest.mark.slow
@pytest.mark.timeout(2400)  # minutes of fp32 arithmetic on one core; more where the other core is busy
def test_smollm2_decodes_the_same_text_under_every_rule(smollm2_target):
    """fp32, 20 prompts, 64 new tokens."""
    conversations = [c for file in sorted(PROMPTS.glob("*.jsonl")) for c in read_prompts(file, limit=5)]
    assert len(conversations) == 20
    assert decode_under_every_rule(*smollm2_target, conversations, 64) == set(range(8))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gsm8k", "humaneval", "mt-bench", "livecodebench", "aime25", "arena-hard-v2"])
def test_benchmark_rows_decode_the_same_text_under_every_rule(benchmark, smollm2_target, name):
    decode_under_every_rule(*smollm2_target, read_prompts(benchmark(name), limit=3), 32)


@pytest.mark.slow
def test_the_command_prints_tau_and_writes_one_object_a_prompt(smollm2, tmp_path):
    from vllm_lilicorr.model.checkpoint import save_draft

    save_draft(smollm2_drafter(), tmp_path / "draft")
    command = [sys.executable, "-m", "vllm_lilicorr.reference", "--target", smollm2, "--draft", tmp_path / "draft"]
    command += ["--prompts", PROMPTS / "chat.jsonl", "--limit", "2", "--max-tokens", "8", "--json", tmp_path / "out.jsonl"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for expected in ("acceptance length (block-weighted tau):", "accepted by position: 1:", "tokens/s"):
        assert expected in done.stdout
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["index"] for row in rows] == [0, 1]
    assert all(len(row["output_ids"]) <= 16 and row["accepted"] for row in rows)
