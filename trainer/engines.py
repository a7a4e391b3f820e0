"""The engines that write a corpus: vLLM's offline one in this process, or its asynchronous one over data-parallel ranks."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import queue
import subprocess
import sys
import threading
from typing import Any, Protocol

from vllm_lilicorr.errors import UserError

Answer = tuple[str, list[int], str]
"""A request's key, the token ids of its answer, and why it ended: "stop" or "length"."""


class Generator(Protocol):
    """Continuous batching: `submit` any time; `finished` waits until something has ended and returns it."""

    max_length: int

    def submit(self, key: str, prompt: list[int], max_tokens: int) -> None: ...

    def finished(self) -> list[Answer]: ...

    def close(self) -> None: ...


def make_engine(target: str, args: argparse.Namespace) -> Generator:
    """Return the engine that the command line asks for. Raises UserError where vLLM cannot start it."""
    kind: type[OfflineEngine | DataParallelEngine] = OfflineEngine if args.data_parallel_size == 1 else DataParallelEngine
    try:
        return kind(target, args)
    except Exception as error:  # of the configuration, the devices, the weights: dozens of kinds
        raise UserError(f"vLLM cannot start an engine for {target} ({_reason(error)}); its own messages stand above") from error


class OfflineEngine:
    """vLLM's offline engine, driven step by step."""

    def __init__(self, target: str, args: argparse.Namespace) -> None:
        from vllm import LLM

        self._llm = LLM(**_engine_arguments(target, args))
        self._engine = self._llm.llm_engine
        self._guard = Guard()
        self.max_length = int(self._engine.vllm_config.model_config.max_model_len)

    def submit(self, key: str, prompt: list[int], max_tokens: int) -> None:
        from vllm import TokensPrompt

        try:
            self._engine.add_request(key, TokensPrompt(prompt_token_ids=prompt), _sampling(max_tokens))
        except Exception as error:
            raise _died(error) from error

    def finished(self) -> list[Answer]:
        try:
            return [_answer(output) for output in self._engine.step() if output.finished]
        except Exception as error:
            raise _died(error) from error

    def close(self) -> None:
        self._engine.engine_core.shutdown()
        self._guard.kill_all()


class DataParallelEngine:
    """vLLM's asynchronous engine: a process for every data-parallel rank, and its own balancer between them.

    The engine lives in an event loop on a thread of its own; answers reach the caller through a queue.
    """

    PATIENCE = 5.0
    """Seconds without an answer after which the engine is asked whether it still lives."""

    def __init__(self, target: str, args: argparse.Namespace) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        ranks = args.data_parallel_size
        arguments = AsyncEngineArgs(data_parallel_size=ranks, disable_log_stats=True, **_engine_arguments(target, args))
        self._engine = AsyncLLM.from_engine_args(arguments)  # here, not in the loop: Ctrl-C stops a start as well
        self._guard = Guard()
        self.max_length = int(self._engine.model_config.max_model_len)
        self._ended: queue.SimpleQueue[Answer | Exception] = queue.SimpleQueue()
        self._failure: Exception | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="data-parallel engine", daemon=True)
        self._thread.start()

    def submit(self, key: str, prompt: list[int], max_tokens: int) -> None:
        asyncio.run_coroutine_threadsafe(self._generate(key, prompt, max_tokens), self._loop)

    async def _generate(self, key: str, prompt: list[int], max_tokens: int) -> None:
        from vllm import TokensPrompt

        try:
            async for output in self._engine.generate(TokensPrompt(prompt_token_ids=prompt), _sampling(max_tokens), key):
                if output.finished:
                    self._ended.put(_answer(output))
        except Exception as error:
            self._ended.put(error)

    def finished(self) -> list[Answer]:
        """Return the answers that have ended, at least one. Those that ended before a failure are returned before it is raised.

        Raises UserError: an engine has died, or cannot answer a request.
        """
        answers: list[Answer] = []
        while not answers or not self._ended.empty():
            if self._failure is not None and self._ended.empty():
                raise _died(self._failure) from self._failure
            try:
                ended = self._ended.get(timeout=self.PATIENCE)
            except queue.Empty:
                if self._engine.errored:  # a request that was being handed over when the engine died hears nothing of it
                    self._failure = self._failure or self._engine.dead_error
                continue
            if isinstance(ended, Exception):
                self._failure = self._failure or ended
            else:
                answers.append(ended)
        return answers

    def close(self) -> None:
        self._engine.shutdown()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._guard.kill_all()
        del self._engine  # now: its finalizer fails once the interpreter is on its way out


def _engine_arguments(target: str, args: argparse.Namespace) -> dict[str, Any]:
    options = {"max_model_len": args.max_model_len, "gpu_memory_utilization": args.gpu_memory_utilization}
    return {
        "model": target,
        "tensor_parallel_size": args.tensor_parallel_size,
        "dtype": args.dtype,
        "max_num_seqs": args.max_num_seqs,
        "enforce_eager": args.enforce_eager,
        "generation_config": "auto",
        "seed": 0,
        **{key: value for key, value in options.items() if value is not None},
    }


def _sampling(max_tokens: int) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(temperature=0.0, max_tokens=max_tokens, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)


def _answer(output: Any) -> Answer:
    """Return what a finished request has come to.

    Raises RuntimeError where the engine broke it off: one that is told to end (SIGTERM) does so to every answer it has begun.
    """
    answer = output.outputs[0]
    if answer.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"it broke off an answer: {answer.finish_reason}")
    return output.request_id, list(answer.token_ids), answer.finish_reason


def _died(error: Exception) -> UserError:
    return UserError(
        f"vLLM stopped answering ({_reason(error)}), its own messages stand above; the rows it finished are kept, and the same "
        "command continues"
    )


def _reason(error: BaseException) -> str:
    """Return what an error says, in one line: its cause's words where it has none."""
    while not str(error).strip() and error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split()) or type(error).__name__


class Guard:
    """Kills the processes below this one once this one is gone: vLLM's engines would wait for it for ever, and keep their memory.

    It is a process of its own that waits for the end of its input. A handle on a process, unlike its number, never comes to mean
    another one.
    """

    SCRIPT = """
import contextlib, os, signal, sys
handles = []
for pid in sys.argv[1:]:
    with contextlib.suppress(OSError):  # it has ended, or the kernel has no such handles
        handles.append(os.pidfd_open(int(pid)))
print(flush=True)
sys.stdin.read()
for handle in handles:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(handle, signal.SIGKILL)
"""

    def __init__(self) -> None:
        import psutil

        pids = []
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                # multiprocessing's tracker frees the shared memory that the others leave, and then ends by itself
                if "resource_tracker" not in " ".join(process.cmdline()):
                    pids.append(str(process.pid))
        command = [sys.executable, "-I", "-c", self.SCRIPT, *pids]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        assert self._process.stdout is not None
        self._process.stdout.readline()  # it holds them all from here on

    def kill_all(self) -> None:
        """Kill what is left of them now."""
        self._process.communicate()
