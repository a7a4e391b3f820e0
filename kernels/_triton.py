"""Triton where there is one. Every kernel module imports `triton`, `tl` and `use_triton` from here, so that a machine without the
package can import, and run the torch twins of, everything."""

from __future__ import annotations

import os
from typing import Any

import torch

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:
    HAS_TRITON = False

    class _Absent:
        """Stands in for the module while kernels are defined; a decorator that hands its function back."""

        def __getattr__(self, name: str) -> Any:
            return _Absent()

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return args[0] if args and callable(args[0]) else self

    triton = tl = _Absent()

INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")
"""Whether kernels run in Triton's interpreter. Triton reads the variable when a kernel is defined, so it is read once, here."""

ROWS = 32 if INTERPRETED else 1
"""Rows a program of the row-wise kernels takes. A GPU runs one a program, all at once; the interpreter pays for every program."""


def use_triton(tensor: torch.Tensor) -> bool:
    """Returns whether an operation on `tensor` runs as a kernel: CUDA tensors do, CPU tensors only in the interpreter.

    Meta tensors stand for CUDA ones where kernels are compiled without a device (`python -m vllm_lilicorr.bench resources`).
    Raises RuntimeError for a CUDA tensor where Triton is not installed.
    """
    if not (tensor.is_cuda or tensor.is_meta):
        return INTERPRETED
    if not HAS_TRITON:
        raise RuntimeError("the head's CUDA kernels need the 'triton' package, which cannot be imported; install it or run on the CPU")
    return True


def next_power_of_2(n: int) -> int:
    """Returns the smallest power of two >= n (n >= 1)."""
    return 1 << (n - 1).bit_length()


def cdiv(a: int, b: int) -> int:
    """Returns a / b rounded up."""
    return -(-a // b)


def check_shape(name: str, tensor: torch.Tensor, *expected: int) -> None:
    """Raises ValueError unless `tensor` has the expected shape; -1 accepts any length."""
    if tensor.ndim != len(expected) or any(e not in (-1, got) for e, got in zip(expected, tensor.shape)):
        shape = ", ".join("any" if e == -1 else str(e) for e in expected)
        raise ValueError(f"{name} must have shape [{shape}], got {list(tensor.shape)}")


# The interpreter keeps bfloat16 as uint16 and multiplies those integers. Products of bfloat16 numbers are exact in float32, so
# widening the operands there computes what a tensor core does.
_WIDEN_DOT = tl.constexpr(INTERPRETED)


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    """a [m, k] times b [k, n] in float32; PRECISION says how float32 operands are multiplied."""
    if _WIDEN_DOT:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


def has_kernels(tensor: torch.Tensor) -> bool:
    """Returns whether an operation that has another way to compute may run as a kernel on `tensor`; never raises.

    Where `use_triton` says yes, except without Triton, on meta tensors, and in a type that no kernel takes (fp64).
    """
    here = tensor.is_cuda or (INTERPRETED and tensor.is_cpu)
    return HAS_TRITON and here and tensor.dtype in (torch.float32, torch.bfloat16, torch.float16)
