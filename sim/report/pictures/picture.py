"""A picture as a list of shapes, which becomes SVG in a page or a PNG file.

Lengths are pixels of a page, from the upper left corner. Colours are names of `palette.py`: the
page decides between light and dark; a PNG is on white.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .palette import rgb

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

__all__ = ["Anchor", "Dot", "Label", "Line", "Picture", "Rect", "Shape", "width_of"]

Anchor = Literal["start", "middle", "end"]
SCALE = 2
"""Pixels of a PNG for each of a page."""
SMOOTH = 2
"""It is drawn so many times as large, and made smaller."""
FONTS = ("DejaVuSans.ttf", "LiberationSans-Regular.ttf", "Arial.ttf", "Helvetica.ttc")
BOLD = ("DejaVuSans-Bold.ttf", "LiberationSans-Bold.ttf", "Arial Bold.ttf", "Helvetica.ttc")
_ASCII = str.maketrans({"→": ">", "·": "-", "×": "x", "µ": "u", "…": "~", "–": "-"})


@dataclass(frozen=True, slots=True)
class Rect:
    x: float
    y: float
    width: float
    height: float
    fill: str
    opacity: float = 1.0
    hint: str = ""
    """Shown where the pointer rests."""
    round: float = 0.0
    outline: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    points: Sequence[tuple[float, float]]
    stroke: str
    width: float = 1.0
    opacity: float = 1.0
    dashed: bool = False
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Dot:
    x: float
    y: float
    radius: float
    fill: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Label:
    x: float
    y: float
    """The height of the baseline."""
    text: str
    size: float = 12.0
    fill: str = "ink"
    anchor: Anchor = "start"
    bold: bool = False
    hint: str = ""


Shape = Rect | Line | Dot | Label


def width_of(text: str, size: float = 12.0, *, bold: bool = False) -> float:
    """About how wide a label is: a little more than with usual fonts."""
    narrow = sum(c in "iljftr.,:;|!'()[] 1I-" for c in text)
    wide = sum(c in "mwMWQO@%—" for c in text)
    return (
        size
        * (0.58 * (len(text) - narrow - wide) + 0.36 * narrow + 0.9 * wide)
        * (1.06 if bold else 1.0)
    )


class Picture:
    """Shapes, drawn in their order."""

    def __init__(self, width: float, height: float, about: str) -> None:
        self.width, self.height, self.about = width, height, about
        self.shapes: list[Shape] = []

    def add(self, *shapes: Shape) -> None:
        self.shapes.extend(shapes)

    def put(self, other: Picture, x: float, y: float) -> None:
        """Draw another picture with its upper left corner at (x, y)."""
        for shape in other.shapes:
            if isinstance(shape, Line):
                self.add(replace(shape, points=[(a + x, b + y) for a, b in shape.points]))
            else:
                self.add(replace(shape, x=shape.x + x, y=shape.y + y))

    def svg(self) -> str:
        """An element for a page that has `palette.css()`."""
        size = f"{self.width:g} {self.height:g}"
        head = f'<svg viewBox="0 0 {size}" role="img" aria-label="{escape(self.about)}">'
        return "".join((head, *map(_svg, self.shapes), "</svg>"))

    def png(self, path: Path) -> None:
        """Writes the file. Raises OSError."""
        from PIL import Image, ImageDraw  # slow to import

        k = SCALE * SMOOTH
        size = round(self.width * k), round(self.height * k)
        image = Image.new("RGB", size, rgb("paper"))
        draw = ImageDraw.Draw(image, "RGBA")
        fonts = _Fonts(k)
        for shape in self.shapes:
            _draw(draw, shape, k, fonts)
        small = image.resize((size[0] // SMOOTH, size[1] // SMOOTH), Image.Resampling.BOX)
        small.save(path, format="PNG")


def _n(x: float) -> str:
    return f"{x:.1f}".removesuffix(".0")


def _svg(shape: Shape) -> str:
    hint = f"<title>{escape(shape.hint)}</title>" if shape.hint else ""
    match shape:
        case Rect(x, y, width, height, fill, opacity, _, round_, outline):
            more = f' fill-opacity="{opacity:g}"' if opacity < 1 else ""
            more += f' rx="{round_:g}"' if round_ else ""
            more += f' style="stroke:var(--{outline});stroke-width:1"' if outline else ""
            text = f'<rect class="f-{fill}" x="{_n(x)}" y="{_n(y)}"'
            # A rectangle that is narrower than one tenth would round to nothing.
            text += f' width="{max(width, 0.2):.2f}" height="{_n(height)}"{more}'
            return f"{text}>{hint}</rect>" if hint else f"{text}/>"
        case Line(points, stroke, width, opacity, dashed, _):
            more = f' stroke-opacity="{opacity:g}"' if opacity < 1 else ""
            more += ' stroke-dasharray="3 3"' if dashed else ""
            path = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
            text = f'<polyline class="s-{stroke}" stroke-width="{width:g}" points="{path}"{more}'
            return f"{text}>{hint}</polyline>" if hint else f"{text}/>"
        case Dot(x, y, radius, fill, _):
            text = f'<circle class="f-{fill}" cx="{_n(x)}" cy="{_n(y)}" r="{radius:g}"'
            return f"{text}>{hint}</circle>" if hint else f"{text}/>"
        case Label(x, y, label, size, fill, anchor, bold, _):
            more = "" if anchor == "start" else f' text-anchor="{anchor}"'
            more += ' font-weight="600"' if bold else ""
            text = f'<text class="f-{fill}" x="{_n(x)}" y="{_n(y)}" font-size="{size:g}"{more}>'
            return f"{text}{hint}{escape(label)}</text>"


class _Fonts:
    """Fonts of this machine by size; without any, the one that the library brings, which has
    little but ASCII."""

    def __init__(self, scale: float) -> None:
        self._scale = scale
        self._found: dict[tuple[float, bool], Any] = {}
        self.ascii = False

    def get(self, size: float, bold: bool) -> Any:
        if (size, bold) not in self._found:
            self._found[size, bold] = self._load(size * self._scale, bold)
        return self._found[size, bold]

    def _load(self, size: float, bold: bool) -> Any:
        from PIL import ImageFont

        for name in BOLD if bold else FONTS:
            try:
                return ImageFont.truetype(name, size)
            except OSError:
                continue
        self.ascii = True
        return ImageFont.load_default(size)


def _draw(draw: ImageDraw, shape: Shape, k: float, fonts: _Fonts) -> None:
    match shape:
        case Rect(x, y, width, height, fill, opacity, _, round_, outline):
            # PIL counts the last pixel in.
            box = (x * k, y * k, max(x, x + width - 1 / k) * k, max(y, y + height - 1 / k) * k)
            colour = (*rgb(fill), round(255 * opacity))
            edge = rgb(outline) if outline else None
            draw.rounded_rectangle(box, round_ * k, fill=colour, outline=edge, width=round(k))
        case Line(points, stroke, width, opacity, dashed, _):
            colour = (*rgb(stroke), round(255 * opacity))
            scaled = [(x * k, y * k) for x, y in points]
            for part in _dashes(scaled, 3 * k) if dashed else [scaled]:
                draw.line(part, fill=colour, width=max(1, round(width * k)), joint="curve")
        case Dot(x, y, radius, fill, _):
            box = ((x - radius) * k, (y - radius) * k, (x + radius) * k, (y + radius) * k)
            draw.ellipse(box, fill=rgb(fill))
        case Label(x, y, label, size, fill, anchor, bold, _):
            font = fonts.get(size, bold)
            if fonts.ascii:
                label = label.translate(_ASCII).encode("ascii", "replace").decode()
            where = {"start": "ls", "middle": "ms", "end": "rs"}[anchor]
            draw.text((x * k, y * k), label, fill=rgb(fill), font=font, anchor=where)


def _dashes(
    points: Sequence[tuple[float, float]], length: float
) -> list[list[tuple[float, float]]]:
    """Every other piece of `length` of each straight part."""
    found = []
    for (x0, y0), (x1, y1) in pairwise(points):
        whole = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
        for i in range(0, int(whole / length) + 1, 2):
            a, b = (
                i * length / whole if whole else 0.0,
                min(1.0, (i + 1) * length / max(whole, 1e-9)),
            )
            found.append(
                [(x0 + a * (x1 - x0), y0 + a * (y1 - y0)), (x0 + b * (x1 - x0), y0 + b * (y1 - y0))]
            )
    return found
