"""Tokens per second of `vllm serve` without speculation, with argmax drafts, and with LiLiCorr's, and where the time goes.

Every variant is a server of its own, started in turn on one machine, again for each repeat, and driven by vLLM's own
benchmark client at each concurrency. Reported are ratios to no speculation within the same repeat (the machine may be shared),
the acceptance length tau, and on a CPU how the time of a decode step divides.

Variants: none; argmax and lilicorr and exact (this package's drafter under that path rule); stock (vLLM's in-tree LiLiCorr head,
GPU only); dflash (vLLM's own DFlash on the same backbone).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ..errors import UserError
from ._server import Server

VARIANTS = ("none", "argmax", "lilicorr", "exact", "stock", "dflash")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", type=Path, required=True, help="the target's folder")
    parser.add_argument("--draft", type=Path, required=True, help="a LiLiCorr checkpoint")
    parser.add_argument("--prompts", type=Path, help="JSON Lines (default: the chat prompts that come with the package)")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["none", "argmax", "lilicorr"])
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--num-prompts", type=int, default=16, help="prompts a run, at every concurrency")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--num-speculative-tokens", type=int, help="default: all of the drafter's slots")
    parser.add_argument("--draft-sample-method", choices=["greedy", "probabilistic"], default="greedy")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--output", type=Path, help="write everything measured as JSON")


def main(args: argparse.Namespace) -> int:
    prompts = args.prompts or Path(__file__).parent.parent / "assets" / "prompts" / "chat.jsonl"
    if "none" not in args.variants:
        raise UserError("--variants must contain none, which every ratio is taken to")
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        dataset = _dataset(args.target, prompts, args.num_prompts, folder / "prompts.jsonl")
        for repeat in range(args.repeats):
            for variant in args.variants:
                runs += _measure(args, variant, repeat, dataset, folder)
                print(f"repeat {repeat}, {variant}: done", file=sys.stderr)
    if args.output:
        args.output.write_text(json.dumps({"arguments": {k: str(v) for k, v in vars(args).items()}, "runs": runs}, indent=1))
    print(report(runs, args.variants, args.concurrency))
    return 0


def _dataset(target: Path, prompts: Path, count: int, path: Path) -> Path:
    """Write the first `count` prompts as vLLM's client reads them: rendered by the target's chat template already."""
    from ..chat import read_prompts, render
    from ..target import load_tokenizer

    tokenizer = load_tokenizer(target)
    lines = []
    for conversation in list(read_prompts(prompts))[:count]:
        messages = [*conversation.messages]
        if conversation.turns:
            messages.append({"role": "user", "content": conversation.turns[0]})
        lines.append(json.dumps({"prompt": tokenizer.decode(render(tokenizer, messages))}))
    path.write_text("\n".join(lines) + "\n")
    return path


def _speculative(args: argparse.Namespace, variant: str, folder: Path) -> dict[str, Any] | None:
    if variant == "none":
        return None
    common: dict[str, Any] = {"draft_sample_method": args.draft_sample_method}
    if args.num_speculative_tokens:
        common["num_speculative_tokens"] = args.num_speculative_tokens
    if variant == "dflash":
        return {"model": str(backbone_only(args.draft, folder / "dflash")), **common}
    if variant == "stock":
        return {"model": str(args.draft), "backend": "stock", **common}
    return {"model": str(args.draft), "path_rule": {"lilicorr": "greedy"}.get(variant, variant), **common}


def backbone_only(draft: Path, folder: Path) -> Path:
    """Return `folder`, holding the checkpoint's backbone as a plain DFlash drafter."""
    from safetensors.torch import load_file, save_file

    if folder.exists():
        return folder
    folder.mkdir()
    values = json.loads((draft / "config.json").read_text())
    values["architectures"] = ["DFlashDraftModel"]
    dflash = values["dflash_config"]
    values["dflash_config"] = {k: v for k, v in dflash.items() if not k.startswith("lilicorr_") and k != "projector_type"}
    (folder / "config.json").write_text(json.dumps(values))
    tensors = {name: tensor for name, tensor in load_file(draft / "model.safetensors").items() if "lilicorr." not in name}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def _measure(args: argparse.Namespace, variant: str, repeat: int, dataset: Path, folder: Path) -> list[dict[str, Any]]:
    timing = folder / f"timing-{variant}-{repeat}.json"
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", **os.environ, "LILICORR_TIMING": str(timing)}
    options = [
        "--max-model-len",
        str(args.max_model_len),
        "--max-num-seqs",
        str(max(args.concurrency)),
        "--no-enable-prefix-caching",
    ]
    runs = []
    with Server(args.target, _speculative(args, variant, folder), options, env, args.dtype) as server:
        _client(args, server, dataset, max(args.concurrency), folder)  # warm-up
        for concurrency in args.concurrency:
            before, seconds = server.metrics(), _read(timing)
            result = _client(args, server, dataset, concurrency, folder)
            after = server.metrics()
            drafts, accepted = (
                after.get(name, 0.0) - before.get(name, 0.0)
                for name in ("spec_decode_num_drafts_total", "spec_decode_num_accepted_tokens_total")
            )
            runs.append(
                {
                    "variant": variant,
                    "repeat": repeat,
                    "concurrency": concurrency,
                    "tokens_per_second": result["output_throughput"],
                    "tau": (accepted + drafts) / drafts if drafts else None,
                    "timing": _difference(_read(timing), seconds),
                }
            )
    return runs


def _client(args: argparse.Namespace, server: Server, dataset: Path, concurrency: int, folder: Path) -> dict[str, Any]:
    result = folder / "result.json"
    vllm = Path(sys.executable).with_name("vllm")
    command = [
        str(vllm), "bench", "serve", "--backend", "openai", "--base-url", server.url(""), "--endpoint", "/v1/completions",
        "--model", "model", "--tokenizer", str(args.target), "--dataset-name", "custom", "--dataset-path", str(dataset),
        "--skip-chat-template", "--custom-output-len", str(args.max_tokens), "--num-prompts", str(args.num_prompts),
        "--max-concurrency", str(concurrency), "--temperature", str(args.temperature), "--ignore-eos", "--disable-tqdm",
        "--disable-shuffle", "--save-result", "--result-dir", str(folder), "--result-filename", result.name,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"})
    if done.returncode:
        raise UserError(f"vLLM's benchmark client failed: {(done.stderr or done.stdout).strip()[-500:]}")
    values = json.loads(result.read_text())
    if values["completed"] != args.num_prompts:
        raise UserError(f"{args.num_prompts - values['completed']} of {args.num_prompts} requests failed; see the server's log")
    return values


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def _difference(after: dict[str, Any], before: dict[str, Any]) -> dict[str, float]:
    """Return seconds a part and the number of steps between two readings."""
    if not after:
        return {}
    earlier = before.get("seconds", {})
    parts = {name: value - earlier.get(name, 0.0) for name, value in after["seconds"].items()}
    return {**parts, "steps": after["steps"] - before.get("steps", 0)}


def report(runs: list[dict[str, Any]], variants: list[str], concurrencies: list[int]) -> str:
    """Return the table: ratio to no speculation (median over repeats; the range behind it), tau, and the parts of a step."""
    plain = {(r["repeat"], r["concurrency"]): r["tokens_per_second"] for r in runs if r["variant"] == "none"}
    lines = ["variant    concurrency  ratio to none (range)   tau    drafter  candidates  head+walk  everything else (ms a step)"]
    for variant in variants:
        for concurrency in concurrencies:
            mine = [r for r in runs if r["variant"] == variant and r["concurrency"] == concurrency]
            ratios = [r["tokens_per_second"] / plain[r["repeat"], concurrency] for r in mine]
            spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
            tau = statistics.mean(r["tau"] for r in mine) if mine[0]["tau"] else None
            shown = f"{tau:.2f}" if tau else "-"
            parts = _parts([r["timing"] for r in mine])
            lines.append(f"{variant:<10} {concurrency:>11}  {spread:<22}  {shown:<5} {parts}")
    return "\n".join(lines)


def _parts(timings: list[dict[str, float]]) -> str:
    steps = sum(timing.get("steps", 0) for timing in timings)
    if not steps:
        return ""
    total = {name: 1e3 * sum(t.get(name, 0.0) for t in timings) / steps for t in timings for name in t if name != "steps"}
    inner = total.get("candidates", 0.0) + total.get("head and walk", 0.0)
    share = inner / (total["drafting"] + total["everything else"])
    return (
        f"{total['drafting'] - inner:>8.1f}  {total.get('candidates', 0.0):>10.1f}  {total.get('head and walk', 0.0):>9.1f}  "
        f"{total['everything else']:>8.1f}   (candidates, head and walk: {100 * share:.1f} % of a step)"
    )
