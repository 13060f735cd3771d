"""Which free peers each of a run's replicas may be planned over, when several wait."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from ...proto.broker_pb2 import WAITING
from ..membership.member import Member
from ..runs.replica import Replica

__all__ = ["shared"]


def shared(
    replica: Replica, others: Iterable[Replica], members: Sequence[Member]
) -> tuple[Member, ...]:
    """Return the `members` that this replica is planned over: all, unless others of its run wait
    too. Each of those that wait gets about as many, and places are cut only where there are too
    few. They stay in the order of `members`, that of joining, in which planners take them."""
    waiting = [
        r
        for r in others
        if r.record.run.id == replica.record.run.id
        and r.record.phase == WAITING
        and not r.record.paused
    ]
    count = max(1, len(waiting))
    ordered = sorted(members, key=lambda m: (m.profile.place, m.id))
    at = next((i for i, r in enumerate(waiting) if r is replica), 0)
    places = [m.profile.place for m in ordered]
    borders = [i for i, (a, b) in enumerate(pairwise(places), 1) if a != b]
    even = [len(ordered) * i // count for i in range(count + 1)]
    if len(borders) >= count - 1:
        inner, left = list[int](), borders
        for i, cut in enumerate(even[1:-1], 1):
            room = left[: len(left) - (count - 1 - i)]  # as many as the later cuts need remain
            inner.append(min(room, key=lambda border: abs(border - cut)))
            left = [b for b in left if b > inner[-1]]
        even = [0, *inner, len(ordered)]
    mine = {m.id for m in ordered[even[at] : even[at + 1]]}
    return tuple(m for m in members if m.id in mine or not mine)
