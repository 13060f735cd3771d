"""Zero bubble (Qi et al. 2024, arXiv 2401.10241): a backward is two visits, and the gradients of
weights, which no other peer waits for, fill what would be waits, and the end of the step.

Backward goes before forward, and both before gradients of weights. What is live in a stage is
bounded as under 1F1B; apart from it, how many microbatches may wait for their weights' gradients
there: at the bound one of these goes before the next backward. A stage in which nothing is trained
has none.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ...plan.action import Action
from ...plan.cut import Stage
from ...plan.plan import PeerId, Plan
from .list_scheduler import Bounds, Lists, ListScheduler, Times
from .one_f_one_b import first, textbook_bounds

__all__ = ["order"]


def order(
    plan: Plan,
    stages: Sequence[Stage],
    times: Times | None = None,
    bounds: Bounds | None = None,
    waiting: Bounds | None = None,
    whole: Collection[int] = (),
) -> Lists:
    """The visits of every peer, with the textbook's bounds where none are given; `waiting`: by
    stage, the most microbatches of one holder whose weights' gradients wait, else as many as may
    be live; `whole`: stages whose gradients no other stage waits for, and whose backwards stay
    whole and wait as gradients of weights would."""
    apart = {
        (v.peer, v.stage)
        for route in plan.routes
        for v in route
        if stages[v.stage].has_backward and stages[v.stage].trainable and v.stage not in whole
    }
    scheduler = ListScheduler(plan, stages, times, halved=apart)
    most = textbook_bounds(plan, scheduler.peer_of) if bounds is None else bounds
    most_waiting = most if waiting is None else waiting

    def room(action: Action, peer: PeerId) -> bool:
        """Whether the gradients of weights may wait there."""
        return scheduler.waiting(peer, action.stage) < most_waiting[action.stage]

    def choose(peer: PeerId) -> Action | None:
        waits = scheduler.ready_backwards(peer)
        if backward := first([a for a in waits if a.stage not in whole]):
            if room(backward, peer):
                return backward
            weights = scheduler.ready_weights(peer)
            return first([a for a in weights if a.stage == backward.stage]) or backward
        forwards = [
            a
            for a in scheduler.ready_forwards(peer)
            if scheduler.live[peer, a.stage] < most[a.stage]
        ]
        return first(forwards or [*waits, *scheduler.ready_weights(peer)])

    return scheduler.run(choose)
