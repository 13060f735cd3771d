"""The schedules by name. A new one is a file beside these, and a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ...plan.cut import Stage
from ...plan.plan import Plan
from . import gpipe, interleaved, one_f_one_b
from .list_scheduler import Bounds, Lists, Times

__all__ = ["CHAINED", "DEFAULT", "SCHEDULES", "Schedule", "first_of", "interleaves"]

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

    def live(self, stages: int, stage: int, microbatches: int, among: int = 1) -> int:
        """The most microbatches that a stage keeps, of all that its pipeline has; `among`:
        pipelines that share the stages."""
        return min(microbatches, (stages - stage) * among) if self.bounded else microbatches


SCHEDULES: Mapping[str, Schedule] = {
    "1f1b": Schedule(one_f_one_b.order),
    "gpipe": Schedule(gpipe.order, bounded=False),
    "interleaved": Schedule(interleaved.order, several=True),
}
DEFAULT = "1f1b"
"""What planners begin with where the choice is theirs."""
CHAINED = tuple(name for name, schedule in SCHEDULES.items() if not schedule.several)
"""Those for peers with one stage, or with stages that follow each other."""


def first_of(asked: str) -> str:
    """The schedule that is asked for; of "auto" the default."""
    return DEFAULT if asked == "auto" else asked


def interleaves(asked: str) -> bool:
    """Whether a schedule is asked for in which peers hold several stages."""
    return asked in SCHEDULES and SCHEDULES[asked].several
