"""What the real target's script takes for equal."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from real_target import compare_tokens


def answer(tokens: list[int], gap: float) -> dict[str, Any]:
    ranked = [{"a": -0.1, "b": -0.1 - gap} for _ in tokens]
    return {"choices": [{"token_ids": tokens, "logprobs": {"top_logprobs": ranked}}]}


@pytest.mark.parametrize(
    ("dtype", "gap", "served", "holds"),
    [
        ("float32", 1.0, [1, 2, 3], True),
        ("float32", 1e-4, [1, 2, 4], True),
        ("float32", 0.01, [1, 2, 4], False),
        ("float32", 1e-4, [1, 2], False),
        ("bfloat16", 1.0, [1, 2, 3], True),
        ("bfloat16", 0.125, [1, 5, 4], True),
        ("bfloat16", 0.375, [1, 5, 4], False),
        ("bfloat16", 0.125, [1, 2], False),
    ],
)
def test_a_difference_is_excused_by_a_near_tie_of_its_precision_alone(
    dtype: str, gap: float, served: list[int], holds: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    args: Any = SimpleNamespace(release="0.32", dtype=dtype)
    assert compare_tokens(args, [[0]], [answer(served, gap)], [answer([1, 2, 3], gap)]) == holds
    assert "tokens with against without speculation" in capsys.readouterr().out


def test_too_many_near_ties_are_no_agreement() -> None:
    args: Any = SimpleNamespace(release="0.32", dtype="float32")
    pairs = [(answer([1, 2, 4], 1e-4), answer([1, 2, 3], 1e-4))] * 2
    assert not compare_tokens(args, [[0]] * 2, *map(list, zip(*pairs)))
