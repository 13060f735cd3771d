"""Which free peers each of a run's replicas may be planned over, when several wait."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...proto.broker_pb2 import WAITING
from ..membership.member import Member
from ..runs.replica import Replica

__all__ = ["shared"]


def shared(
    replica: Replica, others: Iterable[Replica], members: Sequence[Member]
) -> tuple[Member, ...]:
    """Those of `members` that this one is planned over: all, unless others of its run wait too.
    Peers of one place stay together, and each of those that wait gets as many."""
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
    start, stop = len(ordered) * at // count, len(ordered) * (at + 1) // count
    return tuple(ordered[start:stop]) or tuple(members)
