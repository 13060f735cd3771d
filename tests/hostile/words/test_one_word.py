"""What one peer says of a run ends it for nobody else: that takes a second peer that says so too,
or something that the broker sees by itself."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.broker.events import Instruction, MakePlan, PlanReady
from shoal.broker.machine import BrokerMachine
from shoal.broker.options import BrokerOptions
from shoal.broker.validate import validate
from shoal.proto.broker_pb2 import FAILED, RUNNING, Fault, Ready
from shoal.proto.common_pb2 import Reason
from shoal.tests.broker.conftest import World, make_plan
from shoal.tests.broker.placement.test_datasets import has, resolve
from shoal.tests.broker.placement.test_datasets import make_spec as spec_of_private_data

CODES = ("graph", "plan", "build", "data", "of no kind", "compute", "live", "\x1b")


def made() -> World:
    return World(BrokerMachine("broker-1", BrokerOptions(probe_s=0.0)))


@pytest.fixture
def world() -> Iterator[World]:
    found = made()
    yield found
    validate(found.machine)


def faulty(world: World, peer: str, run: str, code: str) -> list[Instruction]:
    term = world.machine.replica(run).record.term
    return world.say(peer, fault=Fault(run=run, term=term, reason=Reason(code=code, text="no")))


def settle(world: World, run: str, out: list[Instruction]) -> None:
    """What honest peers and the planner answer, until nothing is asked any more."""
    while out:
        more: list[Instruction] = []
        for ask in (i for i in out if isinstance(i, MakePlan)):
            peers = [o.peer for o in ask.peers][:2]
            if len(peers) == 2:
                more += world.handle(PlanReady(run, ask.version, make_plan(*peers)))
        for peer in world.streams:
            for message in world.told(out, peer):
                if message.WhichOneof("kind") == "assign":
                    more += world.say(peer, ready=Ready(run=run, term=message.assign.term))
                elif message.WhichOneof("kind") == "leave":
                    more += world.drained(peer, run)
        out = more


@pytest.mark.parametrize("code", CODES)
def test_who_says_that_a_run_is_broken_is_replaced_and_a_second_one_is_believed(
    world: World, code: str
) -> None:
    run = world.start("evil", "honest")
    world.join("spare")
    settle(world, run, faulty(world, "evil", run, code))
    assert world.state(run).phase == RUNNING
    if code == "live":  # it says so of itself: the term begins once more, and only once
        assert set(world.machine.replica(run).record.peers) == {"evil", "honest"}
        settle(world, run, faulty(world, "evil", run, code))
        assert set(world.machine.replica(run).record.peers) == {"honest", "spare"}
        return
    assert set(world.machine.replica(run).record.peers) == {"honest", "spare"}
    faulty(world, "honest", run, code)
    assert (world.state(run).phase == FAILED) == (code != "compute")


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_whatever_one_member_says_the_run_goes_on_without_it(seed: int) -> None:
    rng, world = random.Random(seed), made()
    run = world.start("evil", "honest", steps=60)
    for name in ("spare-1", "spare-2"):
        world.join(name)
    for _ in range(12):
        replica = world.machine.replica(run)
        if "evil" in replica.record.peers and world.state(run).phase == RUNNING:
            if rng.random() < 0.5:
                settle(world, run, faulty(world, "evil", run, rng.choice(CODES)))
            else:
                step = replica.record.committed + rng.choice((1, 5, 1000, 2**63))
                term = replica.record.term
                settle(world, run, world.report("evil", run, step, term=term))
        for peer in replica.record.peers:
            if peer != "evil" and world.state(run).phase == RUNNING:
                step, term = replica.record.ledger.next_of(peer), replica.record.term
                settle(world, run, world.report(peer, run, step, term=term))
        settle(world, run, world.wait(5.0))
        assert world.state(run).phase != FAILED, world.state(run).reason.text
        for peer in ("honest", "spare-1", "spare-2"):
            member = world.machine.members.members.get(peer)
            assert member is None or not replica.context.suspects.out(peer, world.now)
        for peer in world.streams:
            if peer in world.machine.members.members:
                world.say(peer, heartbeat={})


def run_ahead(world: World, run: str, *peers: str) -> None:
    """These report one step after the other, for as long as nobody minds."""
    replica = world.machine.replica(run)
    term = replica.record.term
    while replica.record.term == term:
        for peer in peers:
            settle(world, run, world.report(peer, run, ahead(world, run, peer), term=term))


def ahead(world: World, run: str, peer: str) -> int:
    ledger = world.machine.replica(run).record.ledger
    return int(ledger.next_of(peer)) if ledger and peer in ledger.peers else 0


def test_who_reports_what_nobody_else_has_done_convicts_nobody_and_two_do() -> None:
    options = BrokerOptions(probe_s=0.0, most_lead=8)
    world = World(BrokerMachine("broker-1", options))
    run = world.start("evil", "honest", steps=60)
    for name in ("spare-1", "spare-2"):
        world.join(name)
    run_ahead(world, run, "evil")
    assert set(world.machine.replica(run).record.peers) == {"honest", "spare-1"}
    world = World(BrokerMachine("broker-1", options))
    run = world.start("silent", "honest-1", "honest-2", steps=60)
    world.join("spare")
    run_ahead(world, run, "honest-1", "honest-2")
    replica = world.machine.replica(run)
    assert replica.context.suspects.out("silent", world.now)
    for peer in ("honest-1", "honest-2"):
        assert not replica.context.suspects.out(peer, world.now)


@pytest.mark.parametrize("of_many", [False, True])
def test_of_data_that_one_peer_has_only_that_one_is_believed_alone(
    world: World, of_many: bool
) -> None:
    """Nobody else reads it, so a peer that says it cannot be read says what it cannot know."""
    world.join("owner", data=has())
    world.join("evil")
    run, out = world.submit(spec_of_private_data(world))
    out = resolve(world, out, "owner")
    ask = world.only(out, MakePlan)
    out = world.handle(PlanReady(run, ask.version, world.plan("owner", "evil"), local=("x",)))
    settle(world, run, out)
    assert world.state(run).phase == RUNNING
    if of_many:
        world.join("spare")
    faulty(world, "evil", run, "data")
    assert world.state(run).phase != FAILED, world.state(run).reason.text
