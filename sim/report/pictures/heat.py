"""Links as a table of colours: what crossed each over what it could carry."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from ..measures.measure import Measured
from ..measures.verdict import Verdict
from ..words import bit_rate, cut, percent, plain, seconds
from .palette import shade
from .picture import Label, Picture, Rect, width_of

__all__ = ["heat_map"]

WIDTH = 560
MOST = 64
"""Rows: peers, or places where there are more peers."""


def heat_map(
    found: Measured, verdict: Verdict, order: Sequence[str], places: Mapping[str, str]
) -> Picture | None:
    """Rows send, columns receive; with the use of uplinks and downlinks at the edges. None when
    nothing was sent. Without known rates the colours go by bytes, against the most."""
    used = {pair: link for pair, link in found.links.items() if link.size_bytes}
    known = {pair: use for pair, link in used.items() if (use := found.use(link)) is not None}
    most = max((link.size_bytes for link in used.values()), default=0)
    values = known or {pair: link.size_bytes / most for pair, link in used.items()}
    if not values:
        return None
    names = [n for n in order if any(n in pair for pair in values)]
    grouped = len(names) > MOST
    if grouped:
        most_used: defaultdict[tuple[str, str], float] = defaultdict(float)
        for (a, b), value in values.items():
            pair = places.get(a, "elsewhere"), places.get(b, "elsewhere")
            most_used[pair] = max(most_used[pair], value)
        values = dict(most_used)
        names = sorted({n for pair in values for n in pair})[:MOST]
    ends = bool(known) and not grouped and bool(found.up)
    left = 18 + max(width_of(cut(plain(n), 18), 11) for n in names)
    cells = len(names) + (1.4 if ends else 0)
    room = (WIDTH - left - 8) / cells
    wide = max(7.0, min(76.0, room))
    cell = max(7.0, min(36.0, room))
    head = 34 + (18 if wide >= 40 else 0)
    picture = Picture(
        WIDTH,
        head + cells * cell + 46,
        "use of each link" if known else "bytes on each link, against the most",
    )
    top = head
    for i, sender in enumerate(names):
        y = top + i * cell
        if cell >= 9 or i % 4 == 0:
            ink = "accent" if not grouped and verdict.marks(sender) else "ink"
            label = cut(plain(sender), 18)
            picture.add(Label(left - 8, y + cell / 2 + 4, label, 11, ink, "end"))
        for k, receiver in enumerate(names):
            box = left + k * wide, y, wide - 1, cell - 1
            if (sender, receiver) not in values:
                picture.add(Rect(*box, "wait" if sender != receiver else "paper", 0.6))
                continue
            value = values[sender, receiver]
            marked = not grouped and verdict.on == (sender, receiver)
            hint = _hint(found, sender, receiver, value, grouped)
            picture.add(Rect(*box, shade(value), 1, hint, outline="accent" if marked else ""))
            if cell >= 30:
                ink = "ink" if value < 0.5 else "paper"
                text = percent(value) if value >= 0.1 else f"{value:.0%}"
                x = left + (k + 0.5) * wide
                picture.add(Label(x, y + cell / 2 + 4, text, 10, ink, "middle"))
        if ends and (use := found.up.get(sender)) is not None:
            box = left + (len(names) + 0.4) * wide, y, wide - 1, cell - 1
            _edge(picture, box, use, f"uplink of {plain(sender)}")
    for k, name in enumerate(names):
        if wide >= 40:
            text, x = cut(plain(name), max(4, int(wide / 6.2))), left + (k + 0.5) * wide
            picture.add(Label(x, head - 8, text, 10, "ink", "middle", hint=plain(name)))
        if ends and (use := found.down.get(name)) is not None:
            box = left + k * wide, top + (len(names) + 0.4) * cell, wide - 1, cell - 1
            _edge(picture, box, use, f"downlink of {plain(name)}")
    if ends:
        picture.add(
            Label(left + (len(names) + 0.9) * wide, head - 8, "up", 10, "faint", "middle"),
            Label(left - 8, top + (len(names) + 0.9) * cell + 4, "down", 10, "faint", "end"),
        )
    _scale(picture, left, picture.height - 12, bool(known))
    picture.add(Label(left, 14, "rows send, columns receive, in the same order", 11, "faint"))
    return picture


def _edge(picture: Picture, box: tuple[float, float, float, float], use: float, what: str) -> None:
    picture.add(Rect(*box, shade(use), 1, f"{what}: {percent(use)}"))
    x, y, width, height = box
    if height >= 29:
        ink = "ink" if use < 0.5 else "paper"
        picture.add(Label(x + width / 2, y + height / 2 + 4, f"{use:.0%}", 10, ink, "middle"))


def _hint(found: Measured, a: str, b: str, value: float, grouped: bool) -> str:
    text = f"{plain(a)} → {plain(b)}: {percent(value)}"
    if grouped:
        return f"{text} (the busiest pair)"
    link = found.links[a, b]
    rate = link.size_bytes / found.span_s if found.span_s else 0.0
    text += f", {bit_rate(rate)}"
    return (
        f"{text} of {bit_rate(link.rate)}, {seconds(link.latency_s)} one way" if link.rate else text
    )


def _scale(picture: Picture, x: float, y: float, known: bool) -> None:
    for i, text in enumerate(("0%", "1%", "20%", "50%", "75%", "95%")):
        picture.add(
            Rect(x + i * 44, y - 10, 12, 12, f"heat{i}", outline="grid"),
            Label(x + i * 44 + 15, y, text, 10, "faint"),
        )
    what = "of what the link carries" if known else "of the busiest link's bytes"
    picture.add(Label(x + 6 * 44 + 6, y, what, 10, "faint"))
