"""One planned step as a chart of characters: a row for each peer, a column for each moment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf
from string import ascii_lowercase, ascii_uppercase

from ...dag.plan.action import TRAITS, Action
from ...proto.broker_pb2 import PlannedRow
from .text import safe, time_text, wrapped

__all__ = ["step_chart"]

MOST_ROWS = 16
"""Peers that are shown."""
WIDEST, NARROWEST = 100, 24
"""Columns of time at most, and at least: below that it is not drawn."""
NAME = 20
"""Columns of a name at most."""
LEGEND = (
    "each digit is a forward (3: of microbatch 3, or 13, 23, …), each letter the backward of the "
    "same number (d: of 3, 13, …), = an exchange or the update, . a wait"
)
APART = "each capital is the gradients of weights that a backward left out"


def step_chart(
    rows: Sequence[PlannedRow], called: Mapping[str, str], columns: int
) -> Iterator[str]:
    """Lines of a chart at most `columns` wide; none where there is one peer, or no room. A column
    shows what computes longest in it, and a wait where nothing does for a quarter of it. `called`:
    names of peers by id."""
    rows = [row for row in rows if _is_in_order(row)]
    shown = rows[:MOST_ROWS]
    names = [safe(called.get(r.peer, r.peer))[:NAME] for r in shown]
    left = max(map(len, names), default=0) + 2
    width = min(WIDEST, columns - left)
    end_s = max((row.end_s[-1] for row in rows if row.end_s), default=0.0)
    if len(rows) < 2 or width < NARROWEST or not end_s:
        return
    yield f"one step, {time_text(end_s)} from left to right"
    for name, row in zip(names, shown, strict=True):
        yield f"{name:<{left}}{_cells(row, width, end_s / width)}"
    if len(rows) > len(shown):
        yield f"and {len(rows) - len(shown)} more"
    apart = any(_is_apart(Action.parse(text)) for row in shown for text in row.actions)
    yield from wrapped(f"{LEGEND}; {APART}" if apart else LEGEND, columns)


def _is_in_order(row: PlannedRow) -> bool:
    """Whether each action has times, one after the other: they came from a broker."""
    ends = (0.0, *row.end_s)
    return len(row.actions) == len(row.start_s) == len(row.end_s) and all(
        0 <= before <= start <= end < inf
        for before, start, end in zip(ends, row.start_s, row.end_s, strict=False)
    )


def _cells(row: PlannedRow, width: int, column_s: float) -> str:
    """What a row shows in each column."""
    filled: list[dict[str, float]] = [{".": column_s / 4} for _ in range(width)]
    for text, start, end in zip(row.actions, row.start_s, row.end_s, strict=True):
        mark = _mark(Action.parse(text))
        for k in range(int(start / column_s), min(int(end / column_s), width - 1) + 1):
            inside = min(end, (k + 1) * column_s) - max(start, k * column_s)
            if inside > 0:
                filled[k][mark] = filled[k].get(mark, 0.0) + inside
    return "".join(max(cell, key=lambda mark: cell[mark]) for cell in filled)


def _mark(action: Action) -> str:
    """The character of an action."""
    traits = TRAITS[action.kind]
    if traits.of != "visit":
        return "="
    digit = action.microbatch % 10
    if traits.work == "forward":
        return str(digit)
    return ascii_uppercase[digit] if _is_apart(action) else ascii_lowercase[digit]


def _is_apart(action: Action) -> bool:
    """Whether it computes the gradients of weights that a backward left out."""
    return TRAITS[action.kind].work == "weight"
