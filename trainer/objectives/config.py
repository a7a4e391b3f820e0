"""The numbers of every objective, so that one file describes all arms of a comparison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..settings import require


@dataclass(frozen=True)
class DFlash2Loss:
    """selector: weight of the selector's cross-entropy beside L_DFlash."""

    selector: float = 1.0

    def __post_init__(self) -> None:
        require(self.selector >= 0, "selector", f"must not be negative, got {self.selector}")


@dataclass(frozen=True)
class DSparkLoss:
    """ce, l1, confidence: weights of the three terms; beta: the decay of their slot weights."""

    ce: float = 0.1
    l1: float = 0.9
    confidence: float = 1.0
    beta: float = 4.0

    def __post_init__(self) -> None:
        require(self.beta > 0, "beta", f"must be positive, got {self.beta}")
        for name in ("ce", "l1", "confidence"):
            require(getattr(self, name) >= 0, name, f"must not be negative, got {getattr(self, name)}")


@dataclass(frozen=True)
class DominoLoss:
    """base: the first step's weight w of the base logits' loss; the corrected logits' is 1 - w. base_until: the share of
    the steps after which w has fallen linearly to 0, or null to keep it."""

    base: float = 1.0
    base_until: float | None = 0.5

    def __post_init__(self) -> None:
        require(0 <= self.base <= 1, "base", f"must lie in [0, 1], got {self.base}")
        until = self.base_until
        require(until is None or 0 < until <= 1, "base_until", f"must lie in (0, 1], or null to keep the weight; got {until}")
        require(until is not None or self.base < 1, "base_until", "null with base 1 would never train the head; lower base")


@dataclass(frozen=True)
class ObjectiveConfig:
    """gamma, lambd, beta: the paper's weights of the head's loss, of the penalty, and the decay of L_DFlash's slot weights.

    loss: `own`, what the head's authors train it with; `common`, L_DFlash on what the head drafts from (dspark, domino).
    dflash_normalize: divide every slot-weighted loss by its sum of weights (else by the number of blocks).
    Sizes for training on a CPU, both off by default and never used in evaluation: train_vocab, normalise over the
    corpus' own tokens plus this many random others, which stand for the rest; head_anchors, compute the head's loss on
    this many anchors of each conversation. dflash2, dspark, domino: what only these objectives have.
    """

    gamma: float = 0.25
    lambd: float = 1.0
    beta: float = 7.0
    loss: Literal["own", "common"] = "own"
    dflash_normalize: bool = True
    train_vocab: int | None = None
    head_anchors: int | None = None
    dflash2: DFlash2Loss = DFlash2Loss()
    dspark: DSparkLoss = DSparkLoss()
    domino: DominoLoss = DominoLoss()

    def __post_init__(self) -> None:
        require(self.beta > 0, "beta", f"must be positive, got {self.beta}")
        require(self.gamma >= 0 and self.lambd >= 0, "gamma", "and lambd must not be negative")
        for name in ("train_vocab", "head_anchors"):
            value = getattr(self, name)
            require(value is None or value > 0, name, f"must be positive, or null to switch it off; got {value}")
