"""GPipe (Huang et al. 2019): all forwards of a peer, then all its backwards."""

from __future__ import annotations

from collections.abc import Sequence

from ...plan.action import Action
from ...plan.cut import Stage
from ...plan.plan import PeerId, Plan
from .list_scheduler import Bounds, Lists, ListScheduler, Times
from .one_f_one_b import first

__all__ = ["order"]


def order(
    plan: Plan, stages: Sequence[Stage], times: Times | None = None, bounds: Bounds | None = None
) -> Lists:
    """The visits of every peer; bounds have no meaning here."""
    scheduler = ListScheduler(plan, stages, times)

    def choose(peer: PeerId) -> Action | None:
        backwards = not scheduler.forwards_left(peer)
        ready = scheduler.ready_backwards if backwards else scheduler.ready_forwards
        return first(ready(peer))

    return scheduler.run(choose)
