"""The block convolution where blocks are rows: vLLM's batches are flat."""

from __future__ import annotations

import torch
from torch import Tensor

from ..model.backbone import GroupedConv


class RowConv(GroupedConv):
    """The block convolution over vLLM's flat rows, whose blocks of `width` rows follow one another."""

    def convolve_rows(self, x: Tensor, coefficients: Tensor, width: Tensor) -> Tensor:
        """Return y [rows, H] from x [rows, H], one side's coefficients [rows, taps, H] and the block's width, an integer [].

        Rows behind the last whole block (padding, a dummy batch) convolve with what stands before them, and nothing reads them.
        """
        position = torch.arange(len(x), device=x.device) % width
        y = coefficients[:, 0] * x
        for tap in range(1, self.taps):
            # Selected, not multiplied: padded rows may hold anything.
            earlier = torch.where((position >= tap)[:, None], x.roll(tap, 0), torch.zeros_like(x))
            y = y + coefficients[:, tap] * earlier
        return y
