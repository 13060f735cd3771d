"""Ticks at round numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

from ..words import figure, seconds
from .picture import Anchor, Label, Line, Picture, width_of

__all__ = ["ticks", "time_axis"]


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
        edge = at(t) + width_of(text, 11) / 2 > picture.width
        anchor: Anchor = "end" if edge else "middle"
        picture.add(Label(at(t), y + 14, text, 11, "faint", anchor))


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
