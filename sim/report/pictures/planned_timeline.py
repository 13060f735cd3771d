"""A step as plans expect it: one row per peer, drawn from what a preview says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ....dag.plan.action import TRAITS, Action
from ....proto.broker_pb2 import PlannedRow
from ..words import cut, plain, seconds
from .charts import legend, time_axis
from .palette import PALETTE
from .picture import Label, Picture, Rect, width_of

__all__ = ["planned_timeline"]

WIDTH = 1160
TOP = 34.0
BETWEEN = 30.0
"""Between the rows of two plans."""
LEGEND = ("forward", "backward", "weight", "exchange", "update")


def planned_timeline(
    plans: Sequence[tuple[str, Sequence[PlannedRow]]], called: Mapping[str, str]
) -> Picture:
    """The steps of plans, one below the other and on one scale of time. `plans`: a title and the
    rows of each; `called`: names of peers by id."""
    names = {r.peer: cut(plain(called.get(r.peer, r.peer)), 22) for _, rows in plans for r in rows}
    left = 16 + max((width_of(n, 12) for n in names.values()), default=40.0)
    end_s = max((r.end_s[-1] for _, rows in plans for r in rows if r.end_s), default=0.0) or 1.0
    height = 24 if max(len(rows) for _, rows in plans) <= 12 else 15
    tall = sum(BETWEEN + height * len(rows) for _, rows in plans)
    picture = Picture(WIDTH, TOP + tall + 26, "one step as planned, peer by time")

    def at(t: float) -> float:
        return left + t / end_s * (WIDTH - left - 8)

    y = TOP
    time_axis(picture, at, 0.0, end_s, TOP + tall, top=TOP)
    for title, rows in plans:
        took = max((r.end_s[-1] for r in rows if r.end_s), default=0.0)
        picture.add(Label(left, y + BETWEEN - 10, f"{title}: {seconds(took)}", 13, bold=True))
        y += BETWEEN
        for row in rows:
            picture.add(Label(left - 8, y + height / 2 + 4, names[row.peer], 12, "ink", "end"))
            picture.add(Rect(left, y + 1, at(took) - left, height - 2, "wait"))
            for text, start, end in zip(row.actions, row.start_s, row.end_s, strict=True):
                _add(picture, Action.parse(text), at(start), at(end), y + 2, height - 4)
            y += height
    legend(picture, LEGEND, left)
    return picture


def _add(picture: Picture, action: Action, x: float, x2: float, y: float, height: float) -> None:
    """An action's rectangle, with its microbatch where there is room."""
    traits = TRAITS[action.kind]
    gap = 0.7 if x2 - x > 4 else 0.0  # so that one ends where the next begins
    picture.add(Rect(x, y, max(x2 - x - gap, 0.3), height, traits.word, 1, str(action)))
    number = str(action.microbatch)
    if traits.of == "visit" and height >= 12 and x2 - x > width_of(number, 10) + 3:
        picture.add(Label((x + x2) / 2, y + height / 2 + 3.5, number, 10, "paper", "middle"))


assert set(LEGEND) <= PALETTE.keys()
