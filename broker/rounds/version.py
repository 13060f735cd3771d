"""The version that a round made, by what its holders say of it. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from ...dag.plan.plan import PeerId, Plan
from ...proto.broker_pb2 import RoundDone, RoundMember, RoundReport
from ..records.rounds import RoundRecord, microbatches_of

__all__ = ["done_of", "hash_of"]


def hash_of(plan: Plan, said: Mapping[PeerId, RoundReport]) -> int | None:
    """One hash of all that a replica with this plan has made; None where its own holders differ."""
    total = 0
    for k, slot in enumerate(plan.stages):
        hashes = {
            said[p].hashes[plan.stages_of(p).index(k)]
            for p in slot.holders
            if len(said[p].hashes) == len(plan.stages_of(p))
        }
        if len(hashes) != 1:
            return None
        total += hashes.pop()
    return total % 2**64


def done_of(
    record: RoundRecord,
    made: Mapping[int, Mapping[PeerId, RoundReport]],
    version: int,
    joined: Iterable[RoundMember],
    seconds: float,
) -> RoundDone:
    """The event of its commit. `made`: by replica, what its holders say; `version`: its hash;
    `joined`: who took it from others; `seconds`: since the round before was committed."""
    said = [report for reports in made.values() for report in reports.values()]
    drifts = [
        math.sqrt(sum(_sound(r.drift) for r in made[m.replica].values()))
        for m in record.members
        if m.replica in made
    ]
    inside = sum(microbatches_of(record.work[m.replica]) for m in record.members)
    return RoundDone(
        round=record.round,
        attempt=record.attempt,
        members=record.members,
        hash=version,
        drift=sum(drifts) / max(1, len(drifts)),
        sent_bytes=min(sum(r.sent_bytes for r in said), 2**64 - 1),
        waited_s=max((_sound(r.waited_s) for r in said), default=0.0),
        seconds=seconds,
        microbatches=record.committed + inside,
        joined=joined,
    )


def _sound(reported: float) -> float:
    """A peer may report anything; what is no number from 0 on counts as 0."""
    return reported if 0 <= reported < math.inf else 0.0
