"""vLLM's V2 model runner, with every Triton kernel interpreted, on a machine without a GPU.

Import this before vLLM. vLLM takes Triton for usable where a backend named "cpu" has an active driver; here that is a
stand-in, and TRITON_INTERPRET runs each kernel as Python. Only what needs real launches is missing: CUDA graphs.
"""

from __future__ import annotations

import os
import types


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
