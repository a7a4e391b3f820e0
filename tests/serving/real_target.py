"""A real target behind `vllm serve` with a real drafter, held against the same server without speculation and the reference.

    python tests/serving/real_target.py --target DIR --draft CKPT [--release 0.33] [--dtype bfloat16] [--limit 40]

Sends the package's prompts at a concurrency of 8 and prints, under the near-tie rule: served tokens against those without
speculation; served drafts against the reference's, teacher-forced with the served tokens; tau of the server against the
reference's own run. In half precision, where text depends on how many tokens a step holds, it compares the tokens only and
prints every first difference with its gap, which must be a near-tie of that precision. Status 1 where something does not hold.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from engines import environment

from vllm_lilicorr.bench._server import Server
from vllm_lilicorr.chat import read_prompts, render
from vllm_lilicorr.model.checkpoint import load_draft
from vllm_lilicorr.near_tie import Comparison
from vllm_lilicorr.reference import ReferenceDecoder, acceptance_length, drafts_at
from vllm_lilicorr.target import load_target, load_tokenizer

HALF_PRECISION_TIE = 0.25
"""The largest gap of two log-probabilities that is a near-tie in half precision: logits between 16 and 32 are multiples of 0.125
in bfloat16, and of two of them each may be rounded the other way."""

PROMPTS = Path(__file__).parents[2] / "vllm_lilicorr/assets/prompts"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--release", choices=["0.32", "0.33"], default="0.32")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--concurrency", type=int, default=8)
    args = parser.parse_args()
    tokenizer = load_tokenizer(args.target)
    turns = [c.turns[0] for file in sorted(PROMPTS.glob("*.jsonl")) for c in read_prompts(file)]
    if not 1 <= args.limit <= len(turns):
        parser.error(f"--limit must lie in 1..{len(turns)}, the prompts of the package, got {args.limit}")
    chosen = turns[:: max(1, len(turns) // args.limit)][: args.limit]
    prompts = [render(tokenizer, [{"role": "user", "content": turn}]) for turn in chosen]
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.jsonl")
        served, metrics = serve(args, prompts, {"model": str(args.draft)}, trace)
        plain, _ = serve(args, prompts, None, None)
        blocks = [json.loads(line) for line in trace.read_text().splitlines()]
    ok = compare_tokens(args, prompts, served, plain)
    if args.dtype == "float32":
        ok &= compare_drafts(args, prompts, served, blocks, metrics)
    return 0 if ok else 1


def serve(args: argparse.Namespace, prompts: list[list[int]], speculative: Any, trace: Path | None) -> tuple[list[Any], Any]:
    """Return every prompt's choice and the server's counters."""
    extra = {"OMP_NUM_THREADS": "", "VLLM_CPU_OMP_THREADS_BIND": "0-1"} | ({"LILICORR_TRACE": str(trace)} if trace else {})
    env = {key: value for key, value in environment(args.release, **extra).items() if value}
    options = ["--max-model-len", "1024", "--max-num-seqs", str(args.concurrency), "--no-enable-prefix-caching"]
    with Server(args.target, speculative, options, env, args.dtype) as server, ThreadPoolExecutor(args.concurrency) as pool:

        def ask(prompt: list[int]) -> Any:
            status, answer = server.post(
                "/v1/completions",
                {"prompt": prompt, "return_token_ids": True, "max_tokens": args.max_tokens, "temperature": 0, "logprobs": 2},
            )
            assert status == 200, answer
            return answer

        answers = list(pool.map(ask, prompts))
        return answers, server.metrics()


def ids(answer: Any) -> list[int]:
    return answer["choices"][0]["token_ids"]


def compare_tokens(args: argparse.Namespace, prompts: list[list[int]], served: list[Any], plain: list[Any]) -> bool:
    """Print how the served tokens compare with those without speculation, whose top-2 gaps are the margins."""
    tally, ties = Comparison(), True
    for index, (ours, theirs) in enumerate(zip(served, plain, strict=True)):
        gaps = []
        for best in theirs["choices"][0]["logprobs"]["top_logprobs"]:
            ranked = sorted(best.values(), reverse=True)
            gaps.append(ranked[0] - ranked[1] if len(ranked) > 1 else 1.0)  # one entry: two tokens of the same text
        if not tally.add(f"prompt {index}", ids(theirs), ids(ours), gaps):
            first = next((gap for gap, a, b in zip(gaps, ids(theirs), ids(ours)) if a != b), float("inf"))
            ties &= first <= HALF_PRECISION_TIE
    agreed = show(f"{args.release} {args.dtype}, {len(prompts)} prompts, tokens with against without speculation", tally)
    if args.dtype == "float32":
        return agreed
    print(
        f"  every first difference is {'' if ties else 'NOT '}a near-tie of {args.dtype}, a gap of at most {HALF_PRECISION_TIE}"
    )
    return ties


def compare_drafts(
    args: argparse.Namespace, prompts: list[list[int]], served: list[Any], blocks: list[Any], metrics: Any
) -> bool:
    """Print how served drafts compare with the reference's along the served tokens, and tau with a run of the reference's own."""
    draft = load_draft(args.draft, dtype=torch.float32)
    target = load_target(args.target, draft.config.target_layer_ids)
    tally = Comparison()
    for index, (prompt, answer) in enumerate(zip(prompts, served, strict=True)):
        sequence = prompt + ids(answer)
        mine = [b for b in blocks if b["request"].startswith(answer["id"]) and b["drafts"] and b["anchor"] < len(sequence)]
        assert mine, f"prompt {index} drafted nothing"
        expected = drafts_at(target, draft, sequence, [block["anchor"] for block in mine], "greedy")
        for at, block in enumerate(mine):
            margins = [float(expected.margin[at])] * len(block["drafts"])
            tally.add(f"prompt {index} at {block['anchor']}", expected.tokens[at].tolist(), block["drafts"], margins)
    agreed = show(f"{args.release}, drafts against the reference's", tally)
    stop = json.loads((args.target / "config.json").read_text())["eos_token_id"]
    decoder = ReferenceDecoder(target, draft, "greedy", stop_ids=[stop] if isinstance(stop, int) else stop)
    decoded = [one for at in range(0, len(prompts), 8) for one in decoder.decode(prompts[at : at + 8], args.max_tokens)]
    reference = acceptance_length([count for one in decoded for count in one.accepted])
    drafts, accepted = (metrics[f"spec_decode_num_{name}_total"] for name in ("drafts", "accepted_tokens"))
    tau = (accepted + drafts) / drafts
    print(
        f"{args.release}, tau {tau:.4f} by the server's counters, {reference:.4f} by the reference ({tau / reference - 1:+.2%})"
    )
    return agreed and abs(tau / reference - 1) < 0.005


def show(title: str, tally: Comparison) -> bool:
    """Print a comparison; return whether it holds under the near-tie rule, the rate of near-ties included."""
    print(f"{title}: ", end="")
    try:
        tally.check()
    except AssertionError as error:
        holds, reason = False, str(error).partition(";")[0]
        print(f"  fails: {reason}")
    else:
        holds = True
    for line in [*tally.near_ties, *tally.differences]:
        print(f"  {line}")
    return holds


if __name__ == "__main__":
    sys.exit(main())
