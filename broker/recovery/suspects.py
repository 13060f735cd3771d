"""Peers of a replica that did not do their part, or that others blame.

- One that blames another, or says that the run itself cannot go on, is taken at its word when a
  second one has said so as well; before, it is the one that goes.
- A peer that was blamed for a fault is left out for a while, that doubles each time. One that is
  lost again and again is left out for some seconds, and asked after all others for a while that
  doubles: a run that would wait goes on with it, as that costs nobody a step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from ...dag.plan.plan import PeerId

__all__ = ["SuspectTracker"]

_AWAY_S = 30.0
_MOST_AWAY_S = 3600.0
_TRIES = 4
_FLAPS_S = 5.0
_COUNTED = 5
"""Newest losses that say how often there are some."""


class SuspectTracker:
    """Peers of one replica that do not do their part. `tries`: how often others were asked at the
    present step."""

    def __init__(self) -> None:
        self.tries = 0
        self._step = -1
        self._blamed: set[PeerId] = set()
        """Peers that were blamed at the present step; "" where it was nobody."""
        self.claims: dict[PeerId, str] = {}
        """By peer of the run, the code with which it said last that the run cannot go on anywhere;
        one for all replicas of a run (`Run`)."""
        self.liars: set[PeerId] = set()
        """Peers that are out for good, as a lie of theirs was proved; one for all replicas of a run
        (`Run`)."""
        self._excused: dict[PeerId, int] = {}
        """By peer, at which step it had the term begin once more."""
        self._until: dict[PeerId, float] = {}
        self._away_s: dict[PeerId, float] = {}
        self._losses: dict[PeerId, int] = {}
        self._lost_at: deque[float] = deque(maxlen=_COUNTED)
        self._shaky_until: dict[PeerId, float] = {}
        self._accused: dict[PeerId, dict[PeerId, None]] = {}
        """Of whom others said that it does not do its part, and who did."""

    def tries_at(self, step: int) -> int:
        """How often somebody was blamed at this step before."""
        return self.tries if step == self._step else 0

    def again(self, peers: Iterable[PeerId], step: int, now: float) -> bool:
        """Blame these; return whether it is worth another try. It is not when the same step failed
        so often with others in their places, or with nobody to blame. One peer alone, though it
        fails again and again, only waits longer each time: its word does not end the run."""
        if step != self._step:
            self.tries, self._step, self._blamed = 0, step, set()
        self.tries += 1
        self._blamed.update(peers := tuple(peers) or (PeerId(""),))
        for peer in peers:
            self.leave_out(peer, now)
        return self.tries <= _TRIES or (len(self._blamed) == 1 and PeerId("") not in self._blamed)

    def claim(self, by: PeerId, code: str) -> bool:
        """Note that a peer says the run cannot go on anywhere; return whether another has said so
        with the same code."""
        self.claims[by] = code
        return any(said == code for peer, said in self.claims.items() if peer != by)

    def leave_out(self, peer: PeerId, now: float) -> None:
        """Leave a peer out for a while, that doubles each time."""
        away = self._away_s[peer] = min(_MOST_AWAY_S, 2 * self._away_s.get(peer, _AWAY_S / 2))
        self._until[peer] = now + away

    def excuses(self, peer: PeerId, step: int) -> bool:
        """Whether a peer may have the term begin once more with all: once at a step."""
        first = self._excused.get(peer) != step
        self._excused[peer] = step
        return first

    def accuse(self, by: PeerId, peer: PeerId) -> bool:
        """One says that it hears nothing of another. Whether that one is to blame: if a second
        one has said so too. A single word shows no more than that what is between them is bad, and
        then it is who spoke that goes: an honest one loses as little by that as the other would."""
        said = self._accused.setdefault(peer, {})
        said[by] = None
        return len(said) > 1

    def lost(self, peer: PeerId, now: float) -> None:
        """Count a loss of a peer (its stream ended, say). The first one is nobody's fault."""
        self._lost_at.append(now)
        n = self._losses[peer] = self._losses.get(peer, 0) + 1
        if n > 1:
            self._until[peer] = max(now + _FLAPS_S, self._until.get(peer, 0.0))
            self._shaky_until[peer] = now + min(_MOST_AWAY_S, _FLAPS_S * 2 ** min(n - 2, 16))

    def between_s(self, now: float) -> float:
        """Mean seconds from one loss to the next, of the last few; infinite before the first."""
        return (now - self._lost_at[0]) / len(self._lost_at) if self._lost_at else math.inf

    def out(self, peer: PeerId, now: float) -> bool:
        """Whether it is left out now."""
        return peer in self.liars or now < self._until.get(peer, now)

    def shaky(self, peer: PeerId, now: float) -> bool:
        """Whether others are asked before it now."""
        return now < self._shaky_until.get(peer, now)

    def first_back(self, now: float) -> float | None:
        """When the first of them may be asked again."""
        return min((t for t in self._until.values() if t > now), default=None)
