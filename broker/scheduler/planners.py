"""All planners by name, and the one that a request asks for."""

from __future__ import annotations

from ...dag.plan import Plan
from .auto import BASELINES, auto
from .coded import plan_with_codecs
from .exact import exact
from .interface import NoPlan, Planner, PlanRequest

__all__ = ["PLANNERS", "plan"]

PLANNERS: dict[str, Planner] = {**BASELINES, "exact": exact, "auto": auto}
"""The names of `plan.scheduler`."""


def plan(request: PlanRequest) -> Plan:
    """By the planner of `request.options.scheduler`, with the codecs of `request.options.codecs`.
    Raises NoPlan."""
    name = request.options.scheduler
    if name not in PLANNERS:
        raise NoPlan(f"no planner is called {name!r}: expected one of {', '.join(PLANNERS)}")
    return plan_with_codecs(request, PLANNERS[name])
