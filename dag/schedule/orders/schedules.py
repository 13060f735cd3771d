"""The schedules by name. A new one is a file beside these, and a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ...plan.cut import Stage
from ...plan.plan import Plan
from . import gpipe, interleaved, one_f_one_b, zero_bubble
from .list_scheduler import Bounds, Lists, Times

__all__ = [
    "CHAINED",
    "DEFAULT",
    "LISTED",
    "SCHEDULES",
    "SEARCHED",
    "TIMED",
    "ZERO_BUBBLE",
    "Schedule",
    "first_of",
    "interleaves",
    "may_list",
]

Order = Callable[[Plan, Sequence[Stage], Times | None, Bounds | None], Lists]


@dataclass(frozen=True, slots=True)
class Schedule:
    """How the visits of a step are ordered, and what planners have to know of it."""

    order: Order
    """The visits of every peer of a plan."""
    bounded: bool = True
    """Whether what is live in a stage is bounded by how far it is from the last one."""
    several: bool = False
    """Whether peers are meant to hold several stages that are not beside each other."""
    timed: bool = False
    """Whether planners list it with the times of a plan's peers and links, once they have one. It
    is not searched with."""

    def live(self, stages: int, stage: int, microbatches: int, among: int = 1) -> int:
        """The most microbatches that a stage keeps, of all that its pipeline has; `among`:
        pipelines that share the stages."""
        return min(microbatches, (stages - stage) * among) if self.bounded else microbatches


LISTED = "listed"
"""1F1B as deep as memory allows, by the times of peers and links."""
ZERO_BUBBLE = "zero-bubble"
"""Likewise, with the weights' gradients of a backward apart."""
SCHEDULES: Mapping[str, Schedule] = {
    "1f1b": Schedule(one_f_one_b.order),
    "gpipe": Schedule(gpipe.order, bounded=False),
    "interleaved": Schedule(interleaved.order, several=True),
    LISTED: Schedule(one_f_one_b.order, timed=True),
    ZERO_BUBBLE: Schedule(zero_bubble.order, timed=True),
}
DEFAULT = "1f1b"
"""What planners begin with where the choice is theirs."""
SEARCHED = tuple(name for name, schedule in SCHEDULES.items() if not schedule.timed)
"""Those that planners search with."""
TIMED = tuple(name for name, schedule in SCHEDULES.items() if schedule.timed)
"""Those that planners list with the times of peers and links."""
CHAINED = tuple(name for name in SEARCHED if not SCHEDULES[name].several)
"""Those for peers with one stage, or with stages that follow each other."""


def first_of(asked: str) -> str:
    """The schedule to begin with where this one is asked for: the default for "auto", and for one
    that is listed once there is a plan."""
    return asked if asked in SEARCHED else DEFAULT


def may_list(asked: str) -> bool:
    """Whether planners may list the visits with the times of peers and links."""
    return asked == "auto" or SCHEDULES[asked].timed


def interleaves(asked: str) -> bool:
    """Whether a schedule is asked for in which peers hold several stages."""
    return asked in SCHEDULES and SCHEDULES[asked].several
