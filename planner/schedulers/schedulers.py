"""All planners by name, and the one that a request asks for."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ...dag.plan.report import PlanWithReport
from ..base.interface import NoPlan, Planner, PlanRequest
from ..skipping.skipping import skipping
from ..swarm.swarm import swarm
from .auto import BASELINES, auto
from .coded import plan_with_codecs
from .swapped import swapped

__all__ = ["PLANNERS", "plan"]

PLANNERS: dict[str, Planner] = {**BASELINES, "swarm": swarm, "auto": auto}
"""The names of `plan.scheduler`."""


def plan(request: PlanRequest) -> PlanWithReport:
    """By the planner of `request.options.scheduler`, with the codecs of `request.options.codecs`.
    Raises NoPlan."""
    name = request.options.scheduler
    if name not in PLANNERS:
        raise NoPlan(f"no planner is called {name!r}: expected one of {', '.join(PLANNERS)}")
    planner = PLANNERS[name]
    if request.options.swaps:
        planner = partial(swapped, planner=planner)
    elif request.options.reroutes:
        planner = partial(skipping, planner=planner)
    try:
        return plan_with_codecs(request, planner)
    except NoPlan as error:
        none = name in ("auto", "op-fence") or request.options.swaps or request.options.reroutes
        other = None if none else _fitting(request)
        if other is None or error.code != "memory":
            raise
        raise NoPlan(
            f'{error.reason}; scheduler = "auto" has a plan, with a step of '
            f"{other.step_s:.3g} s or less",
            error.code,
            error.short_bytes,
        ) from None


def _fitting(request: PlanRequest) -> PlanWithReport | None:
    """A plan that needs no such shares as the asked planner makes."""
    options = replace(request.options, scheduler="op-fence")
    try:
        return PLANNERS["op-fence"](replace(request, options=options))
    except NoPlan:
        return None
