"""Draws training logs as one SVG: `python -P -m decant.engine.demo.curves OUT.svg LOG.jsonl ...`.

Upper panel: the losses per step (logarithmic). Lower panel: held-out scores of some skills. Pieces
follow one another; a line stands between them.
"""

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

WIDTH, LEFT, RIGHT = 760, 46, 650
UPPER, LOWER = (24, 214), (262, 432)
HEIGHT = 466
COLORS = ("#1b6ca8", "#d1495b", "#2e933c", "#edae49", "#7a4fa3", "#444444")
SKILLS = ("add", "sub", "sort", "recall@2000", "tools-two", "no-tool")
LOSSES = ("trunk", "draft 1", "draft 2")
LEAST, MOST = 0.1, 3.0
SMOOTH = 5

Point = tuple[float, float]


def read(files: list[Path]) -> tuple[list[dict[str, Any]], list[int]]:
    """All rows with a step, steps counted through, and the last step of each piece."""
    rows: list[dict[str, Any]] = []
    ends: list[int] = []
    for f in files:
        start = ends[-1] if ends else 0
        for line in f.read_text().splitlines():
            row = json.loads(line)
            if "step" in row:
                rows.append({**row, "at": start + row["step"]})
        if rows:
            ends.append(rows[-1]["at"])
    return rows, ends


def smooth(points: list[Point]) -> list[Point]:
    """Geometric mean over SMOOTH points."""
    out = []
    for i, (x, _) in enumerate(points):
        near = [y for _, y in points[max(0, i - SMOOTH // 2) : i + SMOOTH // 2 + 1]]
        out.append((x, math.exp(sum(map(math.log, near)) / len(near))))
    return out


def text(x: float, y: float, words: str, anchor: str = "start", color: str = "#222") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" fill="{color}">{words}</text>'


def rule(x1: float, y1: float, x2: float, y2: float, color: str = "#ddd") -> str:
    return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="{color}"/>'


def curve(points: list[Point], x: Callable[[float], float], y: Callable[[float], float]) -> str:
    return " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in points)


def draw(files: list[Path]) -> str:
    """The SVG. Raises ValueError if the logs hold no step."""
    rows, ends = read(files)
    if not rows:
        raise ValueError("no steps in these logs")
    last = ends[-1]

    def x(step: float) -> float:
        return LEFT + (RIGHT - LEFT) * step / last

    def y_loss(v: float) -> float:
        share = math.log(min(max(v, LEAST), MOST) / LEAST) / math.log(MOST / LEAST)
        return UPPER[1] - (UPPER[1] - UPPER[0]) * share

    def y_score(v: float) -> float:
        return LOWER[1] - (LOWER[1] - LOWER[0]) * v

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        text(LEFT, UPPER[0] - 10, "loss per weighted token"),
        text(LEFT, LOWER[0] - 10, "answers right, held-out prompts"),
    ]
    for v in (0.1, 0.2, 0.5, 1.0, 2.0):
        out.append(rule(LEFT, y_loss(v), RIGHT, y_loss(v)))
        out.append(text(LEFT - 6, y_loss(v) + 4, f"{v}", "end"))
    for v in (0.0, 0.25, 0.5, 0.75, 1.0):
        out += [rule(LEFT, y_score(v), RIGHT, y_score(v))]
        out.append(text(LEFT - 6, y_score(v) + 4, f"{v:.0%}", "end"))
    for end in ends[:-1]:
        out += [rule(x(end), span[0], x(end), span[1], "#888") for span in (UPPER, LOWER)]
    for i, end in enumerate(ends):
        out.append(text(x(end), HEIGHT - 16, f"piece {i + 1} ends: step {end:,}", "end"))
    losses = [r for r in rows if "loss" in r]
    for k, name in enumerate(LOSSES):
        values = [(r["at"], r["loss"] if k == 0 else r["mtp"][k - 1]) for r in losses]
        color = COLORS[k]
        line = curve(smooth(values), x, y_loss)
        out.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.4"/>')
        out.append(text(RIGHT + 10, UPPER[0] + 16 * (k + 1), name, color=color))
    for k, name in enumerate(SKILLS):
        scores = [(r["at"], r["acc"][name]) for r in rows if name in r.get("acc", {})]
        color = COLORS[k]
        line = curve([(0.0, 0.0), *scores], x, y_score)
        out.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.4"/>')
        for a, b in scores:
            out.append(f'<circle cx="{x(a):.1f}" cy="{y_score(b):.1f}" r="2" fill="{color}"/>')
        out.append(text(RIGHT + 10, LOWER[0] + 16 * (k + 1), name, color=color))
    return "\n".join([*out, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="draw training logs")
    parser.add_argument("out", type=Path)
    parser.add_argument("logs", type=Path, nargs="+")
    args = parser.parse_args()
    args.out.write_text(draw(args.logs))


if __name__ == "__main__":
    main()
