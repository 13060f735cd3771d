"""The schedules by name. A new one is a file beside these, and a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ...plan.cut import Stage
from ...plan.plan import Plan
from . import gpipe, interleaved, one_f_one_b
from .list_scheduler import Bounds, Lists, Times

__all__ = ["SCHEDULES", "Schedule"]

Order = Callable[[Plan, Sequence[Stage], Times | None, Bounds | None], Lists]


@dataclass(frozen=True, slots=True)
class Schedule:
    """How the visits of a step are ordered, and what planners have to know of it."""

    order: Order
    """The visits of every peer of a plan."""
    live: Callable[[int, int, int], int]
    """Most microbatches that a stage keeps, by the number of stages, its index, and the
    microbatches of its pipeline."""
    several: bool = False
    """Whether peers are meant to hold several stages that are not beside each other."""


SCHEDULES: Mapping[str, Schedule] = {
    "gpipe": Schedule(gpipe.order, gpipe.live),
    "1f1b": Schedule(one_f_one_b.order, one_f_one_b.live),
    "interleaved": Schedule(interleaved.order, interleaved.live, several=True),
}
