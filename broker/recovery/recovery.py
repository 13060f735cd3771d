"""Who takes the part of a peer that is lost, or that does not do it. Decisions only.

- A peer that lies nearest to the lost snapshot comes first: one that has a copy, then other warm
  ones, then the pool in order of joining; one that means to leave before the run is over comes
  last, one that leaves already is not asked. It must be able to hold the part, be reached by all
  that the part exchanges frames with, and be at most SLOWER times as slow: otherwise a plan over
  all that is left may well be better, and is asked for.
- One that blames another is taken at its word when a second one has done so as well; before, it is
  the one that goes.
- A peer that was blamed for a fault is left out for a while, that doubles each time. One that is
  lost again and again is left out for some seconds, and asked after all others for a while that
  doubles: a run that would wait goes on with it, as that costs nobody a step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from ...dag.plan.plan import PeerId, Plan
from ..membership.member import Member, dial
from ..membership.membership import Membership
from ..snapshots.keepers import fits

if TYPE_CHECKING:
    from ..runs.terms import TermBuilder

__all__ = ["SuspectTracker", "able_left", "replacements", "suited_left", "unreached"]

SLOWER = 2.0
_AWAY_S = 30.0
_MOST_AWAY_S = 3600.0
_TRIES = 4
_FLAPS_S = 5.0
_COUNTED = 5
"""Newest losses that say how often there are some."""


class SuspectTracker:
    """Peers of one run that do not do their part. `tries`: how often others were asked at the
    present step."""

    def __init__(self) -> None:
        self.tries = 0
        self._step = -1
        self._until: dict[PeerId, float] = {}
        self._away_s: dict[PeerId, float] = {}
        self._losses: dict[PeerId, int] = {}
        self._lost_at: deque[float] = deque(maxlen=_COUNTED)
        self._shaky_until: dict[PeerId, float] = {}
        self._accused: dict[PeerId, dict[PeerId, None]] = {}
        """Of whom others said that it does not do its part, and who did."""

    def again(self, peers: Iterable[PeerId], step: int, now: float) -> bool:
        """They are blamed; whether it is worth another try: with other peers each time, the same
        step fails for another reason."""
        self.tries = self.tries + 1 if step == self._step else 1
        self._step = step
        for peer in peers:
            away = self._away_s[peer] = min(_MOST_AWAY_S, 2 * self._away_s.get(peer, _AWAY_S / 2))
            self._until[peer] = now + away
        return self.tries <= _TRIES

    def accuse(self, by: PeerId, peer: PeerId) -> bool:
        """One says that it hears nothing of another. Whether that one is to blame: if a second
        one has said so too. A single word shows no more than that what is between them is bad, and
        then it is who spoke that goes: an honest one loses as little by that as the other would."""
        said = self._accused.setdefault(peer, {})
        said[by] = None
        return len(said) > 1

    def lost(self, peer: PeerId, now: float) -> None:
        """Its stream ended, say. The first time that is nobody's fault."""
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
        return now < self._until.get(peer, now)

    def shaky(self, peer: PeerId, now: float) -> bool:
        """Whether others are asked before it now."""
        return now < self._shaky_until.get(peer, now)

    def first_back(self, now: float) -> float | None:
        """When the first of them may be asked again."""
        return min((t for t in self._until.values() if t > now), default=None)


def replacements(
    run: TermBuilder, gone: Sequence[PeerId], members: Membership, now: float
) -> dict[PeerId, PeerId] | None:
    """By lost holder, who takes its part; None when somebody's nobody can."""
    plan, blamed = run.plan, run.blamed
    assert plan is not None, run
    found: dict[PeerId, PeerId] = {}
    holders = [p for p in plan.peers if p not in gone]
    if any(members.mine(p, run.id) is None for p in holders):
        return None  # others are gone too, which is not known here yet
    found_set = run.goes_on_from(members)
    here = [m for p in plan.warm if p not in gone and (m := members.mine(p, run.id))]
    warm = [m for m in here if m.closed is None]
    free = [m for m in members.pool if run.suits(m)]
    for old in gone:
        if old not in plan.peers:
            continue
        near = found_set.where.get(old, ((), ()))[1] if found_set else ()
        able = [
            m
            for m in (*warm, *free)
            if m.id not in found.values()
            and not blamed.out(m.id, now)
            and fits(plan, run.report, old, m)
            and (not run.local or (run.owner, run.spec.data.hash) in m.manifests)
            and not _slow(m, old, run)
            and _reached(m, old, found, run, members)
        ]
        if not able:
            return None
        best = min(
            able,
            key=lambda m: (
                blamed.shaky(m.id, now),
                run.lacks_s(m, now),
                m.id not in near,
                m not in warm,
                m.joined,
            ),
        )
        found[old] = best.id
    return found


def _slow(member: Member, old: PeerId, run: TermBuilder) -> bool:
    speed = member.offer.flops_per_s
    if run.wish.wanted:
        return False  # its plan was written by hand: it is kept as far as it can be
    return 0 < speed * SLOWER < run.speed_of.get(old, 0.0)


def _reached(
    member: Member, old: PeerId, found: dict[PeerId, PeerId], run: TermBuilder, members: Membership
) -> bool:
    """Whether there is a way to all with whom the part exchanges frames."""
    for pair in run.pairs:
        if old in pair:
            other = pair[0] if pair[1] == old else pair[1]
            there = members.members.get(found.get(other, other))
            if there is not None and dial(member, there, run.options.relays) is None:
                return False
    return True


def unreached(
    plan: Plan, taken_by: Mapping[PeerId, PeerId], members: Membership, relays: bool
) -> str:
    """Between whom there is no way, of holders that give blocks of their stages and the ones that
    make lost stages from them; empty: none is missing."""
    for new in taken_by.values():
        for peer in plan.peers:
            if (
                peer not in taken_by
                and dial(members.members[peer], members.members[new], relays) is None
            ):
                a, b = members.members[peer].label, members.members[new].label
                return f"there is no way between {a} and {b}"
    return ""


def suited_left(run: TermBuilder, members: Membership, now: float) -> bool:
    """Whether enough peers are here that could take part."""
    left = [m for m in members.members.values() if run.suits(m) and not run.blamed.out(m.id, now)]
    return len(left) >= run.wish.least


def able_left(run: TermBuilder, members: Membership, now: float) -> list[Member]:
    """Who could take part in the run's next plan at once."""
    return [
        m
        for m in members.members.values()
        if (m.state == "pool" or members.mine(m.id, run.id))
        and m.closed is None
        and run.suits(m)
        and not run.blamed.out(m.id, now)
    ]
