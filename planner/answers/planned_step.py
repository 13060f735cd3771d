"""One training step as a plan expects it: what each peer does, and when."""

from __future__ import annotations

from ...dag.plan.plan import Plan
from ...proto.broker_pb2 import PlannedRow
from ..base.interface import PlanRequest
from ..codecs.carried import CodedStepCost
from ..cost.cost_model import CostModel

__all__ = ["MOST_ROWS", "planned_step"]

MOST_ROWS = 64
"""Peers that have a row: those of the plan's first stages."""


def planned_step(request: PlanRequest, plan: Plan) -> list[PlannedRow]:
    """A row for each peer of a plan of the request, or of one of its other divisions of a batch,
    with the codecs of its links. Seconds since the step's begin."""
    form = request.form(plan.microbatch_size, plan.head_parts)
    assert form is not None, "the plan is one of the request's"
    cost = CodedStepCost(CostModel(form), plan)
    played, program = cost.timeline(cost.of_plan(plan.codecs)), cost.program
    rows = []
    for i, peer in enumerate(program.peers[:MOST_ROWS]):
        own = slice(program.first[i], program.first[i + 1])
        rows.append(
            PlannedRow(
                peer=peer,
                actions=map(str, program.actions[own]),
                start_s=played.start[own],
                end_s=played.end[own],
            )
        )
    return rows
