"""When two runs of the same arithmetic count as equal: the near-tie rule.

Floating-point results depend on batch shape, in fp32 too, so two right programs may choose differently where a choice was
all but a draw. Every comparison of tokens or drafts in this project goes through here: sequences must be equal, or their
first difference must stand where the reference's own deciding margin was below `THRESHOLD`. After such a difference the two
contexts differ, so the rest of that sequence says nothing and is not compared. Near-ties are counted, and more than one in
`TOKENS_PER_NEAR_TIE` tokens fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

THRESHOLD = 1e-3
TOKENS_PER_NEAR_TIE = 1000


@dataclass
class Comparison:
    """The tally of one comparison; `check()` raises when it fails."""

    compared: int = 0
    near_ties: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)

    def add(self, name: str, reference: Sequence[int], other: Sequence[int], margins: Sequence[float]) -> bool:
        """Compare one sequence; True when equal.

        margins[i] is the reference's margin in deciding its token i: target top-2 logits for a decoded token; walk margin or
        adjacent candidate log-probability gap, whichever is smallest, for a block's drafts.
        """
        if len(margins) < len(reference):
            raise ValueError(f"{name}: {len(reference)} tokens need as many margins, got {len(margins)}")
        for i, (ours, theirs) in enumerate(zip(reference, other)):
            self.compared += 1
            if ours != theirs:
                where = f"{name}, token {i}: {ours} and {theirs} (reference's margin {margins[i]:.2e})"
                (self.near_ties if margins[i] < THRESHOLD else self.differences).append(where)
                return False
        if len(reference) != len(other):
            self.differences.append(f"{name}: lengths {len(reference)} and {len(other)}")
            return False
        return True

    def summary(self) -> str:
        return f"{self.compared} tokens compared, {len(self.near_ties)} near-ties, {len(self.differences)} differences"

    def check(self) -> None:
        """Raise AssertionError on any difference that is no near-tie, or on too many near-ties; print the tally."""
        print(self.summary())
        if self.compared == 0:
            raise AssertionError("nothing was compared")
        if self.differences:
            raise AssertionError("; ".join([self.summary(), *self.differences[:5]]))
        # One near-tie alone is no rate; a short comparison may hold it.
        if len(self.near_ties) > max(1, self.compared / TOKENS_PER_NEAR_TIE):
            raise AssertionError(
                "; ".join([f"more near-ties than 1 in {TOKENS_PER_NEAR_TIE} tokens: {self.summary()}", *self.near_ties[:5]])
            )
