"""Throughput of `vllm serve` and its speed-up over no speculation, per benchmark and concurrency, and where a step's time goes.

Every system is a server of its own, driven by vLLM's own benchmark client; acceptance is what vLLM's metrics count. A round
measures every system once on every cell (temperature, benchmark, concurrency), every other round in the opposite order. Each
round begins and ends with no speculation: speed-ups are ratios within a round, their median over the rounds is reported, and
what no speculation shows against itself by the same measure is the noise floor. Differences inside it are ties.

A system is NAME=CKPT, followed by keys of the speculative configuration (docs/serving.md), for example
`exact=CKPT,path_rule=exact` or `sampled=CKPT,draft_sample_method=probabilistic`. `backbone_only=true` serves the checkpoint's
backbone as a plain DFlash drafter. On a CPU the time of a step is split too (LILICORR_TIMING).

Of a conversation with several turns the first is asked.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import contextlib
import functools
import io
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError
from . import _datasets
from ._results import Results, checkpoint_digest
from ._server import Server

NONE, AGAIN = "none", "none again"
BACKBONE_ONLY = "backbone_only"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", required=True, help="the target's folder, or its hub id")
    parser.add_argument("--systems", nargs="+", required=True, metavar="SYSTEM", help="NAME=CKPT or NAME=CKPT,KEY=VALUE,...; beside no speculation, which is always measured")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0])
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--repeats", type=int, default=3, help="rounds at temperature 0")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43, 44], help="one round each above temperature 0")
    add_common_arguments(parser)
    parser.add_argument("--name", default="serve", help="what this grid is called in the results; another grid beside it needs another")


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `bench serve` and `bench cost` share."""
    parser.add_argument("--datasets", nargs="+", metavar="NAME", help=f"NAME or NAME:CATEGORY; default: all files of --prompts-dir, or {', '.join(_datasets.BENCHMARKS)}")
    parser.add_argument("--prompts-dir", type=Path, help="folder of NAME.jsonl, rows {\"turns\": [...]}; default: the Hugging Face hub")
    parser.add_argument("--num-prompts", type=int, help="only the first N of each benchmark")
    parser.add_argument("--max-tokens", type=int, default=1024, help="tokens an answer")
    parser.add_argument("--ignore-eos", action="store_true", help="every answer has --max-tokens tokens")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--together", action="store_true", help="keep all servers up and alternate between them: where memory allows it, as on a CPU")
    parser.add_argument("--server-args", nargs="+", default=[], metavar="NAME=VALUE", help="more options of vllm serve, without their dashes")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="where results.json is kept; run again to resume")


def main(args: argparse.Namespace) -> int:
    from . import report

    results = Results(args.output)
    measure(args, results)
    print(report.serve_tables(results))
    return 0


@dataclass(frozen=True)
class System:
    """A server to measure: its speculative configuration (None: no speculation) and the drafter it loads."""

    name: str
    draft: str | None = None
    options: tuple[tuple[str, Any], ...] = ()

    @functools.cached_property
    def settings(self) -> dict[str, Any]:
        """What determines its measurements. Read once: the checkpoint's digest takes reading all of it."""
        if self.draft is None:
            return {"draft": None}
        return {"draft": self.draft, "checkpoint": checkpoint_digest(self.draft), **dict(self.options)}

    def speculative(self, folder: Path) -> dict[str, Any] | None:
        """Return what `--speculative-config` gets; `folder` is where a backbone without its head is written."""
        if self.draft is None:
            return None
        options = dict(self.options)
        if options.pop(BACKBONE_ONLY, False):
            return {"model": str(backbone_only(self.draft, folder / self.name)), **options}
        return {"model": self.draft, **options}


def parse_system(text: str) -> System:
    """Return the system of `NAME=CKPT[,KEY=VALUE...]`; raises UserError where it has another form."""
    name, separator, rest = text.partition("=")
    draft, *pairs = rest.split(",")
    if not separator or not name or not draft or "/" in name or name in (NONE, AGAIN):
        raise UserError(f"--systems {text}: must be NAME=CHECKPOINT[,KEY=VALUE...], NAME without '/' and not '{NONE}'")
    options = []
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or not key:
            raise UserError(f"--systems {text}: '{pair}' must be KEY=VALUE, a key of the speculative configuration")
        try:
            options.append((key, json.loads(value)))
        except ValueError:
            options.append((key, value))
    return System(name, draft, tuple(options))


@dataclass(frozen=True)
class Cell:
    """What is measured of every system in a round."""

    prompts: _datasets.Prompts
    temperature: float
    concurrency: int
    seed: int | None


def cells(args: argparse.Namespace, prompts: Sequence[_datasets.Prompts], round_: int) -> list[Cell]:
    """Return a round's cells; above temperature 0 a round is a seed."""
    found = []
    for temperature in args.temperature:
        seeds = args.seeds if temperature else [None] * args.repeats
        if round_ < len(seeds):
            found += [Cell(one, temperature, c, seeds[round_]) for one in prompts for c in args.concurrency]
    return found


def measure(args: argparse.Namespace, results: Results) -> None:
    """Measure what `results` lacks, part by part."""
    systems = [System(NONE), *map(parse_system, args.systems), System(AGAIN)]
    names = [system.name for system in systems]
    if len(set(names)) < len(names):
        raise UserError(f"--systems: two are called '{next(n for n in names if names.count(n) > 1)}'; give each its own name")
    if min(args.concurrency) < 1 or args.repeats < 1:
        raise UserError("--concurrency and --repeats must be at least 1")
    if not args.name or "/" in args.name:
        raise UserError(f"--name {args.name}: must be a name without '/'; it is a step of the results' keys")
    for system in systems:
        if dict(system.options).get(BACKBONE_ONLY):
            check_plain_backbone(str(system.draft))
    prompts, missing = _datasets.load(args.datasets, args.prompts_dir, args.num_prompts)
    results.note_missing(missing, [one.name for one in prompts])
    results.note_order(f"serve/{args.name}", names)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_terminated_as_interrupted())
        bench = _Bench(args, stack.enter_context(_scratch()), prompts, stack)
        for one in prompts:  # a prompt that does not fit is an error before the first server starts
            bench.dataset(one)
        for round_ in range(max(args.repeats if 0 in args.temperature else 0, len(args.seeds) if any(args.temperature) else 0)):
            todo = cells(args, prompts, round_)
            for system in systems if round_ % 2 == 0 else systems[::-1]:
                absent = [cell for cell in todo if results.get(*bench.part(system, cell, round_)) is None]
                if not absent:
                    continue
                with bench.server(system) as server:
                    for cell in absent:
                        found = bench.run(server, system, cell)
                        results.put(*bench.part(system, cell, round_), found)
                        print(
                            f"{args.name}: round {round_ + 1}, {system.name}, {cell.prompts.name}, T={cell.temperature:g}, "
                            f"concurrency {cell.concurrency}: {found['tokens_per_second']:.1f} tokens/s",
                            file=sys.stderr,
                        )


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Servers have sessions of their own, so they would outlive this process where a plain SIGTERM ended it."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """Yield a folder for logs and copies; it stays where an error may make somebody want to read the logs."""
    folder = Path(tempfile.mkdtemp(prefix="lilicorr-bench-"))
    try:
        yield folder
    except Exception:
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


class _Bench:
    """The servers and vLLM's client, and what a part is called."""

    def __init__(
        self, args: argparse.Namespace, folder: Path, prompts: Sequence[_datasets.Prompts], stack: contextlib.ExitStack
    ) -> None:
        self.args, self.folder, self.prompts, self.stack = args, folder, prompts, stack
        self.cpu = not _cuda()
        self._kept: dict[str, Server] = {}
        self._files: dict[str, Path] = {}
        self._client: Any = None

    def part(self, system: System, cell: Cell, round_: int) -> tuple[str, dict[str, Any]]:
        """Return a measurement's key and the settings that determine it."""
        args = self.args
        key = f"serve/{args.name}/T{cell.temperature:g}/{cell.prompts.name}/c{cell.concurrency}/{system.name}/round{round_}"
        named = ("target", "dtype", "max_tokens", "ignore_eos", "max_model_len", "together", "server_args")
        return key, {
            **{name: getattr(args, name) for name in named},
            "most": max(args.concurrency),
            "system": system.settings,
            "prompts": cell.prompts.fingerprint,
            "seed": cell.seed,
        }

    @contextlib.contextmanager
    def server(self, system: System) -> Iterator[Server]:
        """Yield a warm server of that system: started for this block, or kept for all of them with --together."""
        if system.name in self._kept:
            yield self._kept[system.name]
            return
        with contextlib.ExitStack() as own:
            stack = self.stack if self.args.together else own
            server = stack.enter_context(self._start(system))
            if self.args.together:
                self._kept[system.name] = server
            self._warm_up(server)
            yield server

    def _warm_up(self, server: Server) -> None:
        self._ask(server, self.prompts[0], 0.0, max(self.args.concurrency), None, min(64, self.args.max_tokens))

    def _start(self, system: System) -> Server:
        args = self.args
        environment = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1", **os.environ}
        if self.cpu:
            environment = {"VLLM_CPU_KVCACHE_SPACE": "1", **environment, "LILICORR_TIMING": str(self._timing(system))}
        options = ["--max-model-len", str(args.max_model_len), "--max-num-seqs", str(max(args.concurrency)), "--no-enable-prefix-caching"]
        # Many a target's generation_config.json truncates or penalises what is sampled; the whole distribution is measured here.
        options += ["--generation-config", "vllm"]
        for text in args.server_args:
            name, separator, value = text.partition("=")
            options += [f"--{name}", *([value] if separator else [])]
        log = self.folder / f"server-{system.name.replace(' ', '-')}.log"
        return Server(args.target, system.speculative(self.folder), options, environment, args.dtype, eager=self.cpu, log=log)

    def _timing(self, system: System) -> Path:
        return self.folder / f"timing-{system.name.replace(' ', '-')}.json"

    def run(self, server: Server, system: System, cell: Cell) -> dict[str, Any]:
        """Return one run's figures: tokens/s of the whole run, and what vLLM's metrics counted during it."""
        before = _read(self._timing(system))
        found = self._ask(server, cell.prompts, cell.temperature, cell.concurrency, cell.seed, self.args.max_tokens)
        drafts, accepted = found.get("spec_decode_num_drafts"), found.get("spec_decode_accepted_tokens")
        return {
            "tokens_per_second": found["output_throughput"],
            "seconds": found["duration"],
            "output_tokens": found["total_output_tokens"],
            "drafts": drafts,
            "accepted": accepted,
            "tau": (accepted + drafts) / drafts if drafts else None,
            "by_position": found.get("spec_decode_per_position_acceptance_rates"),
            "mean_ttft_ms": found["mean_ttft_ms"],
            "mean_tpot_ms": found["mean_tpot_ms"],
            "step_seconds": difference(_read(self._timing(system)), before),
        }

    def _ask(
        self, server: Server, prompts: _datasets.Prompts, temperature: float, concurrency: int, seed: int | None, max_tokens: int
    ) -> dict[str, Any]:
        body = {"add_special_tokens": False, **({} if seed is None else {"seed": seed})}
        count = len(prompts.conversations)
        arguments = [
            "--backend", "openai", "--base-url", server.url(""), "--endpoint", "/v1/completions", "--model", "model",
            "--tokenizer", self.args.target, "--dataset-name", "custom", "--dataset-path", str(self.dataset(prompts)),
            "--skip-chat-template", "--custom-output-len", str(max_tokens), "--num-prompts", str(count), "--disable-shuffle",
            "--max-concurrency", str(concurrency), "--temperature", str(temperature), "--extra-body", json.dumps(body),
            "--disable-tqdm", *(["--ignore-eos"] if self.args.ignore_eos else []),
        ]  # fmt: skip
        found = self._vllm_client(arguments)
        if found["completed"] != count:
            raise UserError(f"{count - found['completed']} of {count} requests of {prompts.name} failed; the server's log is {server.log_path}")
        return found

    def _vllm_client(self, arguments: list[str]) -> dict[str, Any]:
        """Return what `vllm bench serve ARGUMENTS` measures. In this process, since its imports take as long as a short run."""
        if self._client is None:
            before = dict(os.environ)
            os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
            try:
                from vllm.benchmarks.serve import add_cli_args, main_async
                from vllm.utils.argparse_utils import FlexibleArgumentParser
            except ImportError as error:
                raise UserError(f"bench serve needs vLLM and its benchmark client ({error}); install the extra serve, or serve-cpu") from None
            finally:  # what is set for the client, here and by its import, is not for servers started later
                os.environ.clear()
                os.environ.update(before)
            atexit.register(_silence)
            parser = FlexibleArgumentParser()
            add_cli_args(parser)
            self._client = (parser, main_async)
        parser, main_async = self._client
        with contextlib.redirect_stdout(io.StringIO()):
            return asyncio.run(main_async(parser.parse_args(arguments)))

    def dataset(self, prompts: _datasets.Prompts) -> Path:
        """Return the prompts as vLLM's client reads them, rendered by the target's chat template already."""
        from ..chat import render
        from ..target import load_tokenizer

        if prompts.name not in self._files:
            tokenizer = load_tokenizer(self.args.target)
            path = self.folder / f"prompts-{len(self._files)}.jsonl"
            lines = []
            for number, one in enumerate(prompts.conversations, start=1):
                ids = render(tokenizer, [*one.messages, {"role": "user", "content": one.turns[0]}])
                if len(ids) + self.args.max_tokens > self.args.max_model_len:
                    raise UserError(
                        f"{prompts.name}, prompt {number}: has {len(ids)} tokens, and with --max-tokens {self.args.max_tokens} passes "
                        f"--max-model-len {self.args.max_model_len}; raise that or lower the other"
                    )
                lines.append(json.dumps({"prompt": tokenizer.decode(ids)}))
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
            self._files[prompts.name] = path
        return self._files[prompts.name]


def _silence() -> None:
    """Triton's bindings, which vLLM imports, list their own leaks at the interpreter's end: a page that says nothing to a user."""
    sys.stderr.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def check_plain_backbone(draft: str) -> None:
    """Raise UserError unless the checkpoint's backbone is also a whole DFlash drafter: LiLiCorr's, without a convolution."""
    from ..config import DraftConfig, LiLiCorrConfig
    from ..model.checkpoint import resolve_folder

    config = DraftConfig.load(resolve_folder(draft))
    if not isinstance(config.head, LiLiCorrConfig) or config.conv is not None:
        what = config.architecture + (" with a convolution" if config.conv else "")
        raise UserError(
            f"{draft}: is {what}, and only a {LiLiCorrConfig.architecture} without convolution can be served without its head; "
            "measure a DFlash drafter beside it, which bench cost takes as --control NAME"
        )


def backbone_only(draft: str | Path, folder: Path) -> Path:
    """Return `folder`, holding the backbone of a checkpoint (a folder or a hub id) as a plain DFlash drafter."""
    from safetensors.torch import load_file, save_file

    from ..model.checkpoint import resolve_folder

    if folder.exists():
        return folder
    draft = resolve_folder(draft)
    folder.mkdir()
    values = json.loads((draft / "config.json").read_text())
    values["architectures"] = ["DFlashDraftModel"]
    dflash = values["dflash_config"]
    values["dflash_config"] = {k: v for k, v in dflash.items() if not k.startswith("lilicorr_") and k != "projector_type"}
    (folder / "config.json").write_text(json.dumps(values))
    tensors = {name: tensor for name, tensor in load_file(draft / "model.safetensors").items() if "lilicorr." not in name}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def difference(after: dict[str, Any], before: dict[str, Any]) -> dict[str, float] | None:
    """Return the seconds of each part of decoding, and `steps`, between two readings of LILICORR_TIMING; None without a step."""
    steps = after.get("steps", 0) - before.get("steps", 0)
    if not steps:
        return None
    earlier = before.get("seconds", {})
    return {**{name: value - earlier.get(name, 0.0) for name, value in after["seconds"].items()}, "steps": steps}
