"""A server under load: many streams of every kind at once, aborts among them, and what must hold throughout.

    python tests/serving/soak.py [--target DIR --draft CKPT] [--seconds 600] [--streams 64] [--log FILE]

Starts `vllm serve` with LILICORR_DEBUG=1 and keeps 64 streams open: prompts of 1 token to nearly the maximum length, random
aborts mid-stream, temperatures 0 to 1.2, stop strings, n=2, logprobs, JSON-schema output. It ends with status 1 on: an HTTP
error, JSON that does not parse, a server that is not healthy, memory that still grows after the warm-up, or a greedy output
that is not the target's own continuation (fp32, near-tie rule).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import pairs  # noqa: E402
from engines import compare_outputs, environment  # noqa: E402

from vllm_lilicorr.bench._server import Server, resident_bytes  # noqa: E402

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "level": {"enum": [1, 2, 3]}},
    "required": ["ok", "level"],
    "additionalProperties": False,
}


@dataclass
class Tally:
    """What happened: finished requests by kind, errors, greedy outputs to check, memory over time."""

    finished: dict[str, int] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    greedy: list[tuple[str, list[int], list[int]]] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)
    tokens: int = 0

    def count(self, kind: str) -> None:
        self.finished[kind] = self.finished.get(kind, 0) + 1


def request(rng: random.Random, vocab: int, max_len: int) -> tuple[str, dict[str, Any]]:
    """Return a request's kind and body."""
    kind = rng.choice(["greedy"] * 4 + ["sampled"] * 3 + ["abort"] * 2 + ["stop", "several", "logprobs", "json"])
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
            "structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True},
            "max_tokens": min(room, 64),
            "ignore_eos": False,
        }
        body["prompt"] = body["prompt"][: max_len - 80]
        body["max_tokens"] = 64
    return kind, body


async def stream_of_requests(session: Any, server: Server, seed: int, until: float, shape: tuple[int, int], tally: Tally) -> None:
    rng = random.Random(seed)
    while time.time() < until:
        kind, body = request(rng, *shape)
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
        choices = answer["choices"]
        tally.tokens += answer["usage"]["completion_tokens"]
        if kind == "json":
            if shape[0] < 1000:  # xgrammar reads the byte tokenizer of the small pair wrongly, with or without drafts
                tally.count(kind)
                continue
            try:
                value = json.loads(choices[0]["text"])
                assert value.keys() == {"ok", "level"}
            except (ValueError, AssertionError, AttributeError):
                tally.errors.append(f"json: {choices[0]['text'][:200]!r} does not fit the schema")
        elif kind in ("greedy", "logprobs"):
            tally.greedy.append((kind, body["prompt"], choices[0]["token_ids"]))
        elif kind == "several" and len(choices) != 2:
            tally.errors.append(f"several: {len(choices)} choices")
        tally.count(kind)


async def watch_memory(server: Server, until: float, tally: Tally) -> None:
    began = time.time()
    while time.time() < until:
        tally.memory.append((time.time() - began, resident_bytes(server.process.pid)))
        await asyncio.sleep(2)


async def load(server: Server, seconds: float, streams: int, shape: tuple[int, int]) -> Tally:
    import aiohttp

    tally, until = Tally(), time.time() + seconds
    timeout = aiohttp.ClientTimeout(total=None)
    # A connection a request: the server closes idle ones after five seconds, and a request that reuses one just then fails.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        work = [stream_of_requests(session, server, seed, until, shape, tally) for seed in range(streams)]
        await asyncio.gather(*work, watch_memory(server, until, tally))
    return tally


def growth(memory: list[tuple[float, int]]) -> float:
    """Return how much more memory the last quarter of the run used than the second one, as a fraction."""
    end = memory[-1][0]
    second = [used for at, used in memory if end / 4 <= at < end / 2]
    last = [used for at, used in memory if at >= 3 * end / 4]
    return max(last) / max(second) - 1


def soak(target: Path, draft: Path, seconds: float, streams: int, max_len: int, release: str = "0.32", **spec: Any) -> list[str]:
    """Run the load and return its report; raises AssertionError when something did not hold."""
    vocab = json.loads((target / "config.json").read_text())["vocab_size"]
    vocab = 256 if vocab == pairs.VOCAB else vocab
    speculative = {"model": str(draft), **spec}
    options = ["--max-model-len", str(max_len), "--max-num-seqs", str(streams), "--max-num-batched-tokens", "2048"]
    with Server(target, speculative, options, environment(release, LILICORR_DEBUG="1")) as server:
        tally = asyncio.run(load(server, seconds, streams, (vocab, max_len)))
        healthy = server.healthy()
        metrics = server.metrics()
    compared = compare_outputs(target, tally.greedy)
    accepted, drafts = metrics["spec_decode_num_accepted_tokens_total"], metrics["spec_decode_num_drafts_total"]
    report = [
        f"{seconds:.0f} s, {streams} streams, maximum length {max_len}, vLLM {release}, {json.dumps(spec)}",
        f"finished: {json.dumps(tally.finished)}; {tally.tokens} tokens; {int(drafts)} request-steps with drafts",
        f"acceptance length {(accepted + drafts) / drafts:.3f}",
        f"greedy outputs against the target: {compared.summary()}",
        f"memory: {tally.memory[0][1] / 2**20:.0f} MiB at first, {max(m for _, m in tally.memory) / 2**20:.0f} MiB at most, "
        f"last quarter over second {100 * growth(tally.memory):+.1f} %",
        f"errors: {len(tally.errors)}{''.join('; ' + error for error in tally.errors[:5])}",
    ]
    assert healthy, "\n".join(report)
    assert not tally.errors, "\n".join(report)
    compared.check()
    if seconds >= 120:  # a shorter run is warm-up
        assert growth(tally.memory) < 0.05, "\n".join(report)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", type=Path, help="default, with --draft: the small pair the tests use")
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--seconds", type=float, default=600)
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
            args.seconds,
            args.streams,
            args.max_model_len,
            args.release,
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
