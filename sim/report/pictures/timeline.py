"""Who did what when: one row per peer over a few typical steps, and the whole run small above."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from ...trace import COMPUTE, Mark, Span, Trace
from ..measures.measure import VISITS, Measured, MeasuredStep
from ..measures.moments import FAULTS, notable
from ..measures.verdict import Verdict
from ..words import cut, percent, plain, seconds, size
from .charts import legend, step_lines, time_axis
from .palette import PALETTE
from .picture import Dot, Label, Line, Picture, Rect, width_of

__all__ = ["MOST_ROWS", "overview", "timeline", "window"]

WIDTH = 1160
RIGHT = 128
"""For shares, at the right of the rows."""
STAGE = 26
"""For the number of the stage, behind a name."""
MOST_ROWS = 64
"""Peers that have rows of their own."""
MOST_SHAPES = 6000
"""Beyond this many spans, neighbours of one kind are drawn as one."""
LEGEND = (
    *("forward", "backward", "weight", "exchange", "update", "evaluate"),
    *("build", "recover", "send"),
)


def window(found: Measured, most_s: float | None = None) -> tuple[MeasuredStep, ...]:
    """The steps that the timeline shows: from the middle of the typical ones, one to three."""
    if not found.typical:
        return ()
    visits = sum(1 for p in found.peers.values() if p.stages)
    many = 1 if visits > 24 else 2 if visits > 8 else 3
    begin = max(0, (len(found.typical) - many) // 2)
    return found.typical[begin : begin + many]


def timeline(
    trace: Trace,
    found: Measured,
    verdict: Verdict,
    order: Sequence[str],
    shown: Sequence[MeasuredStep],
) -> Picture:
    """`order`: names of peers, top to bottom, at most MOST_ROWS. `shown`: consecutive steps."""
    start_s, end_s = shown[0].start_s, shown[-1].end_s
    height = 36 if len(order) <= 6 else 24 if len(order) <= 12 else 15
    left = _gutter(order, found)
    top = 52.0
    bottom = top + height * len(order)
    picture = Picture(WIDTH, bottom + 26, "timeline of a few typical steps, peer by time")
    scale = (WIDTH - left - RIGHT) / max(end_s - start_s, 1e-12)

    def at(t: float) -> float:
        return left + (min(max(t, start_s), end_s) - start_s) * scale

    spans = _visible(trace.spans, order, start_s, end_s)
    _legend(picture, spans, left)
    rows = {name: top + i * height for i, name in enumerate(order)}
    for name, y in rows.items():
        _row_label(picture, name, y, height, left, found, verdict)
        picture.add(Rect(left, y + 1, WIDTH - left - RIGHT, height - 2, "wait"))
    time_axis(picture, at, start_s, end_s, bottom, top=top)
    step_lines(picture, at, shown, top=top, bottom=bottom)
    bars = height - 7 if height > 16 else height - 5
    for span in spans:
        y = rows[span.peer]
        x, x2 = at(span.start_s), at(span.end_s)
        hint = _hint(span) if len(spans) <= MOST_SHAPES else ""
        if span.kind == "send":
            picture.add(Rect(x, y + bars + 1.5, x2 - x, height - bars - 3, "send", 0.75, hint))
        else:
            gap = 0.7 if x2 - x > 4 else 0.0  # so that one ends where the next begins
            picture.add(Rect(x, y + 2, max(x2 - x - gap, 0.3), bars - 1, span.kind, 1, hint))
            _number(picture, span, x, x2 - x, y + 2, bars - 1)
    _chain(picture, verdict, rows, at, start_s, end_s, bars)
    _shares(picture, rows, height, found, verdict)
    return picture


def _visible(
    spans: Sequence[Span], order: Sequence[str], start_s: float, end_s: float
) -> list[Span]:
    wanted = set(order)
    found = [s for s in spans if s.peer in wanted and s.end_s > start_s and s.start_s < end_s]
    found.sort(key=lambda s: (s.peer, s.kind == "send", s.start_s, s.end_s))
    if len(found) <= MOST_SHAPES:
        return found
    pause_s = (end_s - start_s) / 1000  # about a pixel
    merged: list[Span] = []
    for span in found:
        if merged and span.start_s - merged[-1].end_s < pause_s:
            last = merged[-1]
            if (last.peer, last.kind) == (span.peer, span.kind):
                merged[-1] = Span(
                    start_s=last.start_s,
                    end_s=max(last.end_s, span.end_s),
                    peer=span.peer,
                    kind=span.kind,
                    step=span.step,
                )
                continue
        merged.append(span)
    return merged


def _gutter(order: Sequence[str], found: Measured) -> float:
    return (
        24 + STAGE + max((width_of(cut(plain(n), 22), 12, bold=True) for n in order), default=40.0)
    )


def _stages(name: str, found: Measured) -> str:
    stages = found.peers[name].stages if name in found.peers else ()
    return "–".join(map(str, dict.fromkeys((stages[0], stages[-1])))) if stages else ""


def _row_label(
    picture: Picture,
    name: str,
    y: float,
    height: float,
    left: float,
    found: Measured,
    verdict: Verdict,
) -> None:
    marked = verdict.marks(name)
    colour = "accent" if marked else "ink"
    text = cut(plain(name), 22)
    size = 12 if height > 16 else 11
    base = y + height / 2 + 4
    picture.add(
        Label(left - 14 - STAGE, base, text, size, colour, "end", marked, plain(name)),
        Label(left - 10, base, _stages(name, found), size, "faint", "end"),
    )
    if marked:
        picture.add(Rect(left - 5, y + 1, 3, height - 2, "accent"))


def _legend(picture: Picture, spans: Sequence[Span], left: float) -> None:
    kinds = {s.kind for s in spans}
    x = legend(picture, (kind for kind in LEGEND if kind in kinds), left)
    picture.add(
        Line(((x, 14), (x + 16, 14)), "accent", 2.5),
        Label(x + 22, 18, "what the time hangs on", 12),
        Label(WIDTH, 18, "computes, of the time", 11, "faint", "end"),
    )


def _number(picture: Picture, span: Span, x: float, width: float, y: float, height: float) -> None:
    """The microbatch, where there is room."""
    if (
        span.kind in VISITS
        and span.microbatch >= 0
        and height >= 12
        and width > width_of("0" * len(str(span.microbatch)), 10) + 3
    ):
        picture.add(
            Label(x + width / 2, y + height / 2 + 3.5, str(span.microbatch), 10, "paper", "middle")
        )


def _chain(
    picture: Picture,
    verdict: Verdict,
    rows: Mapping[str, float],
    at: Callable[[float], float],
    start_s: float,
    end_s: float,
    bars: float,
) -> None:
    """The chain of causes: a line below what was computed, and across from sender to receiver."""
    points: list[tuple[float, float]] = []
    for piece in verdict.path:
        if piece.end_s <= start_s or piece.start_s >= end_s:
            continue
        on = piece.on or piece.span.peer
        ends = (on, on) if isinstance(on, str) else on
        if ends[0] not in rows or ends[1] not in rows:
            continue
        for name, t in zip(ends, (piece.start_s, piece.end_s), strict=True):
            points.append((at(t), rows[name] + bars + 0.5))
    if points:
        picture.add(Line(points, "paper", 4, 0.7), Line(points, "accent", 2))


def _shares(
    picture: Picture,
    rows: Mapping[str, float],
    height: float,
    found: Measured,
    verdict: Verdict,
) -> None:
    """At the right of each row: which part of the typical steps it computes."""
    x, width = WIDTH - RIGHT + 12, RIGHT - 56
    for name, y in rows.items():
        if name not in found.peers:
            continue
        peer = found.peers[name]
        share = found.share(peer.compute_s)
        colour = "accent" if verdict.on == name else "forward"
        hint = (
            f"{plain(name)}: computes {percent(share)}, sends {percent(found.share(peer.send_s))}"
        )
        thick = min(10.0, height - 6)
        middle = y + height / 2
        picture.add(
            Rect(x, middle - thick / 2, width, thick, "wait"),
            Rect(x, middle - thick / 2, width * min(1.0, share), thick, colour, 1, hint),
            Label(WIDTH, middle + 4, percent(share), 11, "ink", "end", verdict.on == name),
        )


def _hint(span: Span) -> str:
    what: str = span.kind
    if span.kind == "send":
        what = f"send to {plain(span.to)}: {plain(span.role)} {size(span.size_bytes)}"
        if span.codec:
            what += f" as {plain(span.codec)}"
    parts = [f"{plain(span.peer)}: {what}"]
    if span.kind in VISITS and span.stage >= 0:
        parts.append(f"stage {span.stage}")
    if span.step >= 0:
        parts.append(f"step {span.step}")
    if span.kind in VISITS and span.microbatch >= 0:
        parts.append(f"microbatch {span.microbatch}")
    return ", ".join((*parts, seconds(span.end_s - span.start_s)))


def overview(
    trace: Trace, found: Measured, order: Sequence[str], shown: Sequence[MeasuredStep]
) -> Picture:
    """The whole run: how much each peer computes over time, what happened, and where the timeline
    is. Peers beyond MOST_ROWS share rows."""
    groups = _groups(order)
    height = 12 if len(groups) <= 12 else 6
    left = 20 + max((width_of(cut(plain(g[0]), 22), 11) for g in groups), default=40.0)
    top = 34.0
    bottom = top + height * len(groups)
    picture = Picture(WIDTH, bottom + 26, "the whole run, peer by time")
    end_s = max(trace.end_s, 1e-12)
    scale = (WIDTH - left - 8) / end_s

    def at(t: float) -> float:
        return left + min(max(t, 0.0), end_s) * scale

    time_axis(picture, at, 0.0, end_s, bottom, top=top)
    bins = 240
    filled = _filled(trace.spans, groups, end_s, bins)
    step = (WIDTH - left - 8) / bins
    for i, group in enumerate(groups):
        y = top + i * height
        picture.add(Rect(left, y + 0.5, WIDTH - left - 8, height - 1, "wait"))
        for what in ("compute", "recover", "build"):
            colour = "forward" if what == "compute" else what
            for k, share in filled[i, what].items():
                level = min(1.0, share)
                if level > 0.02:
                    picture.add(
                        Rect(left + k * step, y + 0.5, step, height - 1, colour, round(level, 2))
                    )
        if height > 8 or i % max(1, len(groups) // 12) == 0:
            picture.add(
                Label(left - 8, y + height / 2 + 4, cut(plain(group[0]), 22), 10, "faint", "end")
            )
    _flags(picture, trace.marks, at, top, bottom)
    if shown:
        x, x2 = at(shown[0].start_s), at(shown[-1].end_s)
        picture.add(
            Rect(x, top - 3, max(x2 - x, 2), bottom - top + 6, "accent", 0.12, outline="accent"),
        )
    return picture


def _groups(order: Sequence[str]) -> list[list[str]]:
    size = -(-len(order) // MOST_ROWS)
    return [list(order[i : i + size]) for i in range(0, len(order), max(1, size))]


def _filled(
    spans: Sequence[Span], groups: Sequence[Sequence[str]], end_s: float, bins: int
) -> defaultdict[tuple[int, str], dict[int, float]]:
    """Share of each bin, by group and kind."""
    row = {name: (i, len(group)) for i, group in enumerate(groups) for name in group}
    found: defaultdict[tuple[int, str], dict[int, float]] = defaultdict(dict)
    length = end_s / bins
    for span in spans:
        kind = "compute" if span.kind in COMPUTE else span.kind
        if kind == "send" or span.peer not in row:
            continue
        i, many = row[span.peer]
        cells = found[i, kind]
        first, last = int(max(span.start_s, 0) / length), int(max(span.end_s, 0) / length)
        for k in range(first, min(last, bins - 1) + 1):
            inside = min(span.end_s, (k + 1) * length) - max(span.start_s, k * length)
            cells[k] = cells.get(k, 0.0) + max(0.0, inside) / (length * many)
    return found


def _flags(
    picture: Picture, marks: Sequence[Mark], at: Callable[[float], float], top: float, bottom: float
) -> None:
    """What happened, with a word where it does not cover the one before."""
    reached = -1e9
    for mark in notable(marks)[:400]:
        x = at(mark.at_s)
        colour = "recover" if mark.what in FAULTS else "faint"
        hint = f"{seconds(mark.at_s)}: {plain(mark.what)} {plain(mark.who)} {plain(mark.text)}"
        picture.add(Line(((x, top - 6), (x, bottom)), colour, 1, 0.8))
        picture.add(Dot(x, top - 7, 3, colour, hint))
        text = cut(f"{plain(mark.what)} {plain(mark.who)}", 26)
        if x > reached and x + width_of(text, 10) < picture.width:
            picture.add(Label(x + 5, top - 12, text, 10, colour))
            reached = x + width_of(text, 10) + 12


assert set(LEGEND) <= PALETTE.keys()
