"""A run that no plan was found for: what it needs, and when it is worth asking again.

A planner that was refused by the memory of some peers is refused by fewer of them, too. So the run
waits until somebody is free who was not asked. It is overtaken unless peers that work now have what
is short.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ...dag.plan.plan import PeerId
from ..membership.member import Member
from .waiting import WaitReason

__all__ = ["PlanShortage"]


@dataclass(frozen=True, slots=True)
class PlanShortage:
    """What a planner said. `asked`: the incarnations that it was asked with; `short_bytes`: of
    device memory, 0 where more peers may help with however little."""

    asked: Mapping[PeerId, tuple[str, int]]
    code: str
    reason: str
    short_bytes: int

    def open_to(self, free: Iterable[Member]) -> bool:
        """Whether another plan may be found with these."""
        return any(self.asked.get(m.id) != (m.boot, m.counter) for m in free)

    def waits(self, able: Iterable[Member]) -> WaitReason:
        """Why the run waits; `able`: all members that could take part if they were free."""
        others = [m for m in able if m.id not in self.asked]
        working = [m for m in others if m.run is not None]
        text = self.reason
        if working:
            work = "peer works" if len(working) == 1 else "peers work"
            text += f"; {len(working)} more {work} for other runs"
        if resting := len(others) - len(working):
            text += f"; {resting} more rest{'s' if resting == 1 else ''}"
        theirs = sum(m.profile.device_memory_bytes for m in working)
        return WaitReason(self.code, text, blocks=bool(working) and theirs >= self.short_bytes)
