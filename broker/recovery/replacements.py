"""Who takes the part of a peer that is lost, or that does not do it.

A peer that lies nearest to the lost snapshot comes first: one that has a copy, then other warm
ones, then the pool in order of joining; one that means to leave before the run is over comes last,
one that leaves already is not asked. It must be able to hold the part, be reached by all that the
part exchanges frames with, and be at most SLOWER times as slow: otherwise a plan over all that is
left may well be better, and is asked for.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

from ...dag.plan.plan import PeerId
from ..membership.member import Member
from ..snapshots.keepers import fits
from .view import View

__all__ = ["able_left", "replacements", "suited_left", "unreached"]

SLOWER = 2.0


def replacements(view: View, gone: Sequence[PeerId]) -> dict[PeerId, PeerId] | None:
    """By lost holder, who takes its part; None when somebody's nobody can."""
    plan, run = view.plan, view.run
    found: dict[PeerId, PeerId] = {}
    if any(view.mine(p) is None for p in plan.peers if p not in gone):
        return None  # others are gone too, which is not known here yet
    here = [m for p in plan.warm if p not in gone and (m := view.mine(p))]
    warm = [m for m in here if m.closed is None]
    free = [m for m in view.members.pool if run.suits(m)]
    for old in gone:
        if old not in plan.peers:
            continue
        near = view.found.where.get(old, ((), ()))[1] if view.found else ()
        able = [
            m
            for m in (*warm, *free)
            if m.id not in found.values()
            and not view.suspects.out(m.id, view.now)
            and fits(plan, view.replica.report, old, m)
            and (not view.replica.local or (run.owner, view.replica.data.hash) in m.manifests)
            and not _slow(view, m, old)
            and _reached(view, m, old, found)
        ]
        if not able:
            return None
        found[old] = min(able, key=lambda m: _rank(view, m, near, warm)).id
    return found


def _rank(
    view: View, member: Member, near: Container[PeerId], warm: Container[Member]
) -> tuple[bool, float, bool, bool, int]:
    return (
        view.suspects.shaky(member.id, view.now),
        view.replica.lacks_s(member, view.now),
        member.id not in near,
        member not in warm,
        member.joined,
    )


def _slow(view: View, member: Member, old: PeerId) -> bool:
    if view.run.requirements.wanted:
        return False  # its plan was written by hand: it is kept as far as it can be
    return 0 < member.offer.flops_per_s * SLOWER < view.speed_of.get(old, 0.0)


def _reached(view: View, member: Member, old: PeerId, found: Mapping[PeerId, PeerId]) -> bool:
    """Whether there is a way to all with whom the part exchanges frames."""
    for pair in view.pairs:
        if old in pair:
            other = pair[0] if pair[1] == old else pair[1]
            there = view.members.members.get(found.get(other, other))
            if there is not None and not view.members.reach(member, there):
                return False
    return True


def unreached(view: View, rebuilt: Iterable[PeerId], lost: Container[PeerId]) -> str:
    """Between whom there is no way, of holders that give blocks of their stages and the ones that
    make lost stages from them; empty: none is missing."""
    members = view.members.members
    for new in rebuilt:
        for peer in view.plan.peers:
            if peer not in lost and not view.members.reach(members[peer], members[new]):
                return f"there is no way between {members[peer].label} and {members[new].label}"
    return ""


def suited_left(view: View) -> bool:
    """Whether enough peers are here that could take part."""
    run, everybody = view.run, view.members.members.values()
    left = [m for m in everybody if run.suits(m) and not view.suspects.out(m.id, view.now)]
    return len(left) >= run.requirements.least


def able_left(view: View) -> list[Member]:
    """Return the peers that could take part in the run's next plan at once."""
    return [
        m
        for m in view.members.members.values()
        if (m.state == "pool" or view.mine(m.id))
        and m.closed is None
        and view.run.suits(m)
        and not view.suspects.out(m.id, view.now)
    ]
