"""Interleaved 1F1B (Narayanan et al. 2021, section 2.2), for peers that hold several stages: where
each has one, it is 1F1B.

Microbatches go through a peer in rounds, depth first: a round goes through one of the peer's stages
and then the next, backwards from the last one to the first. A round is as long as the way from a
stage of the peer to its next: K for K peers in a circle. Backward goes before forward, and the
bound is on what is live on a peer, all its stages together: the units that the first microbatch
needs to come back to the peer as a gradient, when nothing is bound. For stage i on peer i mod K, v
stages each, that is 2(K - r - 1) + (v - 1)K + 1 for peer r, and M microbatches (a multiple of K)
leave a bubble of (K - 1) / (vM + K - 1). In other plans the lowest unfinished microbatch may exceed
it by the number of the peer's stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...plan.action import Action, Kind
from ...plan.cut import Stage
from ...plan.plan import PeerId, Plan
from . import one_f_one_b
from .list_scheduler import Bounds, Lists, ListScheduler, Times
from .one_f_one_b import textbook_bounds

__all__ = ["order", "room_of"]


def order(
    plan: Plan, stages: Sequence[Stage], times: Times | None = None, bounds: Bounds | None = None
) -> Lists:
    """The visits of every peer; `bounds` are those of the stages, which a peer never has less room
    than."""
    scheduler = ListScheduler(plan, stages, times)
    if all(len(held) < 2 for held in scheduler.holding.values()):
        return one_f_one_b.order(plan, stages, times, bounds)
    rounds, room = _rounds(scheduler), room_of(plan, stages, bounds)
    return scheduler.run(lambda peer: _choose(scheduler, peer, rounds[peer], room.get(peer)))


def room_of(plan: Plan, stages: Sequence[Stage], bounds: Bounds | None = None) -> dict[PeerId, int]:
    """By peer, the most live visits of all its stages together."""
    free = ListScheduler(plan, stages)
    rounds = _rounds(free)
    free.run(lambda peer: _choose(free, peer, rounds[peer], None), until_round_trips=True)
    most = textbook_bounds(plan, free.peer_of) if bounds is None else bounds
    return {
        peer: max(int(free.round_trip[peer]), *(most[i] for i in held))
        for peer, held in free.holding.items()
        if peer in free.round_trip
    }


def _choose(
    scheduler: ListScheduler, peer: PeerId, rounds: Mapping[int, int], room: int | None
) -> Action | None:
    """Round, stage, microbatch; backward and forward in turn while there is room."""
    backwards, forwards = scheduler.ready_backwards(peer), scheduler.ready_forwards(peer)
    live = sum(scheduler.live[peer, i] for i in scheduler.holding[peer])
    if room is not None and live >= room:
        forwards = [a for a in forwards if a.microbatch == scheduler.lowest]
    if backwards and not (forwards and scheduler.last.get(peer) is Kind.BACKWARD):
        return min(backwards, key=lambda a: (rounds[a.microbatch], -a.stage))
    return min(forwards, key=lambda a: (rounds[a.microbatch], a.stage), default=None)


def _rounds(scheduler: ListScheduler) -> dict[PeerId, dict[int, int]]:
    """By peer and microbatch, the round in which the peer has it."""
    visited: dict[PeerId, dict[int, int]] = {peer: {} for peer in scheduler.peers}
    length = dict.fromkeys(scheduler.peers, 1)
    for m, route in enumerate(scheduler.routes):
        before: dict[PeerId, int] = {}
        for visit in route:
            gap = visit.stage - before.get(visit.peer, visit.stage)
            length[visit.peer] = max(length[visit.peer], gap)
            before[visit.peer] = visit.stage
            visited[visit.peer].setdefault(m, len(visited[visit.peer]))
    return {
        peer: {m: place // length[peer] for m, place in found.items()}
        for peer, found in visited.items()
    }
