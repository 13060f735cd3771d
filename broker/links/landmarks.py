"""Whom a peer is measured against next, so that O(n) probes tell of n² links.

A peer is measured against `LINKS` others at most. These are the landmarks: the first two that
joined, then those farthest from them by latency. When many peers wait for a landmark, they measure
each other instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping

from ...dag.plan.plan import PeerId
from .links import Links
from .probed import Probed

__all__ = ["LINKS", "Landmarks"]

LINKS = 4
_MOST_WAITING = 16
"""Peers that may wait for landmarks before they measure each other."""


class Landmarks:
    """`chosen`: in the order in which they became landmarks. `short`: peers of the pool that have
    fewer links than they could have."""

    def __init__(self, peers: Mapping[PeerId, Probed], links: Links) -> None:
        self._peers = peers
        self._links = links
        self.chosen: list[PeerId] = []
        self.short: dict[PeerId, None] = {}
        self._counted = False  # whether `short` is of the members that are here now...
        self._ended: dict[PeerId, None] = {}  # ...but for these, which were measured since

    def changed(self) -> None:
        """Members came, went, or changed their state."""
        self.chosen = [p for p in self.chosen if p in self._peers]
        self._counted = False

    def measured(self, peer: PeerId) -> None:
        """A probe of it has ended."""
        self._ended[peer] = None

    def count(self, pool: list[PeerId], reach: Callable[[PeerId, PeerId], bool]) -> None:
        """Brings `short` up to date. While members stay as they are, only a probe's end changes
        that, and of its two peers alone: nobody becomes short."""
        ended, self._ended = self._ended, {}
        if self._counted and not any(p in self.short for p in ended):
            return
        most = min(LINKS, len(pool) - 1)

        def is_short(peer: PeerId) -> bool:
            tried = self._peers[peer].tried
            return len(tried) < most and any(
                q != peer and q not in tried and reach(peer, q) for q in pool
            )

        if self._counted:
            for peer in ended:
                if peer in self.short and not is_short(peer):
                    del self.short[peer]
        else:
            self.short = {p: None for p in pool if is_short(p)}
        self._counted = True

    def partner(
        self,
        peer: PeerId,
        others: Iterable[PeerId],
        busy: Container[PeerId],
        open_to: Callable[[PeerId], bool],
        now: float,
    ) -> PeerId | None:
        """Whom a peer of the pool is measured against next; None: nobody now. `others`: in the
        order in which they are asked where no landmark is free. `busy`: who takes part in a probe.
        `open_to`: whether another may be measured with it at all."""
        if len(self.chosen) < min(LINKS, 2):
            self.chosen += [peer] if peer not in self.chosen else []
        marks = [p for p in self.chosen if open_to(p)]
        if not marks and len(self.chosen) < LINKS:
            marks = [p for p in self._farthest(now) if open_to(p)]
        free = [p for p in marks if p not in busy]
        if free or (marks and len(self.short) <= _MOST_WAITING):
            return free[0] if free else None
        return next((p for p in others if p not in busy and open_to(p)), None)

    def _farthest(self, now: float) -> list[PeerId]:
        """The peer whose nearest landmark is farthest, which is one from now on; or nobody."""
        best: tuple[float, PeerId] | None = None
        for peer in self._peers:
            if peer in self.chosen:
                continue
            to = [e.latency_s for p in self.chosen if (e := self._links.get(peer, p, now))]
            near = min((x for x in to if not math.isnan(x)), default=-1.0)
            if near >= 0 and (best is None or near > best[0]):
                best = near, peer
        if best is None:
            return []
        self.chosen.append(best[1])
        return [best[1]]

    def validate(self) -> None:
        """Raises AssertionError when the state contradicts the rules of this module."""
        assert len(self.chosen) == len(set(self.chosen)) <= LINKS
        assert all(p in self._peers for p in self.chosen)
