"""Entry point that vLLM loads in each of its processes (group `vllm.general_plugins`)."""

from __future__ import annotations


def register() -> None:
    """Return nothing; leaves vLLM as it is."""
