"""A server under load: many streams of every kind at once, aborts among them, and what must hold throughout.

    python tests/serving/soak.py [--target DIR --draft CKPT] [--seconds 600] [--streams 64] [--log FILE]
    python tests/serving/soak.py --kinds sampled --streams 8 --steps 20000    # 20,000 request-steps under sampling

Starts `vllm serve` with LILICORR_DEBUG=1, where an index out of range ends the engine, and keeps 64 streams open: prompts of 1
token to nearly the maximum length, random aborts mid-stream, temperatures 0 to 1.2, stop strings, n=2, logprobs, JSON-schema
output. It ends with status 1 on: an HTTP error, JSON that does not fit its schema (not with the small pair, whose tokenizer
xgrammar cannot read), an answer of another length than asked for, a server that is not healthy or does not become idle, memory
that still grows after the warm-up, a greedy output that is not the target's own continuation (fp32, near-tie rule), or fewer
request-steps than --steps. A request-step is one request's verification of a draft, as the server's metrics count them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import pairs  # noqa: E402
from engines import compare_outputs, environment  # noqa: E402

from vllm_lilicorr.bench._server import Server, resident_bytes  # noqa: E402
from vllm_lilicorr.demo import served  # noqa: E402

KINDS = ("greedy",) * 4 + ("sampled",) * 3 + ("abort",) * 2 + ("stop", "several", "logprobs", "json")
"""What the streams choose from, the frequent ones several times."""

BLOCK = 32
"""Tokens of a KV block."""

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "level": {"enum": [1, 2, 3]}},
    "required": ["ok", "level"],
    "additionalProperties": False,
}


@dataclass
class Tally:
    """What happened: finished requests by kind, errors, greedy outputs to check, memory over time, request-steps (counted where
    a number of them was asked for)."""

    finished: dict[str, int] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    greedy: list[tuple[str, list[int], list[int]]] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)
    tokens: int = 0
    steps: int = 0

    def count(self, kind: str) -> None:
        self.finished[kind] = self.finished.get(kind, 0) + 1


def request(rng: random.Random, vocab: int, max_len: int, kinds: Sequence[str] = KINDS) -> tuple[str, dict[str, Any]]:
    """Return a request's kind and body."""
    kind = rng.choice(kinds)
    long = rng.random() < 0.1
    length = rng.randint(max_len // 2, max_len - 24) if long else rng.randint(1, max(2, max_len // 6))
    room = max_len - length
    body: dict[str, Any] = {
        "prompt": [rng.randrange(vocab) for _ in range(length)],
        "max_tokens": min(room, 16 if long else rng.randint(1, 64)),
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    if kind == "sampled":
        body |= {"temperature": rng.choice([0.3, 0.8, 1.0, 1.2]), "top_p": rng.choice([1.0, 0.9])}
        body |= {"seed": rng.randrange(1000)} if rng.random() < 0.5 else {}
    elif kind == "abort":
        body |= {"stream": True, "max_tokens": room, "temperature": rng.choice([0.0, 1.0])}
    elif kind == "stop":
        body |= {"stop": [rng.choice("abcdefgh ")], "temperature": 0.7}
    elif kind == "several":
        body |= {"n": 2, "temperature": 0.9}
    elif kind == "logprobs":
        body |= {"logprobs": 3}
    elif kind == "json":
        body |= {
            "structured_outputs": {"json": SCHEMA},
            "max_tokens": min(room, 64),
            "ignore_eos": False,
        }
        body["prompt"] = body["prompt"][: max_len - 80]
        body["max_tokens"] = 64
    return kind, body


def problem(kind: str, body: dict[str, Any], answer: dict[str, Any], structured: bool) -> str | None:
    """Return what is wrong with an answer by itself, None if nothing is; `structured`: whether JSON is what it should be."""
    choices = answer["choices"]
    text = choices[0]["text"]
    if len(choices) != body.get("n", 1):
        return f"{len(choices)} choices"
    if kind in ("greedy", "sampled", "several", "logprobs"):
        counts = [len(choice["token_ids"]) for choice in choices]
        if counts != [body["max_tokens"]] * len(choices):
            return f"{counts} tokens, asked for {body['max_tokens']}"
    if kind == "logprobs" and len(choices[0]["logprobs"]["token_logprobs"]) != body["max_tokens"]:
        return f"logprobs of {len(choices[0]['logprobs']['token_logprobs'])} tokens, asked for {body['max_tokens']}"
    if kind == "stop" and body["stop"][0] in text:
        return f"{text[:200]!r} goes past {body['stop'][0]!r}"
    if kind == "json" and structured:
        try:
            value = json.loads(text)
            fits = value.keys() == {"ok", "level"} and isinstance(value["ok"], bool) and value["level"] in (1, 2, 3)
        except (ValueError, AttributeError):
            fits = False
        return None if fits else f"{text[:200]!r} does not fit the schema"
    return None


async def stream_of_requests(
    session: Any, server: Server, seed: int, over: asyncio.Event, shape: tuple[int, int], kinds: Sequence[str], tally: Tally
) -> None:
    rng = random.Random(seed)
    while not over.is_set():
        kind, body = request(rng, *shape, kinds)
        try:
            if kind == "abort":
                async with session.post(server.url("/v1/completions"), json=body) as response:
                    if response.status != 200:
                        tally.errors.append(f"{kind}: HTTP {response.status}: {(await response.text())[:300]}")
                        continue
                    for _ in range(rng.randint(1, 6)):
                        await response.content.readline()
                    response.close()
                tally.count(kind)
                continue
            async with session.post(server.url("/v1/completions"), json=body) as response:
                answer = await response.json()
                if response.status != 200:
                    tally.errors.append(f"{kind}: HTTP {response.status}: {json.dumps(answer)[:300]}")
                    continue
        except Exception as error:
            tally.errors.append(f"{kind}: {type(error).__name__}: {error}")
            return
        tally.tokens += answer["usage"]["completion_tokens"]
        # xgrammar reads the byte tokenizer of the small pair wrongly, with or without drafts.
        wrong = problem(kind, body, answer, structured=shape[0] >= 1000)
        if wrong:
            tally.errors.append(f"{kind}: {wrong}")
        elif kind in ("greedy", "logprobs"):
            tally.greedy.append((kind, body["prompt"], answer["choices"][0]["token_ids"]))
        tally.count(kind)


async def watch(server: Server, seconds: float, steps: int | None, over: asyncio.Event, tally: Tally) -> None:
    """Note memory every two seconds; end the load after `seconds`, or as soon as `steps` request-steps are done."""
    began, before = time.time(), request_steps(server) if steps else 0
    while time.time() < began + seconds and tally.steps < (steps or 1):
        tally.memory.append((time.time() - began, resident_bytes(server.process.pid)))
        await asyncio.sleep(2)
        if steps:
            with contextlib.suppress(OSError):  # a server that is gone shows in the streams' errors
                tally.steps = await asyncio.to_thread(request_steps, server) - before
    over.set()


def request_steps(server: Server) -> int:
    """Return how many drafts the server has verified so far: one a request and step."""
    return int(server.metrics().get("spec_decode_num_drafts_total", 0))


async def load(
    server: Server,
    seconds: float,
    streams: int,
    shape: tuple[int, int],
    kinds: Sequence[str] = KINDS,
    steps: int | None = None,
) -> Tally:
    """Return what happened with `streams` requests open for `seconds`, or only until `steps` request-steps are done."""
    import aiohttp

    tally, over = Tally(), asyncio.Event()
    timeout = aiohttp.ClientTimeout(total=None)
    # A connection a request: the server closes idle ones after five seconds, and a request that reuses one just then fails.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        work = [stream_of_requests(session, server, seed, over, shape, kinds, tally) for seed in range(streams)]
        await asyncio.gather(*work, watch(server, seconds, steps, over, tally))
    return tally


def becomes_idle(server: Server) -> bool:
    """Return whether, with no stream open any more, the server soon has no request and no KV block in use: aborts leave none."""
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    for _ in range(30):
        server.complete([1], max_tokens=1)  # the gauges are written at a step
        metrics = server.metrics()
        if not any(metrics[name] for name in gauges):
            return True
        time.sleep(1)
    return False


def write_every_block(server: Server, vocab: int, max_len: int, blocks: int) -> None:
    """Send prompts of the maximum length, each another, until all blocks have held keys: they are taken in turn."""
    rng = random.Random(0)
    for _ in range(2 * blocks * BLOCK // max_len):
        server.complete([rng.randrange(vocab) for _ in range(max_len - 1)], max_tokens=1)


def growth(memory: list[tuple[float, int]]) -> float:
    """Return how much more memory the last quarter of the run used than the second one, as a fraction."""
    end = memory[-1][0]
    second = [used for at, used in memory if end / 4 <= at < end / 2]
    last = [used for at, used in memory if at >= 3 * end / 4]
    return max(last) / max(max(second), 1) - 1  # a server that has died has none


def soak(
    target: Path,
    draft: Path,
    seconds: float,
    streams: int,
    max_len: int,
    release: str = "0.32",
    kinds: Sequence[str] = KINDS,
    steps: int | None = None,
    **spec: Any,
) -> list[str]:
    """Run the load and return its report; raises AssertionError when something did not hold."""
    vocab = json.loads((target / "config.json").read_text())["vocab_size"]
    vocab = 256 if vocab == pairs.VOCAB else vocab
    speculative = {"model": str(draft), **spec}
    options = ["--max-model-len", str(max_len), "--max-num-seqs", str(streams), "--max-num-batched-tokens", "2048"]
    # JSON may have white space anywhere, and a small model fills its whole answer with it. vLLM reads this of the server alone.
    options += ["--structured-outputs-config", json.dumps({"backend": "xgrammar", "disable_any_whitespace": True})]
    # As many keys as the streams can need, every one written before memory is watched: a block is resident from its first use on.
    blocks = streams * (max_len // BLOCK + 1)
    options += ["--block-size", str(BLOCK), "--num-gpu-blocks-override", str(blocks)]
    with Server(target, speculative, options, environment(release, LILICORR_DEBUG="1")) as server:
        write_every_block(server, vocab, max_len, blocks)
        began = time.time()
        tally = asyncio.run(load(server, seconds, streams, (vocab, max_len), kinds, steps))
        seconds = time.time() - began
        healthy = server.healthy()
        idle = healthy and becomes_idle(server)
        metrics = server.metrics() if healthy else {}
    compared = compare_outputs(target, tally.greedy)
    accepted, drafts = (metrics.get(f"spec_decode_num_{name}_total", 0) for name in ("accepted_tokens", "drafts"))
    report = [
        f"{seconds:.0f} s, {streams} streams, maximum length {max_len}, vLLM {release}, {json.dumps(spec)}",
        f"finished: {json.dumps(tally.finished)}; {tally.tokens} tokens; {int(drafts)} request-steps with drafts",
        f"acceptance length {(accepted + drafts) / max(drafts, 1):.3f}",
        f"greedy outputs against the target: {compared.summary()}",
        f"memory: {tally.memory[0][1] / 2**20:.0f} MiB at first, {max(m for _, m in tally.memory) / 2**20:.0f} MiB at most, "
        f"last quarter over second {100 * growth(tally.memory):+.1f} %",
        f"errors: {len(tally.errors)}{''.join('; ' + error for error in tally.errors[:5])}",
    ]
    assert healthy, "\n".join(report)
    assert not tally.errors, "\n".join(report)
    assert idle, "\n".join(["requests or KV blocks are left behind", *report])
    assert drafts >= (steps or 1), "\n".join([f"fewer than {steps or 1} request-steps", *report])
    if "greedy" in kinds or "logprobs" in kinds:
        compared.check()
    if seconds >= 120:  # a shorter run is warm-up
        assert growth(tally.memory) < 0.05, "\n".join(report)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", type=Path, help="default, with --draft: the small pair the tests use")
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--seconds", type=float, help="how long, default 600; with --steps, how long at most, default 3600")
    parser.add_argument("--steps", type=int, help="end when so many request-steps are done")
    parser.add_argument("--kinds", nargs="+", choices=sorted({*KINDS}), default=KINDS, help="only these requests; default: all")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--max-model-len", type=int, default=256)
    parser.add_argument("--release", default="0.32")
    parser.add_argument("--log", type=Path)
    args = parser.parse_args()
    if args.target is None or args.draft is None:
        args.target, args.draft = pairs.cached_pair()
    try:
        report = soak(
            args.target,
            args.draft,
            args.seconds or (3600 if args.steps else 600),
            args.streams,
            args.max_model_len,
            args.release,
            args.kinds,
            args.steps,
            **{key: value for key, value in served(args.draft).items() if key != "model"},
            draft_sample_method="probabilistic",
        )
    except (AssertionError, subprocess.SubprocessError) as error:
        print(f"FAILED\n{error}")
        return 1
    text = "\n".join([time.strftime("%Y-%m-%d"), *report]) + "\n"
    print(text, end="")
    if args.log:
        args.log.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
