"""What the demo says when `vllm serve` fails, and that nothing is left behind; the server is a stand-in of a few lines."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_lilicorr import demo
from vllm_lilicorr.bench._server import Server, last_error
from vllm_lilicorr.errors import UserError
from vllm_lilicorr.files import folders

ARGS = argparse.Namespace(max_model_len=256, max_tokens=8, dtype="float32", gpu_memory_utilization=None)
HEALTHY = """
import http.server, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if time.monotonic() > UP else 503)
        self.end_headers()
    def do_POST(self):
        print("torch.OutOfMemoryError: CUDA out of memory.", flush=True)
        self.close_connection = True
UP = time.monotonic() + float(sys.argv[2])
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return a function that makes `vllm serve` a Python program; logs go to `tmp_path`."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def install(code: str, *arguments: str) -> None:
        class StandIn(Server):
            def __init__(self, *given: Any) -> None:
                super().__init__(*given)
                self.command = [sys.executable, "-c", code, str(self.port), *arguments]

        monkeypatch.setattr(demo, "Server", StandIn)

    return install


@pytest.mark.parametrize(
    ("log", "what"),
    [
        ("OSError: [Errno 98] Address already in use", "run the demo again"),
        ("ValueError: Available memory on node 0 (3.1/24.0 GiB) on startup is less than desired", "memory ran out"),
        ("is needed, which is larger than the available KV cache memory (0.1 GiB).", "lower --max-model-len, or give it more"),
        ("RuntimeError: [enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory", "memory ran out"),
        ("RuntimeError: Engine core initialization failed. Failed core proc(s): {'EngineCore': -9}", "memory ran out"),
        ("importlib.metadata.PackageNotFoundError: No package metadata was found for vllm", "vllm_lilicorr.setup_cpu"),
    ],
)
def test_what_a_server_says_before_it_fails_has_a_remedy(log: str, what: str, stand_in: Any, tmp_path: Path) -> None:
    stand_in(f"print('INFO starting'); print({log!r}); raise SystemExit(1)")
    with pytest.raises(UserError) as raised, demo._serve(ARGS, Path("target"), "LiLiCorr", None):
        pass
    said = str(raised.value)
    (kept,) = tmp_path.glob("vllm-serve-*.log")
    assert said.startswith("LiLiCorr: vllm serve did not start (") and what in said and str(kept) in said
    assert "\n" not in said, "one sentence; the rest is in the log"
    assert log in kept.read_text()


def test_a_healthy_servers_log_calls_for_nothing() -> None:
    assert demo.remedy("INFO Available KV cache memory: 1.00 GiB\nINFO GPU KV cache size: 43,690 tokens\n") == ""


def test_an_error_that_points_to_another_is_not_the_last_word() -> None:
    log = "ValueError: no memory left\nRuntimeError: Engine core initialization failed. See root cause above.\n"
    assert last_error(log) == "ValueError: no memory left"
    assert "See root cause above" in last_error(log.splitlines()[1])


def test_the_sentence_that_refuses_a_configuration_comes_first() -> None:
    log = "WARNING an optional part is absent: ImportError: no zen\nerror: --speculative-config: vocab_size is 400\nbye\n"
    assert last_error(log) == "--speculative-config: vocab_size is 400"
    pydantic = (
        "(APIServer pid=7) pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
        "(APIServer pid=7)  Value error, User-specified max_model_len (9000) is too large. [type=value_error, input_value=A({}), "
        "input_type=A]\n(APIServer pid=7)     For further information visit https://errors.pydantic.dev\n"
    )
    assert last_error(pydantic) == "User-specified max_model_len (9000) is too large."


@pytest.mark.slow
def test_a_drafter_for_another_target_is_refused_before_a_server_starts(smollm2: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(smollm2, other, copy_function=os.symlink)
    values = json.loads((other / "config.json").read_text())
    (other / "config.json").unlink()
    (other / "config.json").write_text(json.dumps(values | {"num_hidden_layers": 12}))
    with pytest.raises(UserError, match="num_target_layers is 30, but the target other has 12.*made for another target"):
        demo.main(["--target", str(other), "--draft", str(folders()["smollm2-135m"])])


def test_a_server_that_stops_answering_is_told_with_its_remedy(stand_in: Any, tmp_path: Path) -> None:
    stand_in(HEALTHY, "0")
    with pytest.raises(UserError, match="no drafts: vllm serve gave no answer .* memory ran out") as raised:
        with demo._serve(ARGS, Path("target"), "no drafts", None) as server:
            demo._ask_all(ARGS, server, "no drafts", [("maths", "1 + 1?")], stream=False)
    assert server.process.poll() is not None
    assert str(next(tmp_path.glob("vllm-serve-*.log"))) in str(raised.value)


def test_the_wait_for_health_is_shown_and_the_log_removed(
    stand_in: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(HEALTHY, "1.2")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    with demo._serve(ARGS, Path("target"), "LiLiCorr", None) as server:
        assert server.healthy()
    shown = capsys.readouterr().out
    assert "\r\033[KLiLiCorr: starting vllm serve, 1 s" in shown and "LiLiCorr: vllm serve is up at http://127.0.0.1:" in shown
    assert not list(tmp_path.glob("vllm-serve-*.log"))


def test_a_second_ctrl_c_leaves_no_server_either() -> None:
    server = Server("target", None, [], {})
    stubborn = "import signal, sys, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    server.command = [sys.executable, "-c", stubborn]
    server.healthy = lambda: "up" in server.log()  # type: ignore[method-assign]

    def impatient(timeout: float | None = None) -> int:
        del server.process.wait  # type: ignore[attr-defined]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), server:
        server.process.wait = impatient  # type: ignore[assignment, method-assign]
    deadline = time.monotonic() + 20
    while server.process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    gone = server.process.poll() is not None
    if not gone:
        server.process.kill()
    assert gone


def test_a_closed_terminal_is_as_ctrl_c_but_under_nohup() -> None:
    before = signal.getsignal(signal.SIGHUP)
    try:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with pytest.raises(KeyboardInterrupt), demo._terminable():
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(5)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with demo._terminable():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_drafters_own_file_says_how_many_tokens_to_draft(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo.DraftConfig, "load", lambda folder: SimpleNamespace(num_slots=7))
    assert demo._slots(None, tmp_path) == 7
    file = tmp_path / "lilicorr.json"
    file.write_text(json.dumps({"model": ".", "num_speculative_tokens": 3}))
    assert demo._slots(None, tmp_path) == 3 and demo._slots(5, tmp_path) == 5
    wrong = {
        '{"num_speculative_tokens": 8}': "must lie in 1..7",
        '{"num_speculative_tokens": "3"}': "must lie in 1..7",
        '{"model": "."}': "names no num_speculative_tokens",
        "[]": "names no num_speculative_tokens",
        "{": "names no num_speculative_tokens",
    }
    for text, said in wrong.items():
        file.write_text(text)
        with pytest.raises(UserError, match=said) as raised:
            demo._slots(None, tmp_path)
        assert str(file) in str(raised.value)


def test_make_demo_sets_everything_up_and_passes_its_options_on() -> None:
    root = Path(__file__).resolve().parents[2]
    command = ["make", "--dry-run", "--directory", str(root), "demo", "VENV=/nowhere", "DEMO_ARGS=--limit 2"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    venv, packages, own = (done.stdout.index(text) for text in ("-m venv", "-r requirements/cpu.txt", "--editable ."))
    assert venv < packages < own < done.stdout.index("/nowhere/bin/python -m vllm_lilicorr.demo --limit 2")
