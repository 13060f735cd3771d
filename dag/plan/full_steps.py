"""Steps in which every microbatch visits all stages, of a plan whose routes leave some out: the
first ones of a run and the last ones (`plan.skip_warmup`, `plan.skip_fade_out` of a job).

The number of a step says which kind it is, and the plan lists both: so whoever has the plan, or a
slice of it, knows the way of every microbatch in every step, wherever a term begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .visit import Route, Visits

__all__ = ["FullSteps"]


@dataclass(frozen=True, slots=True)
class FullSteps:
    """`routes[m]`: the visits of microbatch m in such a step, all stages in order, those of the
    plan's own route among them; empty in a slice, which has one of its own for these steps."""

    before: int
    """Steps below this one are full."""
    since: int
    """Steps from this one on are, too."""
    routes: tuple[Route, ...] = ()
    visits: Visits = ()
    """Forwards and backwards, as `Plan.visits`."""

    def has(self, step: int) -> bool:
        """Whether a step of the run, from 0, is full."""
        return not self.before <= step < self.since

    def problem(self, stages: int, routes: Sequence[Route]) -> str:
        """Say what is wrong with them in a plan of so many stages whose own routes are right;
        empty: nothing."""
        if len(self.routes) != len(routes):
            return (
                f"{len(self.routes)} microbatches have a route in full steps: expected "
                f"{len(routes)}"
            )
        for m, (route, own) in enumerate(zip(self.routes, routes, strict=True)):
            if [v.stage for v in route] != list(range(stages)):
                return (
                    f"microbatch {m} visits stages {[v.stage for v in route]} in full steps: "
                    f"expected 0 to {stages - 1} in order"
                )
            if other := [v for v in own if v not in route]:
                return (
                    f"microbatch {m} visits stage {other[0].stage} at {other[0].peer}, but not in "
                    "full steps: expected the same holder in both"
                )
        visits = {v for route in routes for v in route}
        if new := [v for route in self.routes for v in route if v not in visits]:
            return (
                f"{new[0].peer} runs stage {new[0].stage} in full steps alone: expected a holder "
                "that runs it in others as well"
            )
        return ""
