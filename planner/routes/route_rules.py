"""What a route that skips and reorders may do (SkipPipe, arXiv 2502.19913).

    order       stages of one microbatch in the order of its visits; stage 0 comes first
    frontier    the furthest stage that was visited so far
    swap        a visit of a stage below the frontier; it has to be the one just below
    lane        one microbatch on its way through a first node at a time; a node of stage 0 has as
                many lanes as it keeps microbatches
    wave        one microbatch of each lane; in every wave each stage gets the same number of visits

After its last stage a microbatch goes back to its first node for the loss, and the backward takes
the same way in reverse.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

__all__ = ["LanePath", "Order", "RouteRules", "orders_of"]

Order = tuple[int, ...]
LanePath = tuple[tuple[int, int], ...]
"""The visits of one microbatch: (stage, node)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteRules:
    """The rules of a search; those of SkipPipe's experiment, with 6 stages and 4 visits, as
    defaults. Raises ValueError for rules that no route can keep."""

    stages: int = 6
    length: int = 4
    """Stages that a microbatch visits, the first one included."""
    swaps: int = 2
    """The most swaps of a route; 0: stages in order."""
    look_ahead: int = 4
    """The most stages that the next visit is away from the frontier."""
    memory: int = 3
    """Microbatches that a node takes in one wave."""

    def __post_init__(self) -> None:
        if not 2 <= self.length <= self.stages:
            raise ValueError(
                f"routes of {self.length} stages: expected 2 to {self.stages}, which there are"
            )
        if self.memory < 1 or self.swaps < 0 or self.look_ahead < 1:
            raise ValueError(
                f"memory {self.memory}, swaps {self.swaps}, look-ahead {self.look_ahead}: expected "
                "at least 1, 0 and 1"
            )
        if self.look_ahead * (self.length - 1) < self.stages - 1:
            raise ValueError(
                f"stage {self.stages - 1} is never visited: {self.length - 1} visits, each at most "
                f"{self.look_ahead} stages further, end at {self.look_ahead * (self.length - 1)}"
            )

    def visits_per_stage(self, lanes: int) -> int:
        """Visits of each stage but the first in one wave of so many microbatches: the same for all,
        rounded up."""
        return -(-lanes * (self.length - 1) // (self.stages - 1))


@lru_cache(maxsize=100_000)
def orders_of(rules: RouteRules, stages: tuple[int, ...]) -> tuple[Order, ...]:
    """The permitted orders of a set of stages (ascending, 0 included); the ascending one, where it
    is permitted, comes first."""
    found: list[Order] = []

    def longer(order: Order, frontier: int, swaps: int, rest: tuple[int, ...]) -> None:
        if not rest:
            found.append(order)
        # Whatever is two or more below the frontier can never be visited any more.
        elif rest[0] >= frontier - 1:
            for stage in rest:
                swapped = stage < frontier
                if stage > frontier + rules.look_ahead or swaps + swapped > rules.swaps:
                    break
                left = tuple(s for s in rest if s != stage)
                longer((*order, stage), max(frontier, stage), swaps + swapped, left)

    longer((0,), 0, 0, stages[1:])
    return tuple(sorted(found, key=lambda order: (order != stages, order)))
