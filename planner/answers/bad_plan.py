"""What a plan cannot be used for, however it was made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields

from ...dag.plan.cut import bare_stages
from ...dag.plan.plan import PeerId, Plan, PlanError
from ...dag.plan.report import PlanWithReport
from ...dag.schedule.convert_plan import plan_from_proto, plan_to_proto
from ...dag.schedule.convert_report import report_from_proto, report_to_proto
from ...dag.schedule.schedule import check_listed

__all__ = ["bad_plan"]

MOST_CHOICES = 400_000
"""Of stages that peers look at before each of their visits (`dag/schedule/orders/`) when a lost
holder's are done by its siblings: some two
seconds of the broker's time, once for each term. Of 1,000 peers with a stage each and 16
microbatches there are 32,000."""


def bad_plan(planned: PlanWithReport, pairs: Sequence[tuple[PeerId, PeerId]]) -> str:
    """Why a run cannot begin with what a planner made; empty: it can. What does not come back as
    it was would be another plan to peers, and no journal with it could be read."""
    plan, report = planned
    try:
        plan.validate(plan.stages[-1].stop if plan.stages else 0)
        if plan.outline.stages:
            check_listed(plan, bare_stages(plan))
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


def _choices(plan: Plan) -> int:
    held = Counter(holder for stage in plan.stages for holder in stage.holders)
    visits = Counter(visit.peer for route in plan.routes for visit in route)
    return sum(2 * held[peer] * count for peer, count in visits.items())
