"""Matrix products with weights laid out once: cuBLAS on CUDA, oneDNN with packed weights on the CPU.

There is no kernel of ours here. The products take most of the head's arithmetic, and the libraries' are hard to beat; what this adds is
the layout at load, the output buffers of a captured graph, and the epilogues each library has.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ._triton import INTERPRETED, use_triton
from .bias_silu import bias_silu


def _pack(weight: torch.Tensor) -> torch.Tensor | None:
    """Returns the weight in oneDNN's blocked layout, or None where torch cannot multiply by it on this machine."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return None
    supported = {torch.float32: lambda: True, torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported, torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported}
    if weight.dtype not in supported or not supported[weight.dtype]():
        return None
    return torch.ops.mkldnn._reorder_linear_weight(weight)


class PackedLinear:
    """y = x W^T + b with W [out, in] and b [out] or None, for inference.

    `out` is a buffer for the result on CUDA, so that a captured graph allocates nothing; on the CPU it is not used. Take the returned
    tensor in either case. `weight` is kept where kernels read it.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else bias.contiguous()
        packed = _pack(weight)
        self._packed = packed
        self.weight = weight if packed is None or INTERPRETED else None
        self._weight = weight.t() if packed is None else None

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Returns x W^T + b, [n, out]."""
        return self._product(x, "none", out)

    def silu(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Returns SiLU(x W^T + b), [n, out]."""
        if use_triton(x):
            y = self._product(x, "none", out, with_bias=False)
            return y if self.bias is None else bias_silu(y, self.bias[None])
        if self._packed is None:
            return F.silu(self._product(x, "none"), inplace=True)
        return self._product(x, "swish")

    def add_to(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Returns y + x W^T + b, [n, out]; `y` may be overwritten. With a bias only where the library has that epilogue: on CUDA the
        bias must be None (`rms_norm` adds it later, as its offset)."""
        if self._packed is not None:
            return torch.ops.mkldnn._linear_pointwise.binary(x, y, self._packed, self.bias, "add")
        if self.bias is not None:
            y = y.add_(self.bias)
        return y.addmm_(x, self._weight)

    def _product(self, x: torch.Tensor, activation: str, out: torch.Tensor | None = None, with_bias: bool = True) -> torch.Tensor:
        bias = self.bias if with_bias else None
        if self._packed is not None:
            return torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, activation, [], "")
        if out is None:
            out = x.new_empty(x.shape[0], self.out_features)
        if bias is None:
            return torch.mm(x, self._weight, out=out)
        return torch.addmm(bias, x, self._weight, out=out)
