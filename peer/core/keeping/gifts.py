"""Copies of snapshots on their way to others, part by part. Pure: no I/O, no clock, no threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from ....dag.plan.plan import PeerId
from ....net.links.frame import FrameKey
from ....proto import broker_pb2
from .. import events as e
from ..snapshots import SnapshotId

__all__ = ["SLOTS", "Gifts"]

SLOTS = 2
"""Parts that may be there or on their way from one peer: one arrives while one is written."""


@dataclass
class _Giving:
    """Parts for one peer, in order. A part is read, and in memory, from its turn until it is
    acknowledged."""

    waiting: deque[FrameKey] = field(default_factory=deque)
    under_way: set[FrameKey] = field(default_factory=set)


class Gifts:
    """What `peer` gives of the snapshots that it has, `held`: those with their numbers of parts."""

    def __init__(
        self, peer: PeerId, held: Mapping[SnapshotId, tuple[broker_pb2.Snapshot, int]]
    ) -> None:
        self._peer, self._held = peer, held
        self._to: dict[str, _Giving] = {}

    def clear(self) -> None:
        """Give nothing more of what has not left."""
        self._to.clear()

    def give(self, snapshot: SnapshotId, to: str, term: int) -> list[e.Instruction]:
        """Give a snapshot under the plan of a term, if it is here."""
        if snapshot not in self._held:
            return []  # the broker was told so; whoever awaits it complains in its time
        giving = self._to.setdefault(to, _Giving())
        if snapshot.term == term:  # the newest counts: the broker has given up those before it
            older = [k for k in giving.waiting if SnapshotId.of_frame(k).term == term]
            giving.waiting = deque(k for k in giving.waiting if k not in older)
        _, parts = self._held[snapshot]
        giving.waiting += (snapshot.frame(term, i, parts, self._peer, to) for i in range(parts))
        return self._go_on(giving)

    def acknowledged(self, key: FrameKey) -> list[e.Instruction]:
        """A part that was given is there, or never will be: the next one, if there is one."""
        giving = self._to.get(key.destination)
        if giving is None or key not in giving.under_way:
            return []
        giving.under_way.remove(key)
        return self._go_on(giving)

    def _go_on(self, giving: _Giving) -> list[e.Instruction]:
        out: list[e.Instruction] = []
        while giving.waiting and len(giving.under_way) < SLOTS:
            key = giving.waiting.popleft()
            if SnapshotId.of_frame(key) in self._held:
                giving.under_way.add(key)
                out.append(e.SendFrame(key))
        return out
