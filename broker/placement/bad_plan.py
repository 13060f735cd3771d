"""What a plan cannot be used for, however it was made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields

from ...dag.plan.plan import PeerId, Plan, PlanError
from ...dag.plan.report import PlanWithReport
from ...dag.schedule.convert_plan import plan_from_proto, plan_to_proto
from ...dag.schedule.convert_report import report_from_proto, report_to_proto
from ..events import ReplicasFormed
from ..runs.replica import Replica

__all__ = ["bad_formation", "bad_plan", "not_outlined"]

MOST_CHOICES = 400_000
"""Of stages that peers look at before each of their visits (`dag/schedule/visits.py`): some two
seconds of the broker's time, once for each term. Of 1,000 peers with a stage each and 16
microbatches there are 32,000."""


def bad_plan(planned: PlanWithReport, pairs: Sequence[tuple[PeerId, PeerId]]) -> str:
    """Why a run cannot begin with what a planner made; empty: it can. What does not come back as
    it was would be another plan to peers, and no journal with it could be read."""
    plan, report = planned
    try:
        plan.validate(plan.stages[-1].stop if plan.stages else 0)
        told = plan_from_proto(plan_to_proto(plan))
        said = report_from_proto(report_to_proto(report))
    except PlanError as error:
        return str(error)
    except (TypeError, ValueError, OverflowError, KeyError) as error:
        return f"it cannot be told to peers: {type(error).__name__}: {error}"
    other = [f.name for f in fields(Plan) if getattr(told, f.name) != getattr(plan, f.name)]
    other += [f.name for f in fields(report) if getattr(said, f.name) != getattr(report, f.name)]
    if other:
        return f"peers would be told of other {' and '.join(other)} than it has"
    if (choices := _choices(plan)) > MOST_CHOICES:
        return (
            f"its peers hold so many stages that putting their visits in order takes {choices} "
            f"choices: expected at most {MOST_CHOICES}, so fewer stages to a peer"
        )
    peers = plan.peers
    if any(a == b or a not in peers or b not in peers for a, b in pairs):
        return "it names links between peers that hold no stage"
    if len({frozenset(pair) for pair in pairs}) != len(pairs):
        return "it names a link twice"
    return ""


def not_outlined(plan: Plan) -> str:
    """Why no peer could be told its part of a plan; empty: each can."""
    return "" if plan.outline.stages else "it does not say what crosses its stages"


def bad_formation(first: Replica, event: ReplicasFormed) -> str:
    """Why a run cannot begin with what a planner formed; empty: it can."""
    needs, plans = first.run.requirements, event.plans
    if not plans:
        return "" if needs.undecided and event.formation.kind == "allreduce" else "it has no plan"
    if event.formation.kind != "local" or len(event.formation.replicas) != len(plans):
        count, kind = len(event.formation.replicas), event.formation.kind
        return f'it has {len(plans)} plans for {count} replicas of kind "{kind}"'
    if not needs.undecided and len(plans) != needs.replicas:
        return f"it has {len(plans)} replicas, the run {needs.replicas}"
    spec = first.run.spec
    if any(
        len(made.plan.routes) * len(plans) != spec.microbatches
        or made.plan.microbatch_size != spec.microbatch_size
        for made in plans
    ):
        return f"its plans do not share the {spec.microbatches} microbatches of a step"
    if len({p for made in plans for p in made.plan.peers}) < sum(len(m.plan.peers) for m in plans):
        return "a peer is in two replicas"
    return ""


def _choices(plan: Plan) -> int:
    held = Counter(holder for stage in plan.stages for holder in stage.holders)
    visits = Counter(visit.peer for route in plan.routes for visit in route)
    return sum(2 * held[peer] * count for peer, count in visits.items())
