"""A real `vllm serve` process, for tests and benchmarks over HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import UserError

PATIENCE = 1800
"""Seconds a server may take to become healthy: a large target is read from disk, compiled and captured first."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def resident_bytes(pid: int) -> int:
    """Return the proportional memory of a process and its descendants (what they share is counted once)."""
    pending, total = [pid], 0
    while pending:
        one = pending.pop()
        try:
            children = Path(f"/proc/{one}/task/{one}/children").read_text().split()
            rollup = Path(f"/proc/{one}/smaps_rollup").read_text()
        except OSError:
            continue
        pending += [int(child) for child in children]
        total += 1024 * int(re.search(r"^Pss:\s+(\d+)", rollup, re.M).group(1))  # type: ignore[union-attr]
    return total


class Server:
    """`with Server(target, speculative, options, environment) as server:` runs `vllm serve` and waits until it is healthy.

    Raises UserError where it does not start, with the last line of what it said; `log` keeps all of it. `waiting` is called with the
    seconds waited so far, twice a second.
    """

    def __init__(
        self,
        target: str | Path,
        speculative: dict[str, Any] | Path | None,
        options: list[str],
        env: dict[str, str],
        dtype: str = "float32",
        eager: bool = True,
        log: Path | None = None,
        waiting: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self.port = free_port()
        vllm = Path(sys.executable).with_name("vllm")
        command = [str(vllm), "serve", str(target), "--host", "127.0.0.1", "--port", str(self.port), "--dtype", dtype]
        command += [*(["--enforce-eager"] if eager else []), "--served-model-name", "model", *options]
        if speculative is not None:
            text = str(speculative) if isinstance(speculative, Path) else json.dumps(speculative)
            command += ["--speculative-config", text]
        self.command, self.env, self._path, self._waiting = command, env, log, waiting

    def __enter__(self) -> Server:
        if self._path is None:
            self._log: Any = tempfile.NamedTemporaryFile("w+", suffix=".log")  # noqa: SIM115  closed in __exit__
        else:
            self._log = self._path.open("w+")
        began = time.monotonic()
        self.process = subprocess.Popen(
            self.command, env=self.env, stdout=self._log, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        try:
            while not self.healthy():
                waited = time.monotonic() - began
                if self.process.poll() is not None or waited > PATIENCE:
                    where = f"; its log is {self._path}" if self._path else f":\n{self.log()[-6000:]}"
                    raise UserError(f"vllm serve did not start ({last_error(self.log())}){where}")
                self._waiting(waited)
                time.sleep(0.5)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(60)
        finally:
            # What it started is in its session; a killed server must not leave an engine behind, nor a second Ctrl-C the server.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self._log.close()

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(self.url("/health"), timeout=5) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        """Return status and decoded answer of a POST; `body` is JSON, or bytes sent as they are."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url(path), data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=600) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            text = error.read().decode()
            try:
                return error.code, json.loads(text)
            except ValueError:
                return error.code, text

    def complete(self, prompt: list[int], **params: Any) -> dict[str, Any]:
        """Return the first choice of a completion, its `token_ids` among it; raises UserError where the server refuses."""
        status, answer = self.post("/v1/completions", {"prompt": prompt, "return_token_ids": True, **params})
        if status != 200:
            raise UserError(f"vllm serve answered with status {status}: {json.dumps(answer)[:400]}")
        return answer["choices"][0]

    def metrics(self) -> dict[str, float]:
        """Return the server's vLLM counters by name, labels dropped (positions kept), summed."""
        with urllib.request.urlopen(self.url("/metrics"), timeout=30) as response:
            text = response.read().decode()
        found: dict[str, float] = {}
        for name, labels, value in re.findall(r"^vllm:(\w+)\{([^}]*)\} (\S+)$", text, re.M):
            position = re.search(r'position="(\d+)"', labels)
            key = f"{name}[{position.group(1)}]" if position else name
            found[key] = found.get(key, 0.0) + float(value)
        return found

    @property
    def log_path(self) -> Path:
        return Path(self._log.name)

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")


def last_error(log: str) -> str:
    """Return the last line of a server's log that names an error, else its last line; one that points to another is the last resort.

    The sentence with which the plugin (`error: ...`) or vLLM (`Value error, ...`) refuses a configuration comes before all others.
    """
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    refusals = (re.match(r"(?:\(\w+ pid=\d+\)\s*)?(?:error: |Value error, )(.+?)(?: \[type=\w+, .*)?$", line) for line in lines)
    if refused := [found[1] for found in refusals if found]:
        return refused[-1][-400:]
    errors = [line for line in lines if re.search(r"\b\w*(Error|Exception)\b:? ", line) and "raise " not in line]
    errors = [line for line in errors if "See root cause above" not in line] or errors
    return (errors or lines or ["it said nothing"])[-1][-400:]
