"""One step of a GRU without biases, its input gathered from a table: Domino's state after one more token.

    r = sigmoid(W_ir x + W_hr h)    z = sigmoid(W_iz x + W_hz h)    n = tanh(W_in x + r (W_hn h))    h' = n + z (h - n)

With few rows it is one launch: a program owns a few of the state's units, multiplies their six rows of weights and closes the gates over
them. At one block the step is the streaming of those weights (31 MB at Qwen3-8B size in bf16). With many rows the libraries' large
tiles win: a gather, two products, and the gates in one launch.
"""

from __future__ import annotations

import torch

from ._triton import INTERPRETED, ROWS, cdiv, check_shape, dot, next_power_of_2, tl, triton, use_triton

FEW_ROWS = 64
"""Most rows whose products are fused."""

_BLOCK = 1024


@triton.jit
def _next_state(reset, update, fresh_input, fresh_state, state):
    reset, update = tl.sigmoid(reset), tl.sigmoid(update)
    fresh = 2.0 * tl.sigmoid(2.0 * (fresh_input + reset * fresh_state)) - 1.0  # tanh
    return fresh + update * (state - fresh)


@triton.jit
def _gru_cell_kernel(
    x_ptr, x_stride, ids_ptr, ids_stride, state_ptr, state_stride, of_input_ptr, of_state_ptr, out_ptr, out_stride, rows, in_features, width,
    GATHERED: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    unit, inner = tl.program_id(1) * UNITS + tl.arange(0, UNITS), tl.arange(0, INNER)
    real_row, real_unit = row < rows, unit < width
    source = row
    if GATHERED:
        source = tl.load(ids_ptr + row * ids_stride, mask=real_row, other=0)
    reset, update = tl.zeros([ROWS, UNITS], tl.float32), tl.zeros([ROWS, UNITS], tl.float32)
    fresh_input, fresh_state = tl.zeros([ROWS, UNITS], tl.float32), tl.zeros([ROWS, UNITS], tl.float32)
    # Both weights are [3 * width, in]: the rows of the gates r, z and n.
    weight_at = of_input_ptr + unit.to(tl.int64)[:, None] * in_features + inner[None, :]
    gate = width * in_features
    for start in range(0, in_features, INNER):
        real = start + inner < in_features
        mask = real_unit[:, None] & real[None, :]
        x = tl.load(x_ptr + source[:, None] * x_stride + start + inner[None, :], mask=real_row[:, None] & real[None, :], other=0.0)
        w_reset = tl.load(weight_at + start, mask=mask, other=0.0)
        w_update = tl.load(weight_at + gate + start, mask=mask, other=0.0)
        w_fresh = tl.load(weight_at + 2 * gate + start, mask=mask, other=0.0)
        x = x.to(w_reset.dtype)
        reset += dot(x, tl.trans(w_reset), PRECISION)
        update += dot(x, tl.trans(w_update), PRECISION)
        fresh_input += dot(x, tl.trans(w_fresh), PRECISION)
    weight_at = of_state_ptr + unit.to(tl.int64)[:, None] * width + inner[None, :]
    gate = width * width
    for start in range(0, width, INNER):
        real = start + inner < width
        mask = real_unit[:, None] & real[None, :]
        x = tl.load(state_ptr + row[:, None] * state_stride + start + inner[None, :], mask=real_row[:, None] & real[None, :], other=0.0)
        w_reset = tl.load(weight_at + start, mask=mask, other=0.0)
        w_update = tl.load(weight_at + gate + start, mask=mask, other=0.0)
        w_fresh = tl.load(weight_at + 2 * gate + start, mask=mask, other=0.0)
        reset += dot(x, tl.trans(w_reset), PRECISION)
        update += dot(x, tl.trans(w_update), PRECISION)
        fresh_state += dot(x, tl.trans(w_fresh), PRECISION)
    mask = real_row[:, None] & real_unit[None, :]
    state = tl.load(state_ptr + row[:, None] * state_stride + unit[None, :], mask=mask, other=0.0).to(tl.float32)
    new = _next_state(reset, update, fresh_input, fresh_state, state)
    tl.store(out_ptr + row[:, None] * out_stride + unit[None, :], new.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gru_gates_kernel(
    of_input_ptr, of_state_ptr, state_ptr, state_stride, out_ptr, out_stride, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row, unit = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (unit < width)[None, :]
    at = row[:, None] * 3 * width + unit[None, :]
    reset = tl.load(of_input_ptr + at, mask=mask, other=0.0).to(tl.float32) + tl.load(of_state_ptr + at, mask=mask, other=0.0).to(tl.float32)
    at += width
    update = tl.load(of_input_ptr + at, mask=mask, other=0.0).to(tl.float32) + tl.load(of_state_ptr + at, mask=mask, other=0.0).to(tl.float32)
    at += width
    fresh_input = tl.load(of_input_ptr + at, mask=mask, other=0.0).to(tl.float32)
    fresh_state = tl.load(of_state_ptr + at, mask=mask, other=0.0).to(tl.float32)
    state = tl.load(state_ptr + row[:, None] * state_stride + unit[None, :], mask=mask, other=0.0).to(tl.float32)
    new = _next_state(reset, update, fresh_input, fresh_state, state)
    tl.store(out_ptr + row[:, None] * out_stride + unit[None, :], new.to(out_ptr.dtype.element_ty), mask=mask)


def _gru_cell_triton(x, ids, state, of_input, of_state, out):
    rows, width = state.shape
    if rows > FEW_ROWS:
        x = (x if ids is None else torch.nn.functional.embedding(ids, x)).to(of_input.dtype)
        from_input, from_state = torch.nn.functional.linear(x, of_input), torch.nn.functional.linear(state, of_state)
        block = min(_BLOCK, next_power_of_2(width))
        _gru_gates_kernel[(cdiv(rows, ROWS), cdiv(width, block))](
            from_input, from_state, state, state.stride(0), out, out.stride(0), rows, width, ROWS=ROWS, BLOCK=block, num_warps=4
        )
        return out
    half = of_input.dtype != torch.float32
    tile, units = min(32, max(16, next_power_of_2(rows))), 256 if INTERPRETED else 16  # the interpreter pays for every program
    _gru_cell_kernel[(cdiv(rows, tile), cdiv(width, units))](
        x, x.stride(0), state if ids is None else ids, 0 if ids is None else ids.stride(0), state, state.stride(0), of_input, of_state,
        out, out.stride(0), rows, x.shape[1], width, GATHERED=ids is not None, PRECISION="tf32" if half else "ieee", ROWS=tile, UNITS=units,
        INNER=128 if half else 32, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


def gru_cell_torch(x, ids, state, of_input, of_state, out):
    """`gru_cell` in torch operations."""
    x = (x if ids is None else torch.nn.functional.embedding(ids, x)).to(of_input.dtype)
    from_input = torch.nn.functional.linear(x, of_input).chunk(3, -1)
    from_state = torch.nn.functional.linear(state, of_state).chunk(3, -1)
    reset, update = (torch.sigmoid(from_input[gate] + from_state[gate]) for gate in (0, 1))
    fresh = torch.tanh(from_input[2] + reset * from_state[2])
    return out.copy_(fresh + update * (state - fresh))


def gru_cell(
    x: torch.Tensor, ids: torch.Tensor | None, state: torch.Tensor, of_input: torch.Tensor, of_state: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """Returns `out` [N, G], set to the state after input x [N, H], or, with ids [N] int64 (any stride), after x[ids] of a table [.., H].

    state [N, G]; of_input [3 G, H] and of_state [3 G, G], the gates r, z, n one under another as torch's GRU keeps them, contiguous.
    Rows of x, state and out may lie at any stride; out must not be state. Sums are float32. Raises ValueError on shapes that do not fit.
    """
    check_shape("state", state, -1, -1)
    rows, width = state.shape
    check_shape("x", x, rows if ids is None else -1, -1)
    if ids is not None:
        check_shape("ids", ids, rows)
    check_shape("of_input", of_input, 3 * width, x.shape[1])
    check_shape("of_state", of_state, 3 * width, width)
    check_shape("out", out, rows, width)
    if not (of_input.is_contiguous() and of_state.is_contiguous()):
        raise ValueError("of_input and of_state must be contiguous")
    if any(tensor.stride(1) != 1 for tensor in (x, state, out)):
        raise ValueError("x, state and out must be contiguous in their last dimension")
    if out.data_ptr() == state.data_ptr() and not out.is_meta:
        raise ValueError("out must not be state, which is read while out is written")
    return (_gru_cell_triton if use_triton(state) else gru_cell_torch)(x, ids, state, of_input, of_state, out)
