"""The timeline of more peers than rows: for each group, how many of its peers do what when."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from ...trace import Trace
from ..measures.measure import Measured, MeasuredStep
from ..measures.verdict import Verdict
from ..words import cut, percent, plain
from .charts import legend, step_lines, time_axis
from .picture import Label, Picture, Rect, width_of

__all__ = ["crowd", "groups_of"]

WIDTH = 1160
RIGHT = 128
MOST_GROUPS = 24
COLUMNS = 280
STACKED = (
    *("forward", "backward", "weight", "exchange", "update", "evaluate", "build", "recover"),
)


def groups_of(found: Measured, places: Mapping[str, str]) -> dict[str, list[str]]:
    """Peers by stage; by place where peers hold several stages each or none, or there are too many
    stages. `places`: by peer."""
    by_stage: defaultdict[tuple[int, ...], list[str]] = defaultdict(list)
    for peer in found.peers.values():
        if peer.stages:
            by_stage[peer.stages].append(peer.name)
    if 1 < len(by_stage) <= MOST_GROUPS:
        return {
            f"stage {'+'.join(map(str, stages))} ({len(names)} peers)": sorted(names)
            for stages, names in sorted(by_stage.items())
        }
    by_place: defaultdict[str, list[str]] = defaultdict(list)
    for peer in found.peers.values():
        by_place[places.get(peer.name, "elsewhere")].append(peer.name)
    ranked = sorted(by_place.items(), key=lambda item: (-len(item[1]), item[0]))[:MOST_GROUPS]
    return {f"{plain(place)} ({len(names)} peers)": sorted(names) for place, names in ranked}


def crowd(
    trace: Trace,
    found: Measured,
    verdict: Verdict,
    groups: Mapping[str, Sequence[str]],
    shown: Sequence[MeasuredStep],
) -> Picture:
    """One band per group over the `shown` steps; its height is all its peers."""
    start_s, end_s = shown[0].start_s, shown[-1].end_s
    height = 44 if len(groups) <= 10 else 26
    left = 20 + max((width_of(cut(name, 30), 12, bold=True) for name in groups), default=40.0)
    top = 52.0
    bottom = top + height * len(groups)
    picture = Picture(WIDTH, bottom + 26, "what the peers of each group do, by time")
    length = (end_s - start_s) / COLUMNS
    step = (WIDTH - left - RIGHT) / COLUMNS

    def at(t: float) -> float:
        return left + (t - start_s) / length * step

    row = {name: i for i, names in enumerate(groups.values()) for name in names}
    shares: defaultdict[tuple[int, str], list[float]] = defaultdict(lambda: [0.0] * COLUMNS)
    for span in trace.spans:
        if span.peer not in row or span.kind == "send":
            continue
        if span.end_s <= start_s or span.start_s >= end_s:
            continue
        cells = shares[row[span.peer], span.kind]
        first = max(0, int((span.start_s - start_s) / length))
        last = min(COLUMNS - 1, int((span.end_s - start_s) / length))
        for k in range(first, last + 1):
            a, b = start_s + k * length, start_s + (k + 1) * length
            cells[k] += max(0.0, min(span.end_s, b) - max(span.start_s, a)) / length

    held = _held(verdict, groups)
    there = {kind for _, kind in shares}
    legend(picture, (kind for kind in STACKED if kind in there), left)
    picture.add(Label(WIDTH, 18, "computes, of the time", 11, "faint", "end"))
    for i, (name, names) in enumerate(groups.items()):
        y = top + i * height
        marked = name == held
        picture.add(
            Rect(left, y + 2, WIDTH - left - RIGHT, height - 4, "wait"),
            Label(
                left - 10,
                y + height / 2 + 4,
                cut(name, 30),
                12,
                "accent" if marked else "ink",
                "end",
                marked,
            ),
        )
        base = [0.0] * COLUMNS
        for kind in STACKED:
            if (i, kind) not in shares:
                continue
            _band(
                picture, shares[i, kind], base, kind, left, y + height - 2, step, height - 4, names
            )
        mean = sum(found.share(found.peers[n].compute_s) for n in names) / max(1, len(names))
        wide = RIGHT - 56
        picture.add(
            Rect(WIDTH - RIGHT + 12, y + height / 2 - 5, wide, 10, "wait"),
            Rect(WIDTH - RIGHT + 12, y + height / 2 - 5, wide * min(1.0, mean), 10, "forward"),
            Label(WIDTH, y + height / 2 + 4, percent(mean), 11, "ink", "end"),
        )
    time_axis(picture, at, start_s, end_s, bottom, top=top)
    step_lines(picture, at, shown, top=top, bottom=bottom)
    return picture


def _band(
    picture: Picture,
    values: Sequence[float],
    base: list[float],
    kind: str,
    left: float,
    bottom: float,
    step: float,
    height: float,
    names: Sequence[str],
) -> None:
    """One kind, on top of what is there; columns of about the same share are drawn as one."""
    many = max(1, len(names))
    k = 0
    while k < COLUMNS:
        share, low, begin = values[k] / many, base[k], k
        while k < COLUMNS and abs(values[k] / many - share) < 0.01 and abs(base[k] - low) < 0.01:
            base[k] += values[k] / many
            k += 1
        if share > 0.004:
            picture.add(
                Rect(
                    left + begin * step,
                    bottom - (low + share) * height,
                    (k - begin) * step + 0.3,
                    share * height,
                    kind,
                )
            )


def _held(verdict: Verdict, groups: Mapping[str, Sequence[str]]) -> str:
    """The group of what holds the run back."""
    return next((g for g, names in groups.items() if any(map(verdict.marks, names))), "")
