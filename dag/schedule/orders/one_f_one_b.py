"""1F1B (PipeDream-flush, Narayanan et al. 2021): backward before forward, and a bound on the
microbatches that are live in a stage of a holder.

The bound is K - index for K stages, as in the textbook; more, the number of holders from this stage
on over those of this stage, where later stages have more holders and would starve otherwise.
Evaluations go the same way, without a backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...plan.action import Action
from ...plan.cut import Stage
from ...plan.plan import PeerId, Plan
from ...plan.routes import swaps
from .list_scheduler import Bounds, Lists, ListScheduler, Times

__all__ = ["evaluation_order", "first", "order", "textbook_bounds"]


def order(
    plan: Plan, stages: Sequence[Stage], times: Times | None = None, bounds: Bounds | None = None
) -> Lists:
    """The visits of every peer, with the textbook's bounds where none are given."""
    return _bounded(plan, ListScheduler(plan, stages, times), bounds)


def evaluation_order(plan: Plan, stages: Sequence[Stage]) -> Lists:
    """The visits of every peer in one evaluation; all empty when the plan evaluates nothing."""
    return _bounded(plan, ListScheduler(plan, stages, training=False), None)


def _bounded(plan: Plan, scheduler: ListScheduler, bounds: Bounds | None) -> Lists:
    most = textbook_bounds(plan, scheduler.peer_of) if bounds is None else bounds

    def choose(peer: PeerId) -> Action | None:
        ready = scheduler.ready_backwards(peer) or [
            a
            for a in scheduler.ready_forwards(peer)
            if scheduler.live[peer, a.stage] < most[a.stage]
        ]
        return first(ready)

    return scheduler.run(choose)


def first(ready: Sequence[Action]) -> Action | None:
    """The lowest microbatch first, then the stage nearest to where that microbatch is going."""
    if len(ready) < 2:
        return ready[0] if ready else None
    return min(ready, key=lambda a: (a.microbatch, -a.stage))


def textbook_bounds(plan: Plan, peer_of: Sequence[Mapping[int, PeerId]]) -> dict[int, int]:
    """By stage, the most live microbatches of one holder; `peer_of`: by microbatch and stage."""
    stages = len(plan.stages)
    found, from_here = dict.fromkeys(range(stages), 0), 0
    for i in range(stages - 1, -1, -1) if peer_of else ():
        width = len({peers[i] for peers in peer_of if i in peers})
        from_here += width
        found[i] = max(stages - i, -(-from_here // width))
    for a, b in swaps(plan):  # each is the first of the two for some microbatches
        found[b] = found[a]
    return found
