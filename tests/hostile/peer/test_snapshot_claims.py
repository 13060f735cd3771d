"""What a run goes on from is given by who was told to have it: nobody slips weights of its own into
a run by saying that it keeps a snapshot."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.broker.events import Instruction
from shoal.broker.machine import BrokerMachine
from shoal.broker.options import BrokerOptions
from shoal.proto.broker_pb2 import (
    EXPORTING,
    RUNNING,
    Exported,
    Fault,
    Snapshot,
    SnapshotReport,
    Span,
)
from shoal.proto.common_pb2 import BlobRef, Reason
from shoal.tests.broker.conftest import World

from ..words.test_one_word import settle


def claim(world: World, peer: str, found: Snapshot, *, held: bool = True) -> list[Instruction]:
    return world.say(peer, snapshot=SnapshotReport(snapshot=found, held=held))


def snapshot(run: str, term: int, step: int, holder: str, *spans: tuple[int, int]) -> Snapshot:
    found = Snapshot(run=run, term=term, step=step, holder=holder)
    found.spans.extend(Span(start=a, stop=b) for a, b in spans)
    return found


def trains() -> tuple[World, str]:
    """A run after five steps in its second term, with a set that lies with both holders and with a
    keeper; a held the first stage before."""
    world = World(BrokerMachine("broker-1", BrokerOptions(probe_s=0.0)))
    world.join("k")
    run = world.start("a", "b", steps=60)
    replica = world.machine.replica(run)
    world.join("c")
    settle(world, run, world.close("a"))
    names = {s.holders[0]: (s.start, s.stop) for s in replica.record.plan.stages}
    for step in range(5):
        for peer in names:
            settle(world, run, world.report(peer, run, step, term=2))
    for peer, span in names.items():
        claim(world, peer, snapshot(run, 2, 5, peer, span))
    for holder, keeper in replica.snapshots.keepers(replica.context.plan).items():
        claim(world, keeper, snapshot(run, 2, 5, holder, names[holder]))
    assert replica.snapshots.found().step == 5
    world.join("evil")
    return world, run


@settings(max_examples=60, deadline=None)
@given(
    term=st.integers(0, 3),
    step=st.integers(0, 9),
    holder=st.sampled_from(["evil", "a", "b", "c", "k", ""]),
    spans=st.sampled_from([((0, 2),), ((0, 1),), ((1, 2),), ((0, 1), (1, 2)), ()]),
    held=st.booleans(),
    restarts=st.booleans(),
)
def test_who_was_given_no_snapshot_has_none(
    term: int,
    step: int,
    holder: str,
    spans: tuple[tuple[int, int], ...],
    held: bool,
    restarts: bool,
) -> None:
    world, run = WORLDS[restarts]
    replica = world.machine.replica(run)
    before = replica.snapshots.found(), replica.snapshots.sets.peers
    pending, refused = replica.snapshots.cadence.pending, replica.snapshots.unreliable
    out = claim(world, "evil", snapshot(run, term, step, holder, *spans), held=held)
    assert not world.published(out)
    assert (replica.snapshots.found(), replica.snapshots.sets.peers) == before
    assert (replica.snapshots.cadence.pending, replica.snapshots.unreliable) == (pending, refused)


def after_a_restart() -> tuple[World, str]:
    world, run = trains()
    world.restart()
    replica = world.machine.replica(run)
    for peer in (*replica.record.peers, *replica.record.plan.warm, "evil"):
        holding = None if peer == "evil" else {"run": run, "term": 2, "step": 5}
        world.join(peer, counter=2, holding=holding)
    for stage in replica.record.plan.stages:
        found = snapshot(run, 2, 5, stage.holders[0], (stage.start, stage.stop))
        claim(world, stage.holders[0], found)
    assert replica.snapshots.found().step == 5
    return world, run


WORLDS = {False: trains(), True: after_a_restart()}


@pytest.mark.parametrize("restarts", [False, True])
def test_a_term_takes_nothing_from_who_only_says_that_it_has_it(restarts: bool) -> None:
    world, run = (after_a_restart if restarts else trains)()
    for holder, span in (("evil", (0, 2)), ("a", (0, 1)), ("b", (1, 2))):
        claim(world, "evil", snapshot(run, 1, 5, holder, span))
    replica = world.machine.replica(run)
    lost = next(p for p in replica.record.peers)
    settle(world, run, world.close(lost))
    assert world.state(run).phase == RUNNING
    begun = replica.context.term.begun_from
    assert begun is None or all("evil" not in at for _, at in begun.where.values())
    assert not [g for g in replica.context.term.transfers if g.source == "evil"]


def test_a_keeper_has_copies_of_what_it_keeps_alone() -> None:
    """It may not say that a holder had more stages than the plan gives it."""
    world, run = trains()
    replica = world.machine.replica(run)
    keeper = next(iter(replica.context.plan.warm), None) or replica.record.peers[0]
    claim(world, keeper, snapshot(run, 1, 5, "a", (0, 2)))
    claim(world, keeper, snapshot(run, 1, 5, keeper, (0, 2)))
    assert replica.snapshots.found().term == 2
    assert all(h != keeper or k[1] == 2 for k, h in replica.snapshots.sets._at[keeper])


def cannot_load(world: World, run: str, peer: str) -> None:
    term = world.machine.replica(run).record.term
    reason = Reason(code="snapshot", text="it is damaged")
    settle(world, run, world.say(peer, fault=Fault(run=run, term=term, reason=reason)))


def test_one_word_spoils_a_set_for_nobody_and_two_do() -> None:
    world, run = trains()
    replica = world.machine.replica(run)
    for name in ("spare-1", "spare-2"):
        world.join(name)
    settle(world, run, world.close(replica.record.peers[0]))
    assert replica.context.term.begun_from.step == 5
    before = replica.record.peers
    said = next(p for p in before if p not in replica.context.plan.warm and p == "b")
    cannot_load(world, run, said)
    assert said not in replica.record.peers
    assert replica.context.term.begun_from.step == 5
    cannot_load(world, run, next(p for p in replica.record.peers if p not in before))
    assert replica.snapshots.found() is None


@pytest.mark.parametrize("name", ["", "../../etc/passwd", "ab" * 31 + "\n" * 2, "AB" * 32])
def test_weights_that_are_no_blob_end_no_run_as_done(name: str) -> None:
    world = World(BrokerMachine("broker-1", BrokerOptions(probe_s=0.0)))
    run = world.start("evil", steps=1)
    world.report("evil", run, 0)
    weights = BlobRef(hash=name, size_bytes=8)
    exported = Exported(run=run, term=1, step=1, weights=weights)
    assert not world.published(world.say("evil", exported=exported))
    assert world.state(run).phase == EXPORTING
