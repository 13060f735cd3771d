"""Who keeps whose snapshots now."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from shoal.broker.events import MakePlan, PlanReady
from shoal.broker.membership.member import Member
from shoal.broker.membership.membership import Membership
from shoal.broker.options import BrokerOptions
from shoal.broker.runs import snapshots
from shoal.broker.snapshots.keepers import choose_keepers, instead
from shoal.dag.plan.plan import PeerId, Plan, SnapshotKeeper, StageSlot, Visit
from shoal.dag.plan.report import NO_REPORT, PlanWithReport
from shoal.proto.broker_pb2 import Profile, Ready, StepReport

PEERS = [PeerId(f"p{i}") for i in range(6)]


def membership(assigned: list[PeerId], free: list[PeerId]) -> Membership:
    found = Membership("broker", BrokerOptions(relays=True))
    for i, peer in enumerate((*assigned, *free)):
        member = Member(peer, f"stream-{i}", "boot", 0, Profile(), "", i, 0.0)  # type: ignore[arg-type]
        member.state = "assigned" if peer in assigned else "pool"
        found.members[peer] = member
    return found


@given(
    st.integers(1, 5),
    st.lists(st.tuples(st.sampled_from(PEERS), st.sampled_from(PEERS)), max_size=8, unique=True),
    st.permutations(PEERS),
    st.integers(0, 6),
    st.integers(0, 6),
)
def test_the_first_planned_keeper_that_is_there_or_else_a_holder_beside_it(
    count: int, pairs: list[tuple[PeerId, PeerId]], order: list[PeerId], here: int, free: int
) -> None:
    holders = PEERS[:count]
    plan = Plan(
        tuple(StageSlot(i, i + 1, (peer,)) for i, peer in enumerate(holders)),
        (tuple(Visit(i, peer) for i, peer in enumerate(holders)),),
        1,
        keepers=tuple(SnapshotKeeper(a, b) for a, b in pairs),
    )
    assigned = order[:here]
    members = membership(assigned, order[here : here + free])

    def plainly(holder: PeerId) -> list[PeerId]:
        planned, i = [b for a, b in pairs if a == holder], holders.index(holder)
        beside = [holders[(i + 1) % count], holders[i - 1]] if planned else []
        return [peer for peer in (*planned, *beside) if peer in assigned and peer != holder]

    wanted = {holder: found[0] for holder in holders if (found := plainly(holder))}
    assert instead(plan, lambda peer: members.members[peer] if peer in assigned else None) == wanted


def test_who_is_lost_again_and_again_keeps_copies_when_nobody_else_can() -> None:
    """Others would be asked before it to take the part, and would have to fetch the copy."""
    holder, *free = PEERS[:3]
    plan = Plan((StageSlot(0, 1, (holder,)),), ((Visit(0, holder),),), 1)
    members = membership([holder], free)
    for shaky, keeper in ((free[0], free[1]), (free[1], free[0]), (holder, free[0])):
        found = choose_keepers(
            PlanWithReport(plan, NO_REPORT),
            [members.members[p] for p in free],
            members,
            spares=1,
            rank=lambda m, shaky=shaky: (m.id == shaky, 0.0),  # type: ignore[misc]
        )
        assert found == (SnapshotKeeper(holder, keeper),)


def test_reports_find_keepers_anew_only_when_members_change(world, monkeypatch) -> None:
    asked: list[dict[PeerId, PeerId]] = []

    def counted(*facts: Any) -> dict[PeerId, PeerId]:
        asked.append(instead(*facts))
        return asked[-1]

    monkeypatch.setattr(snapshots, "instead", counted)
    for peer in ("a", "b", "c"):
        world.join(peer)
    run, out = world.submit(world.spec(steps=9))
    ask = world.only(out, MakePlan)
    world.handle(PlanReady(run, ask.version, world.plan("a", "b")))
    for peer in ("a", "b"):
        world.say(peer, ready=Ready(run=run, term=1))
    for step in range(4):
        for peer in ("a", "b"):
            world.say(peer, step=StepReport(run=run, term=1, step=step))
    assert asked == [{"a": "c", "b": "c"}], "once, not at every report"
    world.say("c", goodbye={})
    assert asked[1:] == [{"a": "b", "b": "a"}]
