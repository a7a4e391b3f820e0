"""The optimizer and the learning rate, which is a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from .settings import require


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (paper, Table 4). clip: the largest gradient norm."""

    lr: float = 6e-4
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: float = 1.0

    def __post_init__(self) -> None:
        require(self.lr > 0, "lr", f"must be positive, got {self.lr}")
        require(self.clip > 0, "clip", f"must be positive, got {self.clip}")
        require(self.eps > 0, "eps", f"must be positive, got {self.eps}")
        require(self.weight_decay >= 0, "weight_decay", f"must not be negative, got {self.weight_decay}")
        for name in ("beta1", "beta2"):
            require(0 <= getattr(self, name) < 1, name, f"must lie in [0, 1), got {getattr(self, name)}")


@dataclass(frozen=True)
class ScheduleConfig:
    """Linear warmup over `warmup` of the steps, then a linear or cosine decay to `floor` of the peak."""

    kind: Literal["linear", "cosine"] = "linear"
    warmup: float = 0.04
    floor: float = 0.0

    def __post_init__(self) -> None:
        require(0 <= self.warmup < 1, "warmup", f"is a share of the steps in [0, 1), got {self.warmup}")
        require(0 <= self.floor <= 1, "floor", f"is a share of the learning rate in [0, 1], got {self.floor}")


class GuardedAdamW(torch.optim.AdamW):
    """AdamW that leaves out a step whose gradient is not finite, and says so in `overflow`."""

    overflow = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.overflow = not all(bool(gradient.isfinite().all()) for gradient in gradients)
        return None if self.overflow else super().step(closure)


def build_optimizer(parameters: Iterable[nn.Parameter], config: OptimizerConfig, deepspeed: dict[str, Any]) -> torch.optim.AdamW:
    """Return AdamW over `parameters`; DeepSpeed, whose settings are given, puts the fp32 master weights in their place.

    Without ZeRO and in fp32 DeepSpeed adds nothing around the optimizer, which then has to look at gradients itself.
    """
    bare = deepspeed.get("zero_optimization", {}).get("stage", 0) == 0 and "bf16" not in deepspeed
    kind = GuardedAdamW if bare else torch.optim.AdamW
    # Fused: one pass over a parameter. The other forms write whole temporaries, which on a CPU cost more than a small drafter's
    # forward pass.
    return kind(
        parameters,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


def learning_rate(step: int, max_steps: int, peak: float, config: ScheduleConfig) -> float:
    """Return the learning rate of optimizer step `step`, counted from 0."""
    warmup = math.ceil(config.warmup * max_steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(max_steps - warmup, 1)
    share = 1 - progress if config.kind == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return peak * (config.floor + (1 - config.floor) * share)
