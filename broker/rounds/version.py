"""The version that a round made, by what its holders say of it, and who made another one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping

from ...dag.plan.plan import PeerId, Plan
from ...proto.broker_pb2 import RoundDone, RoundMember, RoundReport
from ..records.rounds import RoundRecord, microbatches_of
from ..runs.run import Run
from .disputes import Disputes

__all__ = ["Versions", "done_of", "most_made"]

MOST_REPORTED = 1e30


class Versions:
    """What replicas have made in the round under way; not durable. made: by replica, what its
    holders say."""

    def __init__(self, run: Run, disputes: Disputes) -> None:
        self._run, self._disputes = run, disputes
        self.made: dict[int, dict[PeerId, RoundReport]] = {}

    @property
    def present(self) -> list[int]:
        """Numbers of replicas whose peers can be spoken to, but for those that are left out."""
        replicas = ((r.record.number, r) for r in self._run.replicas)
        return [
            n
            for n, r in replicas
            if r.record.running and not r.context.away and not self._disputes.is_out(n)
        ]

    def add(self, number: int, peer: PeerId, said: RoundReport) -> None:
        self.made.setdefault(number, {})[peer] = said

    def has_made(self, number: int) -> bool:
        peers = self._run.replicas[number].record.peers
        return set(self.made.get(number, ())) >= set(peers)

    def hash_of(self, number: int) -> int | None:
        """None: its holders differ."""
        plan = self._run.replicas[number].record.plan
        return _hash_of(plan, self.made[number]) if plan is not None else None


def _hash_of(plan: Plan, said: Mapping[PeerId, RoundReport]) -> int | None:
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


def most_made(hashes: Mapping[int, int | None]) -> tuple[int, list[int]] | None:
    """The hash that most replicas came to, and which they are; None: holders of each differ."""
    known = Counter(h for h in hashes.values() if h is not None)
    if not known:
        return None
    version = known.most_common(1)[0][0]
    return version, [n for n, h in hashes.items() if h == version]


def done_of(
    record: RoundRecord,
    made: Mapping[int, Mapping[PeerId, RoundReport]],
    version: int,
    joined: Iterable[RoundMember],
    seconds: float,
    exchange_s: float,
) -> RoundDone:
    """The event of its commit. `made`: by replica, what its holders say; `version`: its hash;
    `joined`: who took it from others; `seconds`: since the round before was committed;
    `exchange_s`: since the exchange was planned."""
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
        exchange_s=exchange_s,
        microbatches=record.committed + inside,
        joined=joined,
    )


def _sound(reported: float) -> float:
    """A peer may report anything; what is no number from 0 on counts as 0, and what no run comes to
    as MOST_REPORTED: sums of these are finite."""
    return min(reported, MOST_REPORTED) if 0 <= reported < math.inf else 0.0
