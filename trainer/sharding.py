"""`--shard i/n` of the commands that scale out over independent processes."""

from __future__ import annotations

import re

from vllm_lilicorr.errors import UserError


def parse_shard(text: str) -> tuple[int, int]:
    """Return (i, n) of "i/n" with 0 <= i < n; raises UserError otherwise."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise UserError(f"--shard: '{text}' must be i/n with i from 0 to n-1, such as 0/4")
    return int(match[1]), int(match[2])
