"""Holders that a replica waits for, since the broker was started again or their stream broke.

A holder counts as back when it attaches and says that it holds the replica in its present term. One
that comes without it, or not within its lease, is lost. Peers that only keep copies may come back
in the same way, and nobody waits for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from ...dag.plan.plan import PeerId

__all__ = ["ReattachWindow"]


class ReattachWindow:
    """The holders that are awaited, each until its lease ends on the broker's clock."""

    def __init__(self, peers: Iterable[PeerId] = (), until: float = math.inf) -> None:
        self._until = dict.fromkeys(peers, until)
        self._why = dict.fromkeys(self._until, "")

    def __repr__(self) -> str:
        return f"<ReattachWindow: {', '.join(self._why)} until {self.until:g} s>"

    def __bool__(self) -> bool:
        """Whether somebody is awaited."""
        return bool(self._why)

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._why

    @property
    def until(self) -> float:
        """When the first of their leases ends."""
        return min(self._until.values(), default=math.inf)

    @property
    def peers(self) -> tuple[PeerId, ...]:
        """Peers that are not back yet."""
        return tuple(self._why)

    @property
    def broken(self) -> dict[PeerId, str]:
        """Peers of these whose stream broke, and how."""
        return {peer: why for peer, why in self._why.items() if why}

    def wait_for(self, peer: PeerId, until: float, why: str) -> None:
        """For this one too, whose stream broke."""
        self._until[peer], self._why[peer] = until, why

    def back(self, peer: PeerId) -> None:
        """Note that a peer came, with the replica or without it."""
        del self._until[peer], self._why[peer]

    def allow(self, seconds: float) -> None:
        """The broker itself stood still for so long."""
        for peer in self._until:
            self._until[peer] += seconds
