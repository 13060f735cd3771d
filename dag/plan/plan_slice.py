"""What one peer needs of a plan; `dag/schedule/slices.py` finds it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from .action import Action, Kind
from .plan import PeerId, Plan, PlanError
from .visit_lists import check_visits, halved, visits_by_peer

__all__ = ["PlanSlice"]


@dataclass(frozen=True)
class PlanSlice:
    """The part of a plan that is one peer's. A peer executes only the visits that its slice names
    (I4)."""

    peer: PeerId
    plan: Plan
    """With all stages, and of holders, routes, exchanges, codecs and keepers those that this peer
    has to do with. Of a microbatch that it has nothing to do with the route is empty."""
    visits: tuple[Action, ...]
    """Its forwards and backwards of a training step, in order."""
    evaluations: tuple[Action, ...]
    """The same of an evaluation."""
    slots: tuple[tuple[PeerId, str, int], ...]
    """Receive slots: source, role, how many."""
    place: int
    """Among all holders: its part in the norm."""
    ring: tuple[PeerId, ...] = ()
    """The holders beside it, to whom its snapshots may go when its keeper is gone."""
    whole: frozenset[int] = frozenset()
    """Microbatches of a step that leave stages out or visit them in another order: their routes are
    here whole."""

    full: PlanSlice | None = None
    """The same of its full steps, which `plan.full` counts; None: there are none."""

    def validate(self, operators: int) -> PlanSlice:
        """Returns itself when it is a slice of a plan for a graph of `operators` operators, as far
        as one peer can tell.

        Raises PlanError when the stages are not consecutive non-empty intervals that cover all
        operators, a stage has a holder twice, a route visits a stage that there is not, or a peer
        that it does not name for the stage, or the lists have other forwards than the routes give
        this peer, or a backward without its forward.
        """
        plan = self.plan
        bounds = [0, *(s.stop for s in plan.stages)]
        starts = [s.start for s in plan.stages]
        if starts != bounds[:-1] or any(a >= b for a, b in pairwise(bounds)) or not starts:
            raise PlanError("the stages of a slice are no row of non-empty intervals")
        if bounds[-1] != operators:
            raise PlanError(f"the stages cover {bounds[-1]} operators, the graph has {operators}")
        if plan.microbatch_size < 1 or not plan.routes:
            raise PlanError("a slice without a microbatch, or with one of no sample")
        if any(len(set(s.holders)) < len(s.holders) for s in plan.stages):
            raise PlanError("a slice has a holder of a stage twice")
        if not self.place < 1 << 20:
            raise PlanError(f"a slice has place {self.place}: expected less than a million")
        kinds = (
            (Kind.FORWARD, self.visits, plan.routes),
            (Kind.EVALUATE, self.evaluations, plan.evaluation_routes),
        )
        for kind, actions, routes in kinds:
            for v in (v for route in routes for v in route):
                if v.stage >= len(plan.stages):
                    raise PlanError(f"a route visits stage {v.stage} of {len(plan.stages)}")
                if v.peer == self.peer and v.peer not in plan.stages[v.stage].holders:
                    raise PlanError(f"{v.peer} runs stage {v.stage}, which it does not hold")
            check_visits(self.peer, actions, visits_by_peer(routes).get(self.peer, {}), kind)
        if (self.full is None) != (plan.full is None):
            raise PlanError("a slice has full steps, or their numbers, alone: expected both")
        if self.full is not None:
            other = self.full.validate(operators)
            if other.plan.full is not None or len(other.plan.routes) != len(plan.routes):
                raise PlanError("the full steps of a slice have other microbatches, or such steps")
            spans = [[(s.start, s.stop, s.recompute) for s in x.stages] for x in (plan, other.plan)]
            if spans[0] != spans[1] or halved(other.visits) != halved(self.visits):
                raise PlanError("the full steps of a slice have other stages, or other backwards")
        return self
