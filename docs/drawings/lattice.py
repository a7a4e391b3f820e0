"""Draws the lattice and the walk of docs/method.md: `python docs/drawings/lattice.py` writes lattice.svg beside itself.

Tokens and numbers are invented to show the idea. Colours follow the reader's light or dark setting, and the drawing has a
ground of its own, so that it is legible where the page around it does not follow.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

ANCHOR = "hard"
CANDIDATES = [
    [("so", 0.41), ("in", 0.38), ("to", 0.09)],
    [("order", 0.40), ("as", 0.37), ("that", 0.12)],
    [("to", 0.71), ("they", 0.14), ("the", 0.05)],
    [("win", 0.52), ("get", 0.17), ("could", 0.09)],
]
# START[k]: score of the anchor with candidate k of slot 1; PAIR[s][j][k]: of candidate j of slot s+1 with k of slot s+2.
START = [5.6, 5.1, 3.2]
PAIR = [
    [[0.9, 6.8, 4.7], [7.1, -2.4, -3.0], [-3.6, -4.1, -1.2]],
    [[6.9, -4.4, 0.3], [7.4, -5.0, 1.2], [-2.8, 6.2, 4.1]],
    [[6.3, 5.4, -5.8], [1.1, -0.4, 6.6], [2.0, -6.1, -4.9]],
]
TARGET = ["so", "as", "to", "win"]

WIDTH, HEIGHT = 980, 528
LEFT, STEP, TOP, ROW = 92, 198, 132, 82
NODE_WIDTH, NODE_HEIGHT = 116, 52

STYLE = """
  .ground { fill: #ffffff; stroke: #d0d7de; }
  text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; fill: #1f2328; }
  .head { font-size: 15px; font-weight: 600; }
  .token { font-size: 17px; }
  .small { font-size: 13px; fill: #57606a; }
  .node { fill: #f6f8fa; stroke: #8c959f; stroke-width: 1.2; }
  .walked { fill: #ddf4ff; stroke: #0969da; stroke-width: 2.4; }
  .edge { stroke: #6e7781; fill: none; }
  .walk { stroke: #0969da; stroke-width: 4; fill: none; }
  .argmax { stroke: #bc4c00; stroke-width: 2.6; fill: none; stroke-dasharray: 7 5; }
  .score { font-size: 13px; font-weight: 600; paint-order: stroke; stroke: #ffffff; stroke-width: 5px; stroke-linejoin: round; }
  .blue { fill: #0550ae; } .orange { fill: #953800; }
  .no { fill: #fff1e5; stroke: #bc4c00; stroke-width: 2; }
  .unseen { fill: none; stroke: #8c959f; stroke-dasharray: 4 4; }
  @media (prefers-color-scheme: dark) {
    .ground { fill: #161b22; stroke: #3d444d; }
    text { fill: #e6edf3; }
    .small { fill: #9da7b3; }
    .node { fill: #21262d; stroke: #6e7681; }
    .walked { fill: #0c2d4d; stroke: #58a6ff; }
    .edge { stroke: #8b949e; }
    .walk { stroke: #58a6ff; }
    .argmax { stroke: #f0883e; }
    .score { stroke: #161b22; }
    .blue { fill: #79c0ff; } .orange { fill: #ffa657; }
    .no { fill: #3d2210; stroke: #f0883e; }
    .unseen { stroke: #6e7681; }
  }
"""


def walk() -> list[int]:
    """Return the candidate that each slot commits: the best partner of the one before it, from left to right."""
    path = [max(range(len(START)), key=START.__getitem__)]
    for scores in PAIR:
        row = scores[path[-1]]
        path.append(max(range(len(row)), key=row.__getitem__))
    return path


def accepted(path: list[int]) -> int:
    """Return how many leading tokens of a path are the target's own."""
    count = 0
    for slot, candidate in enumerate(path):
        if CANDIDATES[slot][candidate][0] != TARGET[slot]:
            break
        count += 1
    return count


def centre(slot: int, candidate: int) -> tuple[float, float]:
    """Return where a candidate's node lies; slot -1 is the anchor."""
    return LEFT + STEP * (slot + 1), TOP + ROW * candidate


def text(x: float, y: float, content: str, kind: str, anchor: str = "middle") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(content)}</text>'


def node(x: float, y: float, token: str, note: str, kind: str) -> str:
    box = (
        f'<rect x="{x - NODE_WIDTH / 2:g}" y="{y - NODE_HEIGHT / 2:g}" width="{NODE_WIDTH}" height="{NODE_HEIGHT}" rx="9" '
        f'class="{kind}"/>'
    )
    return box + text(x, y + (-2 if note else 6), token, "token") + (text(x, y + 17, note, "small") if note else "")


def edge(slot: int, first: int, second: int, kind: str, extra: str = "") -> str:
    """Return the line from candidate `first` of `slot` to candidate `second` of the next slot."""
    (x1, y1), (x2, y2) = centre(slot, first), centre(slot + 1, second)
    return f'<path d="M{x1 + NODE_WIDTH / 2:g},{y1:g} L{x2 - NODE_WIDTH / 2:g},{y2:g}" class="{kind}"{extra}/>'


def score_of(slot: int, first: int, second: int) -> float:
    return START[second] if slot < 0 else PAIR[slot][first][second]


def score_label(slot: int, first: int, second: int, kind: str, along: float = 0.5) -> str:
    (x1, y1), (x2, y2) = centre(slot, first), centre(slot + 1, second)
    x1, x2 = x1 + NODE_WIDTH / 2, x2 - NODE_WIDTH / 2
    return text(x1 + along * (x2 - x1), y1 + along * (y2 - y1) + 4.5, f"{score_of(slot, first, second):.1f}", f"score {kind}")


def outcome(y: float, method: str, rule: str, path: list[int]) -> list[str]:
    """Return a row that shows what the target makes of a drafted path."""
    good = accepted(path)
    left = LEFT - NODE_WIDTH / 2
    parts = [
        text(left, y - 12, method, "head", "start"),
        text(left, y + 6, rule, "small", "start"),
        text(left, y + 24, f"{good} of {len(path)} accepted", "small", "start"),
    ]
    for slot, candidate in enumerate(path):
        x = centre(slot, 0)[0]
        kind = "walked" if slot < good else "no" if slot == good else "unseen"
        mark = "accepted" if slot < good else "rejected" if slot == good else "discarded"
        parts.append(node(x, y, CANDIDATES[slot][candidate][0], mark, kind))
    return parts


def draw() -> str:
    """Return the drawing as SVG text."""
    slots, topk = len(CANDIDATES), len(CANDIDATES[0])
    argmax, chosen = [0] * slots, walk()
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="title desc">',
        '<title id="title">The candidate lattice and the greedy walk</title>',
        f'<desc id="desc">Four slots with three candidates each. The best token of every slot reads '
        f'"{" ".join(CANDIDATES[s][k][0] for s, k in enumerate(argmax))}", of which the target accepts {accepted(argmax)}; '
        f'the walk along the pair scores reads "{" ".join(CANDIDATES[s][k][0] for s, k in enumerate(chosen))}", of which it '
        f"accepts {accepted(chosen)}.</desc>",
        f"<style>{STYLE}</style>",
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="14" class="ground"/>',
        text(LEFT, 40, "anchor", "head"),
        text(LEFT, 60, "last committed token", "small"),
    ]
    for slot in range(slots):
        parts.append(text(centre(slot, 0)[0], 40, f"slot {slot + 1}", "head"))
        parts.append(text(centre(slot, 0)[0], 60, f"top {topk} of the vocabulary", "small"))
    for slot in range(-1, slots - 1):
        for first in range(1 if slot < 0 else topk):
            for second in range(topk):
                strength = (score_of(slot, first, second) + 8) / 16
                looks = f' stroke-width="{0.6 + 2.2 * strength:.2f}" opacity="{0.10 + 0.55 * strength**2:.2f}"'
                parts.append(edge(slot, first, second, "edge", looks))
    before = [0, *chosen]
    for slot in range(-1, slots - 1):
        if slot >= 0:
            parts.append(edge(slot, argmax[slot], argmax[slot + 1], "argmax"))
        parts.append(edge(slot, before[slot + 1], chosen[slot + 1], "walk"))
    for slot in range(-1, slots - 1):
        parts.append(score_label(slot, before[slot + 1], chosen[slot + 1], "blue", 0.5))
    parts.append(score_label(0, argmax[0], argmax[1], "orange", 0.5))
    parts.append(node(*centre(-1, 0), ANCHOR, "", "walked"))
    for slot, candidates in enumerate(CANDIDATES):
        for candidate, (token, probability) in enumerate(candidates):
            kind = "walked" if chosen[slot] == candidate else "node"
            parts.append(node(*centre(slot, candidate), token, f"p = {probability:.2f}", kind))
    y = TOP + ROW * topk + 24
    parts.append(f'<path d="M24,{y - 46} H{WIDTH - 24}" class="edge" opacity="0.35"/>')
    parts += outcome(y, "DFlash alone", "best of each slot (dashed)", argmax)
    parts += outcome(y + 78, "LiLiCorr", "the walk (solid)", chosen)
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw(), encoding="utf-8")
