"""Who keeps copies of whose snapshots.

A holder's snapshots go to one other peer. The pool comes first: a peer that keeps a copy is warm,
and takes the stage over without fetching anything. Holders are dealt out over the warm peers in
turn. Without one, each holder's copy goes to another holder, those of another place or another
owner first: what takes both away is then less likely.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence

from ...dag.plan.plan import PeerId, Plan, SnapshotKeeper
from ...dag.plan.report import PlanReport, PlanWithReport
from ..membership.member import Member
from ..membership.membership import Membership

__all__ = ["choose_keepers", "fits", "instead"]


def fits(plan: Plan, report: PlanReport, holder: PeerId, member: Member) -> bool:
    """Whether a peer could take a holder's place: its memory, and the form of the graph."""
    if plan.head_parts and member.offer.operator_set == "core":
        return False
    needed = {p.peer: p.device_bytes for p in report.predicted.peers}.get(holder, 0)
    offered = member.profile.device_memory_bytes
    return not offered or needed <= offered


def choose_keepers(
    planned: PlanWithReport,
    free: Sequence[Member],
    members: Membership,
    spares: int,
    rank: Callable[[Member], tuple[bool, float]] = lambda member: (False, 0.0),
    unreliable: Container[PeerId] = (),
) -> tuple[SnapshotKeeper, ...]:
    """`free`: pool peers that may be warmed, at most `spares` of them. `rank`: whether one is lost
    again and again, so that others would take a part before it, and how long before the end of the
    run it means to leave; the least comes first. `unreliable`: those that leave, or refuse copies,
    which are asked when there is nobody else."""
    plan, report = planned
    holders = [members.members[p] for p in plan.peers]
    heaviest = max(holders, key=lambda m: m.profile.device_memory_bytes)
    able = [m for m in free if m.id not in plan.peers and m.id not in unreliable]
    able.sort(key=lambda m: (not fits(plan, report, heaviest.id, m), rank(m), m.joined))
    warm = able[:spares]
    ranks = {m.id: (m.id in unreliable, rank(m)) for m in holders}  # asked for once each
    found: list[SnapshotKeeper] = []
    for i, holder in enumerate(holders):
        turn = warm[i % len(warm) :] + warm[: i % len(warm)] if warm else []
        ring = holders[i + 1 :] + holders[:i]
        ring.sort(key=lambda m: (ranks[m.id][0], _alike(m, holder), ranks[m.id][1]))
        for keeper in (*turn, *ring):
            if members.reach(holder, keeper):
                found.append(SnapshotKeeper(holder.id, keeper.id))
                break
    return tuple(found)


def instead(
    plan: Plan, mine: Callable[[PeerId], Member | None], unreliable: Container[PeerId] = ()
) -> dict[PeerId, PeerId]:
    """Return by holder the keeper that is there now: the plan's or, when it is gone, one of the
    holders beside it (`ring_pairs`). `mine`: a peer that has a part in the replica; None for any
    other. `unreliable` ones come last."""
    found: dict[PeerId, PeerId] = {}
    holders, planned = plan.peers, dict[PeerId, list[PeerId]]()
    for keeper in plan.keepers:
        planned.setdefault(keeper.holder, []).append(keeper.peer)
    for i, holder in enumerate(holders):
        if holder not in planned:
            continue
        beside = (holders[(i + 1) % len(holders)], holders[i - 1])
        here = [p for p in (*planned[holder], *beside) if p != holder and mine(p)]
        if here:
            found[holder] = min(here, key=lambda p: p in unreliable)  # the first of equal ones
    return found


def ring_pairs(plan: Plan) -> Iterable[tuple[PeerId, PeerId]]:
    """Links over which a holder's copies can go when its keeper is gone."""
    holders = plan.peers
    if plan.keepers and len(holders) > 1:
        yield from zip(holders, (*holders[1:], holders[0]), strict=True)


def _alike(a: Member, b: Member) -> int:
    """What two peers have in common that may take both away at once."""
    owner = bool(a.profile.owner) and a.profile.owner == b.profile.owner
    return (a.profile.place == b.profile.place) + owner
