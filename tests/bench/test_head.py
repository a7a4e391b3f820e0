"""What `bench head` times is what the server runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml

from vllm_lilicorr.bench import head as bench
from vllm_lilicorr.bench.resources import GEOMETRIES, Geometry

CPU = torch.device("cpu")


def geometry(width: int) -> Geometry:
    return Geometry(hidden=48, width=width, factor_dim=16, heads=2, vocab=300, slots=3)


def test_the_stages_of_the_packages_drafter_are_timed_at_its_size() -> None:
    configs = Path(__file__).resolve().parents[2] / "configs"
    trained = yaml.safe_load((configs / "smollm2-135m.yaml").read_text())
    g = GEOMETRIES[yaml.safe_load((configs / "bench/cpu.yaml").read_text())["cost"]["stages"]]
    timed = {
        "candidate_topk": g.topk, "hidden_size": g.width, "num_layers": g.layers, "num_heads": g.heads, "mlp_ratio": g.mlp_ratio,
        "factor_dim": g.factor_dim,
    }  # fmt: skip
    assert timed.items() <= trained["head"]["lilicorr"].items() and g.block_size == trained["draft"]["block_size"]


def stages(monkeypatch: Any, width: int) -> list[str]:
    monkeypatch.setitem(bench.GEOMETRIES, "tiny", geometry(width))
    limits = bench.Limits(1e9, {"fp32": 1e9})
    with torch.inference_mode():
        lines = bench.measure("tiny", "fp32", 2, CPU, bench.Timer(CPU, 0.0), limits, compiled=False, eager=False)
    return [line.what.lstrip("0123456789 ") for line in lines]


def test_a_cpus_stages_are_those_of_the_projected_head(monkeypatch: Any) -> None:
    projected, equally_wide = stages(monkeypatch, 32), stages(monkeypatch, 48)
    assert projected[-2:] == ["whole: library products", "whole: library, not projected"]
    assert equally_wide[-1] == "whole: library products"  # there is nothing to project
    # No product makes tokens of embeddings: as where head and target are equally wide.
    assert projected[:-1] == equally_wide
    monkeypatch.setattr(bench.FusedLiLiCorrHead, "project_embedding", lambda *_: None)
    assert stages(monkeypatch, 32).count("linear_add") == projected.count("linear_add") + 1


def test_the_head_compared_with_vllms_is_the_projected_one(monkeypatch: Any) -> None:
    g, calls = geometry(32), []
    head = bench.make_head(g, torch.float32, CPU)
    propose = bench.FusedLiLiCorrHead.propose

    def recorded(fused: Any, *arguments: Any, **options: Any) -> Any:
        calls.append((fused._projected is not None, *options))
        return propose(fused, *arguments, **options)

    def stock(embeddings: Any, log_probs: Any, *states: Any) -> Any:
        start, pair = head(embeddings, log_probs, *states)
        return torch.cat((start[:, None, None].expand(-1, 1, start.shape[1], -1), pair), 1)

    monkeypatch.setattr(bench.FusedLiLiCorrHead, "propose", recorded)
    result = bench._compare(stock, head, g, "fp32", 2, rounds=3)
    assert calls[:2] == [(True, "embedding"), (False, "token_embeddings")]
    assert result["largest_score_difference"] < 1e-4
    assert result["ratio"] == result["ours_ms"] / result["vllm_ms"]
    assert result["unprojected_ratio"] == result["unprojected_ms"] / result["vllm_ms"]
