"""vLLM's V2 model runner, with every Triton kernel interpreted, on a machine without a GPU.

Import this before vLLM. vLLM takes Triton for usable where a backend named "cpu" has an active driver; here that is a
stand-in, and TRITON_INTERPRET runs each kernel as Python. Only what needs real launches is missing: CUDA graphs.
"""

from __future__ import annotations

import os
import types
from typing import Any


def enable() -> None:
    """Make `import vllm` choose the V2 runner in this process, its Triton kernels interpreted."""
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from triton.backends import backends

    driver = types.SimpleNamespace(is_active=lambda: True)
    # The interpreter has no external functions; vLLM's resampling kernel calls this one.
    import triton.language as tl
    from triton.language.extra import libdevice

    libdevice.log1p = lambda x: tl.log(1.0 + x)
    backends["cpu"] = types.SimpleNamespace(driver=driver, compiler=None)  # type: ignore[assignment]
    quicken()


def quicken() -> None:
    """Have the interpreter do once what it does again and again with the same result; what it computes stays the same.

    It patches all of triton.language at a launch and then at every call of a device function inside it, and builds its table
    of types at every look-up: together most of the time of a kernel as small as those here. A release that does neither, or
    by other names, is left as it is.
    """
    from triton.runtime import interpreter

    if not all(hasattr(interpreter, name) for name in ("GridExecutor", "_patch_lang", "_get_np_dtype")):
        return
    launch, patch, look_up = interpreter.GridExecutor.__call__, interpreter._patch_lang, interpreter._get_np_dtype
    patched: set[int] = set()
    known: dict[str, Any] = {}

    def launched(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()  # the end of the launch before undid its patches
        return launch(self, *args, **kwargs)

    def patch_once(function: Any) -> Any:
        # What is patched depends on nothing but the names that the function's module has for triton.language.
        module = id(function.__globals__)
        if module in patched:
            return None  # a device function's call, which ignores it
        patched.add(module)
        return patch(function)

    def np_dtype(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in known:
            known[name] = look_up(kind)
        return known[name]

    interpreter.GridExecutor.__call__ = launched
    interpreter._patch_lang, interpreter._get_np_dtype = patch_once, np_dtype
