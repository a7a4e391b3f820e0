"""`vllm serve` over HTTP: outputs, errors, metrics, and a minute under load."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pairs
import pytest
import soak
from engines import compare_outputs, environment

from vllm_lilicorr.bench._server import Server

pytestmark = pytest.mark.slow

MAX_LEN = 256


@pytest.fixture(scope="module")
def server(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with its speculative configuration in a file beside the checkpoint."""
    file = tmp_path_factory.mktemp("http") / "lilicorr.json"
    file.write_text(json.dumps({"model": str(pair[1]), "draft_sample_method": "probabilistic"}))
    options = ["--max-model-len", str(MAX_LEN), "--max-num-seqs", "16", "--max-num-batched-tokens", "1024"]
    options += ["--per-request-spec-decode-metrics", "summary"]
    with Server(pair[0], file, options, environment(LILICORR_DEBUG="1")) as running:
        yield running


def test_eight_clients_at_once_get_the_targets_tokens(pair: tuple[Path, Path], server: Server) -> None:
    with ThreadPoolExecutor(8) as pool:
        choices = list(pool.map(lambda p: server.complete(p, max_tokens=48, temperature=0, ignore_eos=True), pairs.PROMPTS * 2))
    runs = [(f"prompt {i}", p, c["token_ids"]) for i, (p, c) in enumerate(zip(pairs.PROMPTS * 2, choices, strict=True))]
    tally = compare_outputs(pair[0], runs)
    tally.check()
    assert tally.compared == 48 * len(runs)


def test_speculation_shows_in_the_metrics(server: Server) -> None:
    server.complete(pairs.PROMPTS[0], max_tokens=32, temperature=0, ignore_eos=True)
    metrics = server.metrics()
    drafts, accepted = (metrics[f"spec_decode_num_{name}_total"] for name in ("drafts", "accepted_tokens"))
    assert drafts > 0 and accepted > 0
    by_position = [metrics[f"spec_decode_num_accepted_tokens_per_pos_total[{i}]"] for i in range(7)]
    assert sum(by_position) == accepted
    assert by_position == sorted(by_position, reverse=True)


def test_a_request_is_answered_with_its_own_acceptance(server: Server) -> None:
    before = server.metrics()
    body = {"prompt": pairs.PROMPTS[1], "max_tokens": 32, "temperature": 0, "ignore_eos": True}
    status, answer = server.post("/v1/completions", body)
    assert status == 200
    found, after = answer["metrics"]["speculative_decoding"], server.metrics()
    drafts, accepted = (
        after[f"spec_decode_num_{name}_total"] - before[f"spec_decode_num_{name}_total"] for name in ("drafts", "accepted_tokens")
    )
    assert (found["num_spec_steps"], found["num_accepted_draft_tokens"]) == (drafts, accepted)
    assert found["num_spec_tokens"] == 7 and accepted > 0


@pytest.mark.parametrize(
    "body",
    [
        b"{not json",
        {"prompt": [1, 2, 3], "max_tokens": -1},
        {"prompt": [1, 2, 3], "temperature": -2},
        {"prompt": [10**9], "max_tokens": 4},
        {"prompt": [1] * (MAX_LEN + 1), "max_tokens": 4},
        {"prompt": [], "max_tokens": 4},
        {"prompt": [1], "max_tokens": 4, "structured_outputs": {"json": "{"}},
        {"prompt": [1], "model": "another"},
        {"max_tokens": 4},
    ],
    ids=str,
)
def test_a_malformed_request_is_answered_and_the_engine_stays_up(server: Server, body: object) -> None:
    status, answer = server.post("/v1/completions", body)
    assert 400 <= status < 500, answer
    assert server.complete([1, 2, 3], max_tokens=4, temperature=0)["token_ids"]


def test_a_minute_under_load_brings_no_error_and_no_other_token(pair: tuple[Path, Path], server: Server) -> None:
    tally = asyncio.run(soak.load(server, 60, 16, (256, MAX_LEN)))
    print(json.dumps(tally.finished), f"{tally.tokens} tokens")
    assert not tally.errors
    assert server.healthy()
    assert sum(tally.finished.values()) > 50
    compare_outputs(pair[0], tally.greedy).check()
    assert soak.becomes_idle(server), "requests or KV blocks are left behind"


def test_request_steps_under_sampling_are_counted_and_no_index_is_out_of_range(server: Server) -> None:
    """`soak.py --kinds sampled --streams 8 --steps 20000`, some hundred of them."""
    before = soak.request_steps(server)
    tally = asyncio.run(soak.load(server, 120, 8, (256, MAX_LEN), ("sampled",), steps=400))
    assert not tally.errors
    assert 400 <= tally.steps <= soak.request_steps(server) - before
    assert tally.finished.keys() == {"sampled"}


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("greedy", lambda body, answer: answer["choices"][0]["token_ids"].pop()),
        ("sampled", lambda body, answer: answer["choices"][0]["token_ids"].clear()),
        ("several", lambda body, answer: answer["choices"].pop()),
        ("logprobs", lambda body, answer: answer["choices"][0]["logprobs"]["token_logprobs"].pop()),
        ("stop", lambda body, answer: body["stop"].insert(0, answer["choices"][0]["text"][:1])),
        ("json", lambda body, answer: answer["choices"][0].update(text='{"ok":1,"level":2}')),
        ("json", lambda body, answer: answer["choices"][0].update(text='{"ok":true,"level":')),
    ],
)
def test_a_wrong_answer_under_load_is_noticed(kind: str, change: Callable[[dict[str, Any], dict[str, Any]], Any]) -> None:
    _, body = soak.request(random.Random(0), 256, MAX_LEN, (kind,))
    count = body["max_tokens"]
    one = {"text": '{"ok":true,"level":2}', "token_ids": [5] * count, "logprobs": {"token_logprobs": [0.0] * count}}
    body |= {"stop": ["z"]} if kind == "stop" else {}
    answer = {"choices": [one | {"token_ids": [5] * count} for _ in range(body.get("n", 1))]}
    assert soak.problem(kind, body, answer, structured=True) is None
    change(body, answer)
    assert soak.problem(kind, body, answer, structured=True)
