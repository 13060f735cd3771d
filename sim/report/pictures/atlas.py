"""The map: places where they are on the earth, else on a circle, and what went between them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from ....job.words import count_of
from ..measures.measure import Measured
from ..measures.verdict import Verdict
from ..words import cut, percent, plain, size
from .charts import ticks
from .palette import shade
from .picture import Dot, Label, Line, Picture, width_of

__all__ = ["atlas", "place_of"]

WIDTH, HEIGHT = 560, 380
MOST_LINKS = 120
STEPS = 24
"""Straight parts of a bent line."""


def place_of(places: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The place of each peer. `places`: as `Summary.places` states them."""
    return {peer: place["name"] for place in places for peer in place["peers"]}


def atlas(found: Measured, verdict: Verdict, places: Sequence[Mapping[str, Any]]) -> Picture | None:
    """None for fewer than two places. Lines are as wide as what crossed between two places in the
    whole run, and have the colour of the busiest link there."""
    if len(places) < 2:
        return None
    picture = Picture(WIDTH, HEIGHT, "places and the links between them")
    at = _positions(picture, places)
    of = place_of(places)
    carried: defaultdict[tuple[str, str], int] = defaultdict(int)
    use: defaultdict[tuple[str, str], float] = defaultdict(float)
    for part, total in found.totals.items():
        a, b = of.get(part.peer, ""), of.get(part.to, "")
        if part.kind == "send" and a in at and b in at and a != b:
            pair = (min(a, b), max(a, b))
            carried[pair] += total.size_bytes
            link = found.links.get((part.peer, part.to))
            use[pair] = max(use[pair], (found.use(link) or 0.0) if link else 0.0)
    most = max(carried.values(), default=1) or 1
    held = _pair(verdict, of)
    ranked = sorted(carried.items(), key=lambda item: (item[1], item[0]))[-MOST_LINKS:]
    for (a, b), crossed in ranked:
        (x0, y0), (x1, y1) = at[a], at[b]
        points = [
            (x0 + (x1 - x0) * i / STEPS, y0 + (y1 - y0) * i / STEPS) for i in range(STEPS + 1)
        ]
        bend = 0.12 * math.dist((x0, y0), (x1, y1))
        points = [(x, y - bend * math.sin(math.pi * i / STEPS)) for i, (x, y) in enumerate(points)]
        colour = "accent" if held == (a, b) else shade(max(use[a, b], 0.2))
        hint = f"{plain(a)} – {plain(b)}: {size(crossed)}, busiest link {percent(use[a, b])}"
        picture.add(Line(points, colour, 1 + 7 * crossed / most, hint=hint))
    taken = [(x - 3, y - 3, x + 3, y + 3) for x, y in at.values()]
    for place in sorted(places, key=lambda p: -len(p["peers"])):
        x, y = at[place["name"]]
        many = len(place["peers"])
        marked = any(verdict.on == peer for peer in place["peers"])
        radius = min(11.0, 3.5 + 1.3 * math.sqrt(many))
        hint = f"{plain(place['name'])}: {count_of(many, 'peer')}"
        picture.add(Dot(x, y, radius, "accent" if marked else "forward", hint))
        text = cut(plain(place["name"]), 22) + (f" · {many}" if many > 1 else "")
        _label(picture, taken, x, y, radius, text, marked)
    return picture


def _pair(verdict: Verdict, of: Mapping[str, str]) -> tuple[str, str] | None:
    if not isinstance(verdict.on, tuple):
        return None
    a, b = (of.get(name, "") for name in verdict.on)
    return (min(a, b), max(a, b))


def _positions(
    picture: Picture, places: Sequence[Mapping[str, Any]]
) -> dict[str, tuple[float, float]]:
    known = [p for p in places if p["at"] is not None]
    loose = [p for p in places if p["at"] is None]
    if len(known) < 2 or len(loose) > len(known):
        return _circle(places, WIDTH / 2, HEIGHT / 2, 0.36 * WIDTH, 0.36 * HEIGHT)
    lat = [p["at"][0] for p in known]
    lon = [p["at"][1] for p in known]
    south, north = _wide(min(lat), max(lat), 8.0)
    west, east = _wide(min(lon), max(lon), 14.0)
    squeeze = max(0.3, math.cos(math.radians((south + north) / 2)))
    bottom = HEIGHT - 18 - (44 if loose else 0)
    scale = min((WIDTH - 20) / ((east - west) * squeeze), (bottom - 10) / (north - south))
    middle = (west + east) / 2, (south + north) / 2

    def put(latitude: float, longitude: float) -> tuple[float, float]:
        x = WIDTH / 2 + (longitude - middle[0]) * squeeze * scale
        return x, (10 + bottom) / 2 - (latitude - middle[1]) * scale

    tall = (bottom - 10) / 2 / scale
    for value in ticks(max(-90.0, middle[1] - tall), min(90.0, middle[1] + tall)):
        y = put(value, middle[0])[1]
        side = "N" if value > 0 else "S" if value < 0 else ""
        picture.add(
            Line(((0, y), (WIDTH, y)), "grid"),
            Label(2, y - 3, f"{abs(value):g}°{side}", 10, "faint"),
        )
    reach = WIDTH / 2 / scale / squeeze
    for value in ticks(middle[0] - reach, middle[0] + reach, 8):
        x = put(middle[1], value)[0]
        value = (value + 180) % 360 - 180
        side = "E" if value > 0 else "W" if value < 0 else ""
        picture.add(
            Line(((x, 0), (x, bottom + 8)), "grid"),
            Label(x + 3, bottom + 6, f"{abs(value):g}°{side}", 10, "faint"),
        )
    found = {p["name"]: put(*p["at"]) for p in known}
    for i, place in enumerate(loose):
        found[place["name"]] = (WIDTH * (i + 0.5) / len(loose), HEIGHT - 30)
    return found


def _wide(low: float, high: float, least: float) -> tuple[float, float]:
    """With a margin, and not closer together than `least` degrees."""
    middle, half = (low + high) / 2, max(high - low, least) / 2 * 1.25
    return middle - half, middle + half


def _circle(
    places: Sequence[Mapping[str, Any]], x: float, y: float, wide: float, high: float
) -> dict[str, tuple[float, float]]:
    turn = 2 * math.pi / len(places)
    return {
        p["name"]: (
            x + wide * math.sin(i * turn + turn / 4),
            y - high * math.cos(i * turn + turn / 4),
        )
        for i, p in enumerate(places)
    }


def _label(
    picture: Picture,
    taken: list[tuple[float, float, float, float]],
    x: float,
    y: float,
    radius: float,
    text: str,
    marked: bool,
) -> None:
    """Beside, above or below its place, where nothing is yet; nowhere when all is full."""
    wide, high = width_of(text, 11, bold=marked), 13.0
    gap = radius + 4
    spots = (
        (x + gap, y + 4),
        (x - gap - wide, y + 4),
        (x - wide / 2, y - gap),
        (x - wide / 2, y + gap + 9),
        (x + gap, y - 10),
        (x + gap, y + 18),
        (x - gap - wide, y - 10),
        (x - gap - wide, y + 18),
    )
    for left, base in spots:
        box = left - 4, base - high, left + wide + 4, base + 3
        inside = box[0] >= 0 and box[2] <= WIDTH and box[1] >= 0 and box[3] <= HEIGHT
        free = all(box[2] < b[0] or box[0] > b[2] or box[3] < b[1] or box[1] > b[3] for b in taken)
        if inside and free:
            taken.append(box)
            picture.add(Label(left, base, text, 11, "accent" if marked else "ink", bold=marked))
            return
