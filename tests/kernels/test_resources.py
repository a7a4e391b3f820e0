"""Every kernel the head launches, compiled without a GPU for three generations, within stated ceilings."""

from __future__ import annotations

import pytest

from vllm_lilicorr.bench.resources import BEGIN, END, SHARED_LIMIT, Usage, measure, table
from vllm_lilicorr.errors import UserError
from vllm_lilicorr.kernels._triton import HAS_TRITON

from .conftest import MODE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed, so nothing can be compiled"),
    pytest.mark.skipif(MODE == "interpreter", reason="this process interprets kernels"),
]

# Half precision, the paper's geometry: (registers a thread, shared bytes a program), for Triton 3.6 to 3.9, whose register counts differ by up
# to a factor of two. 255 is the hardware's most.
CEILINGS = {
    "split_kernel": (128, 1024),
    "merge_kernel": (64, 1024),
    "lattice_nodes_kernel": (128, 1024),
    "rms_norm_kernel": (48, 1024),
    "attention_kernel": (224, 96 * 1024),
    "backward_query_kernel": (224, 80 * 1024),
    "backward_key_kernel": (224, 80 * 1024),
    "bias_silu_kernel": (40, 0),
    "anchor_operand_kernel": (48, 1024),
    "fused_linear_kernel": (255, 100 * 1024),
    "score_and_walk_kernel": (112, 24 * 1024),
    "gru_cell_kernel": (224, 80 * 1024),
    "gru_gates_kernel": (64, 0),
    "corrected_argmax_kernel": (224, 80 * 1024),
}
FLOAT32_SPILLS = 512  # bytes a thread, of the backward only: it trains in half precision


@pytest.mark.parametrize("target", [80, 90, 100])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_kernels_do_not_spill(target, dtype):
    usage = measure(target, dtype, n=1)
    assert {row.kernel.split(" ")[0] for row in usage} == CEILINGS.keys()
    for only, n in (("lattice_attention", 32), ("gru_cell", 64), ("corrected_argmax", 64)):  # which take larger tiles then
        usage += measure(target, dtype, n=n, only=only)
    for row in usage:
        registers, shared = CEILINGS[row.kernel.split(" ")[0]]
        assert row.spills == 0, row
        assert row.registers <= registers and row.shared <= min(shared, SHARED_LIMIT[target]), row


def test_float32_fits_the_smallest_target():
    for row in measure(80, "fp32", only="lattice") + measure(80, "fp32", only="fused_linear") + measure(80, "fp32", only="score_and_walk (s") + measure(80, "fp32", n=64, only="gru") + measure(80, "fp32", n=64, only="corrected"):
        assert row.shared <= SHARED_LIMIT[80], row
        assert row.spills <= (FLOAT32_SPILLS if row.kernel.startswith("backward") else 0), row


def test_a_head_of_odd_width_compiles():
    """SmolLM2: W = 576, head dimension 72."""
    assert all(row.spills == 0 for row in measure(90, "bf16", geometry="smollm2", only="lattice"))


def test_the_table_is_written_between_its_marks(tmp_path, monkeypatch):
    rows = [Usage("k", "bf16", 80, 10, 0, 20, 128), Usage("k", "bf16", 90, 11, 0, 21, 128)]
    monkeypatch.setattr("vllm_lilicorr.bench.resources.measure", lambda *args, **kwargs: rows)
    document = tmp_path / "kernels.md"
    document.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    from vllm_lilicorr.bench.__main__ import main as bench

    assert bench(["resources", "--write", str(document), "--dtypes", "bf16", "--targets", "80", "90"]) == 0
    assert document.read_text() == f"before\n{BEGIN}\n{table(rows)}\n{END}\nafter\n"
    document.write_text("no marks")
    with pytest.raises(UserError, match="lacks the line"):
        bench(["resources", "--write", str(document)])
