"""Going on after a loss: who takes whose place, and who gives what to whom."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.broker.events import MakePlan, PlanReady
from shoal.broker.recovery.resume import substituted, transfers
from shoal.broker.snapshots.sets import SnapshotSet
from shoal.dag.plan.plan import CodecChoice, PeerId, Plan, SnapshotKeeper, StageSlot, Visit
from shoal.dag.plan.report import PlanReport, PlanWithReport, Spare
from shoal.dag.schedule.flow import Role
from shoal.proto.broker_pb2 import (
    BUILDING,
    RUNNING,
    WAITING,
    Holding,
    Ready,
    Snapshot,
    SnapshotReport,
    Span,
)
from shoal.proto.common_pb2 import Reason

OPERATORS = 8
NAMES = st.sampled_from([PeerId(p) for p in "abcdefg"])


def cut_into(bounds: list[int], peers: list[PeerId]) -> Plan:
    edges = [0, *sorted(set(bounds)), OPERATORS]
    slots = tuple(
        StageSlot(a, b, (peers[i % len(peers)],)) for i, (a, b) in enumerate(pairwise(edges))
    )
    route = tuple(Visit(i, s.holders[0]) for i, s in enumerate(slots))
    return Plan(slots, (route, route), 1).validate(OPERATORS)


def spans_of(plan: Plan, peer: PeerId) -> tuple[tuple[int, int], ...]:
    return tuple((plan.stages[k].start, plan.stages[k].stop) for k in plan.stages_of(peer))


def covered(spans: tuple[tuple[int, int], ...]) -> set[int]:
    return {op for a, b in spans for op in range(a, b)}


PLANS = st.builds(
    cut_into,
    st.lists(st.integers(1, OPERATORS - 1), max_size=4),
    st.lists(NAMES, min_size=1, max_size=4, unique=True),
)


@given(then=PLANS, now=PLANS, lie=st.lists(st.lists(NAMES, min_size=1, unique=True), min_size=4))
def test_every_holder_has_or_gets_once_each_snapshot_that_it_shares_an_operator_with(
    then, now, lie
) -> None:
    where = {holder: (spans_of(then, holder), tuple(lie[i])) for i, holder in enumerate(then.peers)}
    given_to = Counter()
    for transfer in transfers(SnapshotSet(1, 3, where), now):
        given_to[transfer.destination, transfer.holder] += 1
        spans, there = where[PeerId(transfer.holder)]
        assert transfer.source in there
        assert transfer.source != transfer.destination
        assert [(s.start, s.stop) for s in transfer.spans] == list(spans)
    assert set(given_to.values()) <= {1}
    for peer in now.peers:
        for holder, (spans, there) in where.items():
            shares = bool(covered(spans_of(now, peer)) & covered(spans))
            gets = (peer, holder) in given_to
            assert gets == (shares and peer not in there)


@given(plan=PLANS, data=st.data())
def test_one_peer_in_the_place_of_another_makes_the_same_plan_under_another_name(
    plan, data
) -> None:
    old = data.draw(st.sampled_from(plan.peers))
    new = PeerId("new")
    others = [p for p in plan.peers if p != old]
    codecs = tuple(CodecChoice(old, p, Role.ACTIVATION.value, "none") for p in others)
    keepers = tuple(SnapshotKeeper(p, new) for p in plan.peers)
    plan = replace(plan, codecs=codecs, keepers=keepers)
    said = PlanReport(spares=(Spare(new, "slow"),))
    found, report = substituted(PlanWithReport(plan, said), old, new)
    found.validate(OPERATORS)
    assert report.spares == ()
    assert old not in repr(found).split("'")
    assert found.peers == tuple(new if p == old else p for p in plan.peers)
    back, _ = substituted(PlanWithReport(found), new, old)
    assert replace(back, keepers=keepers) == plan


# ---------------------------------------------------------------- on the machine


def snapshot(run: str, step: int, holder: str, at: int, term: int = 1) -> Snapshot:
    """Of a holder of one operator."""
    spans = [Span(start=at, stop=at + 1)]
    return Snapshot(run=run, term=term, step=step, holder=holder, spans=spans)


def held(world, peer: str, found: Snapshot) -> list:
    return world.say(peer, snapshot=SnapshotReport(snapshot=found, held=True))


def with_a_set(world, warm: bool = True) -> str:
    """A run of a and b whose snapshots after one step lie with them and with c."""
    if warm and "c" not in world.streams:
        world.join("c")
    run = world.start("a", "b", steps=9)
    for peer in "ab":
        world.report(peer, run, 0)
    for at, holder in enumerate("ab"):
        held(world, holder, snapshot(run, 1, holder, at))
        held(world, "c" if warm else "ba"[at], snapshot(run, 1, holder, at))
    return run


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("losses", [0, 3])
def test_the_next_set_hurries_after_losses_where_the_pool_keeps_copies(world, warm, losses) -> None:
    if warm:
        world.join("c")
    run = world.start("a", "b", steps=9)
    known = world.machine.replica(run)
    for _ in range(losses):
        known.context.suspects.lost(PeerId("gone"), world.now)
    for peer in "ab":
        world.report(peer, run, 0)
    for at, holder in enumerate("ab"):
        held(world, holder, snapshot(run, 1, holder, at))
        held(world, "c" if warm else "ba"[at], snapshot(run, 1, holder, at))
    assert known.snapshots.cadence.whole == 1
    assert (known.snapshots.cadence.pending is not None) == bool(warm and losses)


@pytest.mark.parametrize("restart", [None, "journal", "snapshot"])
def test_who_took_whose_place_is_known_at_the_next_loss_and_after_a_restart(world, restart) -> None:
    """States of codecs in a snapshot name both ends of a link, as they were when it was taken."""
    run = with_a_set(world)
    held(world, "b", snapshot(run, 1, "a", 0))
    world.close("a")
    for peer in "cb":
        world.say(peer, ready=Ready(run=run, term=2))
    assert world.state(run).phase == RUNNING
    if restart == "snapshot":
        world.journal = list(world.machine.decided.snapshot())
    if restart:
        world.restart()
        for peer in "cb":
            world.join(peer, holding=Holding(run=run, term=2, step=1))
            for at, holder in enumerate("ab"):
                held(world, peer, snapshot(run, 1, holder, at))
    world.join("d")
    out = world.close("c")
    (assign,) = (m.assign for m in world.told(out, "d") if m.HasField("assign"))
    assert (assign.term, assign.first_step) == (3, 1)
    assert [(r.old, r.to) for r in assign.resume.renamed] == [("a", "d")]


def test_a_warm_peer_takes_the_part_and_all_go_on_from_the_newest_set(world) -> None:
    run = with_a_set(world)
    world.report("a", run, 1)
    out = world.close("a")
    assert world.state(run).phase == BUILDING
    text = world.state(run).reason.text
    assert text.endswith("stage 0 -> c (warm), going on at step 1")
    for peer in "bc":
        assign = world.told(out, peer)[0].assign
        assert (assign.term, assign.first_step, assign.resume.term) == (2, 1, 1)
        assert not assign.resume.transfers, "both have theirs"
        assert [(r.old, r.to) for r in assign.resume.renamed] == [("a", "c")]


def test_a_replayed_step_has_no_effect_but_a_note_where_its_loss_differs(world) -> None:
    run = with_a_set(world)
    for step in (1, 2):
        for peer in "ab":
            world.report(peer, run, step, loss=2.0)
    world.close("a")
    for peer in "bc":
        out = world.say(peer, ready=Ready(run=run, term=2))
    assert world.kinds(out, "b") == ["start", "committed", "snapshot"]
    assert world.told(out, "b")[1].committed.step == 3, "of a replay nobody keeps reports"
    assert world.state(run).phase == RUNNING
    for peer in "bc":
        assert not world.published(world.report(peer, run, 1, loss=2.0, term=2))
    notes = world.published(world.report("b", run, 2, loss=2.5, term=2))
    assert ["step 2 gave the loss 2.5" in e.note for e in notes] == [True]
    assert world.state(run).step == 3
    for peer in "bc":
        world.report(peer, run, 3, term=2)
    assert world.state(run).step == 4


def test_who_gives_a_snapshot_is_missed_while_others_wait_for_it(world) -> None:
    """Nobody but c has what d needs."""
    run = with_a_set(world)
    world.join("d")
    keeps = [k for k in world.machine.replica(run).record.plan.keepers if k.peer == "c"]
    assert len(keeps) == 2
    world.close("b")
    assert "stage 1 -> c (warm)" in world.state(run).reason.text
    world.close("a")  # c and d are left, and d has nothing
    given = world.machine.replica(run).context.term.transfers
    assert [(g.holder, g.source, g.destination) for g in given] == [("a", "c", "d")]
    world.close("c")
    assert world.state(run).phase == WAITING


def test_a_warm_peer_that_is_lost_ends_nothing_unless_it_gives(world) -> None:
    run = with_a_set(world)
    world.close("c")
    assert world.state(run).phase == RUNNING
    assert world.state(run).term == 1
    assert world.machine.replica(run).snapshots.found() is not None, "their own are enough"


@pytest.mark.parametrize("ready", [False, True])
def test_a_warm_peer_that_is_lost_while_it_gives_begins_another_term(world, ready) -> None:
    """c keeps both and is too slow to hold a stage: d takes it, with what c gives."""
    world.join("c", flops_per_s=1e9)
    for peer in "ab":
        world.join(peer, flops_per_s=1e12)
    run = with_a_set(world)
    world.join("d", flops_per_s=1e12)
    world.close("a")
    found = world.machine.replica(run)
    assert found.record.plan.warm == ("c",)
    given = found.context.term.transfers
    assert [(g.holder, g.source, g.destination) for g in given] == [("a", "c", "d")]
    if ready:
        world.say("d", ready=Ready(run=run, term=2))
    world.close("c")
    assert world.state(run).phase == BUILDING
    assert world.state(run).term == (2 if ready else 3)
    if not ready:
        assert "peer c was lost while it was built" in world.state(run).reason.text
        assert world.state(run).reason.text.endswith("from the starting weights")


def test_only_peers_of_the_run_and_of_the_pool_are_asked_for_snapshots(world) -> None:
    """b keeps a's, and has gone to another run since."""
    run = with_a_set(world, warm=False)
    out = world.close("a")
    assert world.kinds(out, "b") == ["leave"]
    assert world.state(run).phase == WAITING
    found = world.machine.replica(run).snapshots
    assert found.found() is None, "b is about to leave"
    ask = world.only([*world.drained("b", run), *world.join("d")][-1:], MakePlan)
    assert found.found() is not None
    out = world.handle(PlanReady(run, ask.version, world.plan("b", "d")))
    assign = world.told(out, "d")[0].assign
    assert assign.first_step == 1
    assert [(g.holder, g.source) for g in assign.resume.transfers] == [("b", "b")]


def test_a_damaged_set_is_not_tried_again(world) -> None:
    run = with_a_set(world)
    world.close("a")
    fault = {"run": run, "term": 2, "reason": {"code": "snapshot", "text": "damaged"}}
    world.join("d")
    world.say("c", fault=fault)
    assert world.state(run).phase == BUILDING
    assert world.state(run).reason.text.endswith("from the starting weights")


@pytest.mark.parametrize(
    "change",
    [
        {"term": 0},
        {"term": 2},
        {"step": 0},
        {"step": 10},
        {"step": 2**64 - 1},
        {"holder": ""},
        {"holder": "x" * 200},
        {"spans": []},
        {"spans": [Span(start=0, stop=2)]},
        {"holder": "z", "spans": [Span(start=0, stop=3)]},
        {"holder": "z", "spans": [Span(start=1, stop=1)]},
        {"holder": "z", "spans": [Span(start=1, stop=2), Span(start=0, stop=1)]},
    ],
    ids=str,
)
def test_what_cannot_be_a_snapshot_is_not_remembered(world, change) -> None:
    run = world.start("a", "b", steps=9)
    fields = {"run": run, "term": 1, "step": 1, "holder": "a", "spans": [Span(start=0, stop=1)]}
    held(world, "a", Snapshot(**fields | change))
    assert not world.machine.replica(run).snapshots.sets.peers
    assert world.machine.ignored == {"snapshot": 1}
    held(world, "a", Snapshot(**fields))
    assert world.machine.replica(run).snapshots.sets.peers == ("a",)


def test_who_keeps_snapshots_of_a_run_that_has_ended_may_drop_them(world) -> None:
    run = with_a_set(world)
    world.close("a")  # c has its part
    world.join("a")
    held(world, "a", snapshot(run, 1, "a", 0))
    out = world.cancel(run)
    assert world.kinds(out, "a") == ["snapshot"]
    assert world.told(out, "a")[0].snapshot.needed > 9
    assert world.kinds(out, "c") == ["leave"], "which says the same"
    assert not world.told(out, "c")[0].leave.goes_on
    out = held(world, "a", snapshot(run, 2**64 - 1, "a", 0))
    assert world.told(out, "a")[0].snapshot.needed == 2**64 - 1


def test_a_keeper_that_refuses_copies_is_replaced_and_the_user_hears_of_it(world) -> None:
    world.join("c")
    run = world.start("a", "b", steps=9)
    for peer in "ab":
        world.report(peer, run, 0)
    step = world.machine.replica(run).snapshots.cadence.pending
    held(world, "a", snapshot(run, step, "a", 0))
    reason = Reason(code="snapshot", text="the disk is full")
    refused = SnapshotReport(snapshot=snapshot(run, step, "a", 0), reason=reason)
    out = world.say("c", snapshot=refused)
    note = "peer c does not keep a copy of the snapshots of a: the disk is full; b does instead"
    assert [e.note for e in world.published(out)] == [note]
    (order,) = (m.snapshot for m in world.told(out, "a"))
    assert order.step > step
    assert order.keeper == "b"
    assert [m.snapshot.keeper for m in world.told(out, "b")] == ["a"]
    refused.snapshot.step = order.step
    assert not world.published(world.say("c", snapshot=refused)), "said once"


def test_a_keeper_that_refuses_and_has_no_substitute_is_told_of_too(world) -> None:
    world.join("c")
    run = world.start("a", steps=9)
    step = world.machine.replica(run).snapshots.cadence.pending
    held(world, "a", snapshot(run, step, "a", 0))
    reason = Reason(code="snapshot", text="the disk is full")
    out = world.say(
        "c", snapshot=SnapshotReport(snapshot=snapshot(run, step, "a", 0), reason=reason)
    )
    (note,) = (e.note for e in world.published(out))
    assert "Nobody else can" in note


def test_a_keeper_in_whose_place_another_came_after_a_restart_has_no_part_to_come_back_to(
    world,
) -> None:
    run = with_a_set(world)
    world.restart()
    for peer in "ab":
        world.join(peer, holding={"run": run, "term": 1, "step": 1})
    world.join("d")
    assert world.machine.replica(run).context.plan.warm == ("d",)
    world.join("c", holding={"run": run, "term": 1, "step": 1})
    assert world.machine.members.members["c"].state == "draining"
    # Both may have copies: the one has one already, and the other gets one.
    for keeper in "cd":
        held(world, keeper, snapshot(run, 1, "a", 0))
        assert keeper in world.machine.replica(run).snapshots.sets.peers
    world.restart()
    for peer in "abcd":
        world.join(peer)
        held(world, peer, snapshot(run, 1, "a", 0))
        mine = world.machine.replica(run).snapshots.sets.peers
        assert peer in mine
