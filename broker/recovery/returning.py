"""Holders that a run waits for, since the broker was started again or their stream broke.

A holder counts as back when it attaches and says that it holds the run in its present term. One
that comes without it, or not within its lease, is lost. Peers that only keep copies may come back
in the same way, and nobody waits for them.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...dag.plan.plan import PeerId

__all__ = ["ReattachWindow"]


class ReattachWindow:
    """The holders that one run waits for. `until`: when patience ends, on the broker's clock."""

    def __init__(self, peers: Iterable[PeerId], until: float) -> None:
        self.until = until
        self._away = dict.fromkeys(peers)

    def __repr__(self) -> str:
        return f"<ReattachWindow: {', '.join(self._away)} until {self.until:g} s>"

    def __bool__(self) -> bool:
        """Whether somebody is awaited."""
        return bool(self._away)

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._away

    @property
    def away(self) -> tuple[PeerId, ...]:
        """Who is not back yet."""
        return tuple(self._away)

    def wait_for(self, peer: PeerId, until: float) -> None:
        """For this one too."""
        self.until = min(until, self.until) if self._away else until
        self._away[peer] = None

    def back(self, peer: PeerId) -> None:
        """It came, with the run or without it."""
        del self._away[peer]
