"""All planners by name, and the one that a request asks for."""

from __future__ import annotations

from ...dag.plan import Plan
from .auto import auto
from .baselines import equal_compute, uniform
from .exact import exact
from .interface import NoPlan, Planner, PlanRequest
from .op_fence import op_fence

__all__ = ["BASELINES", "PLANNERS", "plan"]

BASELINES: dict[str, Planner] = {
    "uniform": uniform,
    "equal-compute": equal_compute,
    "op-fence": op_fence,
}
"""What `auto` is compared with, and begins from."""
PLANNERS: dict[str, Planner] = {**BASELINES, "exact": exact, "auto": auto}
"""The names of `plan.scheduler`."""


def plan(request: PlanRequest) -> Plan:
    """By the planner of `request.options.scheduler`. Raises NoPlan."""
    name = request.options.scheduler
    if name not in PLANNERS:
        raise NoPlan(f"no planner is called {name!r}: expected one of {', '.join(PLANNERS)}")
    return PLANNERS[name](request)
