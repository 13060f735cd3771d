"""The picture of a partition: for each client the samples that it has (above), and its mix of
classes (below), as a table of colours with a column for each client and a row for each class.

Clients stand in the order of their largest class, so that the same mixes stand side by side. Where
they are more than columns fit, the table shows the middle one of each column: a mean of mixes looks
like none of them. Where there are more classes than rows fit, a row is the sum of its classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from .variates import Floats, Ints

__all__ = ["draw"]

_COLUMNS, _ROWS = 500, 64
"""The most that are told apart."""
_WIDTH, _BARS = 1500, 220
_LEFT, _RIGHT, _TOP, _BOTTOM, _GAP = 130, 260, 124, 90, 56
_INK, _FAINT, _BAR, _LARGEST = (32, 36, 44), (120, 126, 136), (88, 110, 146), (196, 208, 226)
_STOPS = np.array([(247, 248, 250), (178, 205, 226), (88, 147, 196), (24, 84, 150), (8, 32, 76)])
"""Colours of 0, 25, 50, 75 and 100 %."""


def draw(
    path: Path, text: Sequence[str], counts: Ints, sizes: Ints, labels: Ints, names: Any
) -> None:
    """Write the PNG file. Raises OSError.

    `text`: a head and a line below. `counts`: (clients, classes); `sizes`: (clients,), of each
    their sum where there are labels. `labels`: (classes,). `names`: (clients,), what to call
    clients."""
    order = _order(counts, sizes)
    columns, rows = min(sizes.size, _COLUMNS), min(labels.size, _ROWS)
    cell = max(1, _WIDTH // columns)
    width, height = cell * columns, max(rows * min(48, max(12, 480 // max(1, rows))), 1)
    image = Image.new(
        "RGB",
        (
            max(_LEFT + width + _RIGHT, 1150),
            _TOP + _BARS + (_GAP + height if rows else 0) + _BOTTOM,
        ),
        "white",
    )
    pen = ImageDraw.Draw(image)
    below = _TOP + _BARS + _GAP
    pen.text((_LEFT, 22), text[0], _INK, _font(26), anchor="la")
    pen.text((_LEFT, 60), text[1], _FAINT, _font(20), anchor="la")
    _draw_sizes(pen, sizes[order], columns, cell)
    if rows:
        shares = _mixes(counts[order], sizes[order], columns, rows)
        pixels = np.rint(_colours(shares)).astype(np.uint8)
        table = Image.fromarray(pixels).resize((width, height), Image.Resampling.NEAREST)
        image.paste(table, (_LEFT, below))
        _draw_classes(pen, labels, rows, below, height)
        _draw_scale(pen, image, _LEFT + width + 40, below)
        if columns == sizes.size and rows == labels.size:
            _draw_counts(pen, counts[order], shares, cell, below, height)
    else:
        below, height = _TOP + _BARS, 0
    _draw_clients(pen, names, order, cell, below + height, bool(rows))
    image.save(path, format="PNG")


def _order(counts: Ints, sizes: Ints) -> Ints:
    """Clients by their largest class, and among these the purest first; by size without labels."""
    if not counts.shape[1]:
        return np.argsort(-sizes, kind="stable")
    largest = counts.argmax(axis=1)
    return np.lexsort((-counts.max(axis=1) / sizes, largest))


def _starts(count: int, groups: int) -> Ints:
    """Where each of so many equal groups of `count` things begins."""
    return np.arange(groups) * count // groups


def _mixes(counts: Ints, sizes: Ints, columns: int, rows: int) -> Floats:
    """Shares of classes, (rows, columns), of the middle client of each column."""
    starts = _starts(sizes.size, columns)
    middle = (starts + np.append(starts[1:], sizes.size)) // 2
    by_row = np.add.reduceat(counts[middle], _starts(counts.shape[1], rows), axis=1)
    found: Floats = (by_row / sizes[middle, None]).T
    return found


def _colours(shares: Floats) -> Floats:
    at = np.linspace(0, 1, len(_STOPS))
    return np.stack([np.interp(shares, at, _STOPS[:, c]) for c in range(3)], axis=-1)


def _draw_sizes(pen: ImageDraw.ImageDraw, sizes: Ints, columns: int, cell: int) -> None:
    """Bars: the mean size of the clients of each column, and behind it their largest."""
    starts = _starts(sizes.size, columns)
    largest = np.maximum.reduceat(sizes, starts)
    mean = np.add.reduceat(sizes, starts) / np.diff(starts, append=sizes.size)
    top, floor = int(sizes.max()), _TOP + _BARS
    gap = 1 if cell > 6 else 0
    for heights, colour in ((largest, _LARGEST), (mean, _BAR)):
        for i, h in enumerate(heights):
            left = _LEFT + i * cell
            up = floor - max(1, round(h / top * (_BARS - 10)))
            pen.rectangle((left + gap, up, left + cell - 1 - gap, floor - 1), colour)
    for value in sorted({top, top // 2, 0}):
        y = floor - round(value / top * (_BARS - 10))
        pen.line((_LEFT - 8, y, _LEFT - 2, y), _FAINT)
        pen.text((_LEFT - 14, y), f"{value:,}", _INK, _font(20), anchor="rm")
    pen.text((_LEFT - 14, _TOP - 16), "samples", _FAINT, _font(20), anchor="rm")
    if columns < sizes.size:
        right = _LEFT + cell * columns + 40
        pen.rectangle((right, _TOP + 20, right + 22, _TOP + 42), _BAR)
        pen.text((right + 32, _TOP + 31), "mean of column", _INK, _font(20), anchor="lm")
        pen.rectangle((right, _TOP + 52, right + 22, _TOP + 74), _LARGEST)
        pen.text((right + 32, _TOP + 63), "its largest", _INK, _font(20), anchor="lm")


def _draw_classes(
    pen: ImageDraw.ImageDraw, labels: Ints, rows: int, below: int, height: int
) -> None:
    starts, step = _starts(labels.size, rows), height / rows
    every = max(1, round(24 / step))
    for row in range(0, rows, every):
        y = below + (row + 0.5) * step
        pen.text((_LEFT - 14, y), _short(labels[starts[row]]), _INK, _font(20), "rm")
    pen.text((_LEFT - 14, below - 18), "label", _FAINT, _font(20), anchor="rm")


def _draw_counts(
    pen: ImageDraw.ImageDraw,
    counts: Ints,
    shares: Floats,
    cell: int,
    below: int,
    height: int,
) -> None:
    """Numbers in the cells, where they fit."""
    step = height / counts.shape[1]
    font = _font(min(20, int(step * 0.7)))
    if step < 18 or pen.textlength(f"{counts.max():,}", font) > cell - 8:
        return
    for i, row in enumerate(counts):
        for k, count in enumerate(row):
            if count:
                colour = "white" if shares[k, i] > 0.45 else _INK
                at = (_LEFT + (i + 0.5) * cell, below + (k + 0.5) * step)
                pen.text(at, f"{count:,}", colour, font, anchor="mm")


def _draw_clients(
    pen: ImageDraw.ImageDraw, names: Any, order: Ints, cell: int, below: int, mixes: bool
) -> None:
    what = f"{order.size:,} clients, by {'their largest class' if mixes else 'size'}"
    if order.size > _COLUMNS:
        what += f", {_COLUMNS} columns"
        what += "; of each the table shows the middle one" if mixes else ""
    elif cell >= 34:
        for i, client in enumerate(order):
            name = _short(names[client], cell, pen)
            pen.text((_LEFT + (i + 0.5) * cell, below + 8), name, _INK, _font(20), anchor="ma")
    pen.text((_LEFT, below + (44 if cell >= 34 else 14)), what, _INK, _font(22), anchor="la")


def _draw_scale(pen: ImageDraw.ImageDraw, image: Image.Image, left: int, below: int) -> None:
    ramp = np.rint(_colours(np.linspace(1, 0, 200)[:, None])).astype(np.uint8)
    image.paste(Image.fromarray(ramp).resize((22, 200)), (left, below))
    for share in (0, 50, 100):
        at = (left + 32, below + 200 - share * 2)
        pen.text(at, f"{share} %", _INK, _font(20), anchor="lm")
    pen.text((left, below + 226), "of the client's", _FAINT, _font(20), anchor="la")
    pen.text((left, below + 250), "samples", _FAINT, _font(20), anchor="la")


def _short(name: Any, width: int = _LEFT - 20, pen: ImageDraw.ImageDraw | None = None) -> str:
    """A name, cut where it has no room."""
    text = str(name)
    while len(text) > 2 and (pen.textlength(text, _font(20)) > width - 4 if pen else len(text) > 9):
        text = text[:-2] + "~"
    return text


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)
