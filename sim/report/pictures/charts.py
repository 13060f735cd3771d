"""Figures over steps, and bars."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from ..measures.measure import MeasuredStep
from ..words import figure, plain, seconds, size, start
from .palette import SERIES
from .picture import Anchor, Dot, Label, Line, Picture, Rect, width_of

__all__ = ["Series", "bars", "curves", "legend", "step_lines", "ticks", "time_axis"]

_ROOM = 3
"""Between a number and the edge: fonts are wider here and narrower there."""

# Ticks at round numbers.


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten from `low` to `high`, at most so many."""
    if not high > low:
        return [low]
    raw = (high - low) / max(1, most - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next((m * power for m in (1, 2, 5, 10) if m * power >= raw * (1 - 1e-9)), 10 * power)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def time_axis(
    picture: Picture,
    at: Callable[[float], float],
    start_s: float,
    end_s: float,
    y: float,
    *,
    top: float,
    most: int = 8,
) -> None:
    """Times below `y`, with lines up to `top`. One unit for all, that of the last one."""
    marks = ticks(start_s, end_s, most)
    for t in marks:
        picture.add(Line(((at(t), top), (at(t), y)), "grid"))
    for t, text in zip(marks, alike(marks), strict=True):
        edge = at(t) + width_of(text, 11) / 2 > picture.width - _ROOM
        anchor: Anchor = "end" if edge else "middle"
        picture.add(Label(at(t), y + 14, text, 11, "faint", anchor))


def step_lines(
    picture: Picture,
    at: Callable[[float], float],
    steps: Sequence[MeasuredStep],
    *,
    top: float,
    bottom: float,
) -> None:
    """A line where each step begins, with its number above."""
    for step in steps:
        x = at(step.start_s)
        picture.add(
            Line(((x, top - 4), (x, bottom)), "faint", 1, 0.6, True),
            Label(x + 3, top - 7, f"step {step.number}", 11, "faint"),
        )


def legend(picture: Picture, kinds: Iterable[str], x: float) -> float:
    """A square with its word for each of the kinds, from `x` on, and for waiting; where the next
    would stand."""
    for kind in (*kinds, "wait"):
        outline = "grid" if kind == "wait" else ""
        picture.add(Rect(x, 8, 12, 12, kind, outline=outline), Label(x + 17, 18, kind, 12))
        x += 34 + width_of(kind, 12)
    return x


def alike(values: Sequence[float]) -> list[str]:
    """Times of an axis as text, distinct ones as far as their distance needs it."""
    texts = [seconds(v) for v in values]
    if len(set(texts)) == len(texts):
        return texts
    step = min(abs(b - a) for a, b in pairwise(values))
    digits = max(0, -math.floor(math.log10(step) + 1e-6))
    return [f"{v:.{digits}f} s" for v in values]


def value_axis(
    picture: Picture,
    at: Callable[[float], float],
    low: float,
    high: float,
    *,
    left: float,
    right: float,
    text: Callable[[float], str] = figure,
) -> None:
    """Values at the left of `left`, with lines to `right`."""
    for value in ticks(low, high, 5):
        picture.add(Line(((left, at(value)), (right, at(value))), "grid"))
        picture.add(Label(left - 6, at(value) + 4, text(value), 11, "faint", "end"))


WIDTH, HEIGHT = 560, 250


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line of a chart. `points`: (step, value); values that are not finite are left out."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str
    dots: bool = False
    faint: bool = False


def curves(
    about: str,
    series: Sequence[Series],
    *,
    marks: Sequence[float] = (),
    marked: str = "recover",
    unit: str = "step",
    from_zero: bool = False,
    text: Callable[[float], str] = figure,
    across_text: Callable[[float], str] | None = None,
    legend: bool = True,
) -> Picture:
    """Lines over steps, or over what `unit` says. `marks`: where something happened, drawn in the
    colour `marked`. `across_text`: how a place at the axis is said; None: they are whole
    numbers."""
    picture = Picture(WIDTH, HEIGHT, about)
    kept = [
        (s, [(x, y) for x, y in s.points if math.isfinite(x) and math.isfinite(y)]) for s in series
    ]
    xs = [x for _, points in kept for x, _ in points] or [0.0]
    ys = [y for _, points in kept for _, y in points] or [0.0]
    low, high = (0.0 if from_zero else min(ys)), max(ys)
    if from_zero:  # one that stands out must not make all others flat; it is drawn at the edge
        high = min(high, 3 * median(ys))
    if high <= low:
        low, high = low - 0.5, high + 0.5
    margin = 0.06 * (high - low)
    low, high = (low if from_zero else low - margin), high + margin
    first, last = min(xs), max(xs)
    if across_text is not None:
        first = min(0.0, first)
    if across_text is None or last <= first:
        last = max(last, first + 1)
    left = 16 + max(width_of(text(t), 11) for t in ticks(low, high, 5))
    right, top, bottom = WIDTH - 12, 34, HEIGHT - 34

    def across(x: float) -> float:
        return left + (x - first) / (last - first) * (right - left)

    def up(y: float) -> float:
        return bottom - (min(y, high) - low) / (high - low) * (bottom - top)

    value_axis(picture, up, low, high, left=left, right=right, text=text)
    for x in ticks(first, last, 8):
        if across_text is not None or x == int(x):
            said = f"{x:.0f}" if across_text is None else across_text(x)
            ends = across(x) + width_of(said, 11) / 2
            anchor: Anchor = "end" if ends > WIDTH - _ROOM else "middle"
            picture.add(Label(across(x), bottom + 16, said, 11, "faint", anchor))
    picture.add(Label(right, HEIGHT - 4, unit, 11, "faint", "end"))
    for x in marks[:100]:
        picture.add(Line(((across(x), top), (across(x), bottom)), marked, 1, 0.7, True))
    at = left
    for s, points in kept:
        if legend:
            picture.add(Rect(at, 12, 12, 4, s.colour), Label(at + 18, 18, s.name, 12))
            at += 40 + width_of(s.name, 12)
        drawn = [(across(x), up(y)) for x, y in _thinned(points)]
        if len(drawn) > 1:
            picture.add(Line(drawn, s.colour, 1.2 if s.faint else 2, 0.45 if s.faint else 1))
        if s.dots or len(drawn) == 1:
            for (x, y), (step, value) in zip(drawn, _thinned(points), strict=True):
                where = f"{step:.0f}" if across_text is None else across_text(step)
                hint = f"{s.name} {text(value)} at {unit} {where}"
                picture.add(Dot(x, y, 3.5, s.colour, hint))
    return picture


def _thinned(points: Sequence[tuple[float, float]], most: int = 600) -> list[tuple[float, float]]:
    """At most about so many: the lowest and the highest of each piece stay."""
    if len(points) <= most:
        return list(points)
    found = []
    piece = -(-2 * len(points) // most)
    for i in range(0, len(points), piece):
        part = points[i : i + piece]
        ends = {min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}
        found += sorted(ends)
    return found


def smooth(values: Sequence[float]) -> list[float]:
    """The mean of a tenth of the values around each, where they are finite."""
    half = max(1, len(values) // 20)
    found = []
    for i in range(len(values)):
        part = [v for v in values[max(0, i - half) : i + half + 1] if math.isfinite(v)]
        found.append(sum(part) / len(part) if part else math.nan)
    return found


@dataclass(frozen=True, kw_only=True)
class BarRow:
    """One row of bars. `limit`: drawn as an outline; 0: none. `parts`: (name, value)."""

    name: str
    parts: Sequence[tuple[str, float]]
    limit: float = 0.0
    text: str = ""
    marked: bool = False


def bars(
    about: str,
    rows: Sequence[BarRow],
    colours: Mapping[str, str] | None = None,
    *,
    most: int = 24,
    limit: str = "limit",
) -> Picture:
    """Rows of bars, with sizes in bytes; at most so many rows, those behind them counted. `limit`:
    what the outlines are."""
    shown = rows[:most]
    height = 26 if len(shown) <= 12 else 17
    names = list(dict.fromkeys(n for r in rows for n, _ in r.parts))
    colour = dict(zip(names, SERIES, strict=False)) | dict(colours or {})
    left = 16 + max((width_of(start(plain(r.name), 32), 12, bold=True) for r in shown), default=40)
    room = 16 + max((width_of(r.text, 11) for r in shown), default=0)
    top = 34
    more = len(rows) - len(shown)
    picture = Picture(WIDTH, top + height * len(shown) + 10 + 20 * (more > 0), about)
    x = left
    for name in names:
        picture.add(Rect(x, 10, 12, 12, colour.get(name, "build")), Label(x + 17, 20, name, 12))
        x += 36 + width_of(name, 12)
    if any(r.limit for r in rows):
        picture.add(Rect(x, 10, 12, 12, "paper", outline="faint"), Label(x + 17, 20, limit, 12))
    most_value = max((max(sum(v for _, v in r.parts), r.limit) for r in rows), default=1.0) or 1.0
    scale = (WIDTH - left - room) / most_value
    for i, row in enumerate(shown):
        y = top + i * height
        ink = "accent" if row.marked else "ink"
        name = start(plain(row.name), 32)
        picture.add(Label(left - 8, y + height / 2 + 4, name, 12, ink, "end", row.marked))
        if row.limit:
            box = Rect(left, y + 3, row.limit * scale, height - 6, "wait", outline="faint")
            picture.add(box)
        at = float(left)
        for part, value in row.parts:
            hint = f"{plain(row.name)}: {part} {size(value)}"
            picture.add(
                Rect(at, y + 5, value * scale, height - 10, colour.get(part, "build"), 1, hint)
            )
            at += value * scale
        end = max(at, left + row.limit * scale)
        picture.add(Label(end + 6, y + height / 2 + 4, row.text, 11, "faint"))
    if more > 0:
        picture.add(Label(left, top + height * len(shown) + 14, f"and {more} more", 11, "faint"))
    return picture
