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
        self._awaited = dict.fromkeys(peers, (until, ""))

    def __repr__(self) -> str:
        return f"<ReattachWindow: {', '.join(self._awaited)} until {self.until:g} s>"

    def __bool__(self) -> bool:
        """Whether somebody is awaited."""
        return bool(self._awaited)

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._awaited

    @property
    def until(self) -> float:
        """When the first of their leases ends."""
        return min((until for until, _ in self._awaited.values()), default=math.inf)

    @property
    def peers(self) -> tuple[PeerId, ...]:
        """Peers that are not back yet."""
        return tuple(self._awaited)

    @property
    def broken(self) -> dict[PeerId, str]:
        """Peers of these whose stream broke, and how."""
        return {peer: why for peer, (_, why) in self._awaited.items() if why}

    def wait_for(self, peer: PeerId, until: float, why: str) -> None:
        """For this one too, whose stream broke."""
        self._awaited[peer] = until, why

    def back(self, peer: PeerId) -> None:
        """Note that a peer came, with the replica or without it."""
        del self._awaited[peer]

    def allow(self, seconds: float) -> None:
        """The broker itself stood still for so long."""
        self._awaited = {p: (until + seconds, why) for p, (until, why) in self._awaited.items()}
