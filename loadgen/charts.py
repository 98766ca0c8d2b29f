"""Plots as SVG: lines, points and stacked bars. No outside assets, no scripts; hovering shows an
element's title. ``plot`` and ``stacked`` give a figure for an HTML page, whose style sheet colours
it; ``lines`` and ``bars`` give a ``Figure``, which is also a file of its own (``svg``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from msgspec import Struct

Points = Sequence[tuple[float, float]]
WIDTH, HEIGHT = 560, 260
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 12, 40
COLOURS = ("#2a6fb0", "#d1702a", "#3a8f5c", "#a8447c", "#7a6bc4", "#8a7a2e", "#5f6b76")
MAX_POINTS = 2000
STANDALONE = (
    "text{font:11px system-ui,sans-serif;fill:#4a535c}.title{font-size:13px;font-weight:600;"
    "fill:#1c2126}.grid{stroke:#d9dee3;stroke-width:.7}"
)


class Series(Struct, frozen=True):
    name: str
    points: Points
    is_dots: bool = False


class Figure(Struct, frozen=True):
    """A plot's inside and what stands around it."""

    title: str
    body: str
    names: Sequence[str]
    x_label: str
    y_label: str

    def html(self) -> str:
        """For a page that has a style sheet."""
        legend = "".join(
            f'<span><i style="background:{COLOURS[i % len(COLOURS)]}"></i>{escape(name)}</span>'
            for i, name in enumerate(self.names)
        )
        return (
            f"<figure><figcaption>{escape(self.title)}</figcaption>"
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(self.title)}">'
            f'{self._inside()}</svg><div class="legend">{legend}</div></figure>'
        )

    def svg(self) -> str:
        """A file of its own, with title and legend; the legend breaks into rows."""
        rows: list[list[tuple[float, int, str]]] = [[]]
        x = float(LEFT)
        for i, name in enumerate(self.names):
            width = 22 + 6.3 * len(name)
            if x + width > WIDTH and rows[-1]:
                rows.append([])
                x = float(LEFT)
            rows[-1].append((x, i, name))
            x += width
        legend = "".join(
            f'<rect x="{x:.0f}" y="{y}" width="10" height="10" rx="2" '
            f'fill="{COLOURS[i % len(COLOURS)]}"/>'
            f'<text x="{x + 14:.0f}" y="{y + 9}">{escape(name)}</text>'
            for y, row in ((HEIGHT + 30 + 16 * n, row) for n, row in enumerate(rows))
            for x, i, name in row
        )
        height = HEIGHT + 34 + 16 * len(rows)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'width="{WIDTH}" height="{height}" role="img"><title>{escape(self.title)}</title>'
            f'<rect width="100%" height="100%" fill="#fff"/><style>{STANDALONE}</style>'
            f'<text x="{LEFT}" y="16" class="title">{escape(self.title)}</text>'
            f'<g transform="translate(0 22)">{self._inside()}</g>{legend}</svg>\n'
        )

    def _inside(self) -> str:
        middle = (TOP + HEIGHT - BOTTOM) / 2
        return (
            f"{self.body}"
            f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">'
            f"{escape(self.x_label)}</text>"
            f'<text transform="translate(12 {middle}) rotate(-90)" text-anchor="middle">'
            f"{escape(self.y_label)}</text>"
        )


def ticks(low: float, high: float, num: int = 5) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten) that cover [low, high]."""
    if high <= low:
        high = low + 1
    raw = (high - low) / num
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten in [low, high], with 2 and 5 between where there are few."""
    found = [
        m * 10.0**e
        for e in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for m in (1, 2, 5)
        if low <= m * 10.0**e <= high
    ]
    if len(found) > 8:
        found = [f for f in found if abs(math.log10(f) - round(math.log10(f))) < 1e-9]
    return found or [low]


def label(value: float) -> str:
    """A tick's text."""
    if value and abs(value) < 0.01:
        return f"{value:.0e}"
    return f"{value:,.6g}"


def thin(points: Points, most: int = MAX_POINTS) -> Points:
    """At most ``most`` points, the last one kept."""
    if len(points) <= most:
        return points
    step = len(points) / most
    return [*(points[int(i * step)] for i in range(most - 1)), points[-1]]


def cdf(name: str, values: Sequence[float]) -> Series:
    """The share of values at or below x."""
    ordered = sorted(values)
    return Series(name, [(v, (i + 1) / len(ordered)) for i, v in enumerate(ordered)])


def plot(
    title: str, series: Sequence[Series], x_label: str, y_label: str, *, log_x: bool = False
) -> str:
    """``lines`` for a page; an empty string if there is nothing to show."""
    found = lines(title, series, x_label, y_label, log_x=log_x)
    return found.html() if found else ""


def lines(
    title: str, series: Sequence[Series], x_label: str, y_label: str, *, log_x: bool = False
) -> Figure | None:
    """Axes, lines or dots, and a legend; None if there is nothing to show."""
    shown = [Series(s.name, thin(s.points), s.is_dots) for s in series if s.points]
    if log_x:
        shown = [Series(s.name, [p for p in s.points if p[0] > 0], s.is_dots) for s in shown]
        shown = [s for s in shown if s.points]
    if not shown:
        return None
    xs = [x for s in shown for x, _ in s.points]
    ys = [y for s in shown for _, y in s.points]
    low, high = min(xs), max(xs)
    if not log_x:
        low = min(low, 0.0)
    if high <= low:
        high = low * 1.1 + (0 if log_x else 1e-9) if low > 0 else low + 1
    top = max(max(ys) * 1.05, 1e-9)

    def x_at(x: float) -> float:
        share = math.log(x / low) / math.log(high / low) if log_x else (x - low) / (high - low)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y_at(y: float) -> float:
        return HEIGHT - BOTTOM - y / top * (HEIGHT - TOP - BOTTOM)

    out = []
    for value in log_ticks(low, high) if log_x else ticks(low, high):
        x = x_at(value)
        out.append(
            f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
            f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 14}" text-anchor="middle">'
            f"{label(value)}</text>"
        )
    out.append(_y_axis(top, y_at))
    for number, one in enumerate(shown):
        colour = COLOURS[number % len(COLOURS)]
        if one.is_dots:
            out += [
                f'<circle cx="{x_at(x):.1f}" cy="{y_at(y):.1f}" r="2.2" fill="{colour}" '
                'fill-opacity=".55"/>'
                for x, y in one.points
            ]
        else:
            path = " ".join(f"{x_at(x):.1f},{y_at(y):.1f}" for x, y in one.points)
            out.append(
                f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>'
            )
    return Figure(title, "".join(out), [s.name for s in shown], x_label, y_label)


def stacked(
    title: str, parts: Sequence[str], values: Sequence[tuple[str, Sequence[float]]], y_label: str
) -> str:
    """``bars`` for a page; an empty string if there is nothing to show."""
    found = bars(title, parts, values, y_label)
    return found.html() if found else ""


def bars(
    title: str, parts: Sequence[str], values: Sequence[tuple[str, Sequence[float]]], y_label: str
) -> Figure | None:
    """Stacked bars: ``values`` is (name, a value for each of ``parts``)."""
    if not values:
        return None
    top = max(max(math.fsum(one) for _, one in values) * 1.05, 1e-9)

    def y_at(y: float) -> float:
        return HEIGHT - BOTTOM - y / top * (HEIGHT - TOP - BOTTOM)

    out = [_y_axis(top, y_at)]
    pitch = (WIDTH - LEFT - RIGHT) / len(values)
    for place, (name, one) in enumerate(values):
        x = LEFT + pitch * (place + 0.5)
        width = min(pitch * 0.7, 64)
        sum_ = 0.0
        for number, (part, value) in enumerate(zip(parts, one, strict=True)):
            colour = COLOURS[number % len(COLOURS)]
            y, height = y_at(sum_ + value), y_at(sum_) - y_at(sum_ + value)
            out.append(
                f'<rect x="{x - width / 2:.1f}" y="{y:.1f}" width="{width:.1f}" '
                f'height="{max(height, 0):.1f}" fill="{colour}">'
                f"<title>{escape(f'{name}, {part}: {value:,.4g}')}</title></rect>"
            )
            sum_ += value
        out.append(
            f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 14}" text-anchor="middle">'
            f"{escape(name)}</text>"
        )
    return Figure(title, "".join(out), list(parts) if len(parts) > 1 else [], "", y_label)


def _y_axis(top: float, y_at: Callable[[float], float]) -> str:
    return "".join(
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y_at(v):.1f}" '
        f'y2="{y_at(v):.1f}"/><text x="{LEFT - 5}" y="{y_at(v) + 3.5:.1f}" text-anchor="end">'
        f"{label(v)}</text>"
        for v in ticks(0, top)
    )
