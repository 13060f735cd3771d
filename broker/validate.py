"""The invariants of the broker's machine; tests call this after every event."""

from __future__ import annotations

from dataclasses import replace

from ..dag.plan.plan import PeerId
from ..proto.broker_pb2 import BUILDING, EXPORTING, RUNNING, WAITING
from .events import ReplicaId
from .machine import BrokerMachine
from .records.run import RunRecord
from .runs.handover import PAUSE
from .runs.replica import Replica

__all__ = ["validate"]


def validate(machine: BrokerMachine) -> None:
    """Raises AssertionError when the machine's parts contradict each other."""
    members = machine.members.members
    for peer, member in members.items():
        assert member.id == peer
        assert machine.members.streams.get(member.stream) == peer, f"{peer} has no stream"
        assert (member.run is None) == (member.state in ("pool", "resting")), (
            f"{peer}: {member.state}, {member.run}"
        )
        assert member.run is not None or member.state == member.free, f"{peer}: {member.closed}"
    named = [p for p in machine.members.streams.values() if p is not None]
    assert sorted(named) == sorted(members), "every stream with a peer is the one of that member"

    holders: dict[PeerId, ReplicaId] = {}
    replicas = machine.registry.replicas()
    parts = {replica.id: frozenset(replica.context.parts) for replica in replicas}
    for replica in replicas:
        _validate_replica(replica)
        if replica.record.active:
            for peer in filter(replica.losses.needs, replica.record.peers):
                other = holders.setdefault(peer, replica.id)
                assert other == replica.id, f"{peer} holds stages of {other} and {replica}"
    for peer, member in members.items():
        if member.state == "assigned":
            found = machine.replica(member.run)
            assert found is not None, f"{peer} is assigned to nothing"
            assert found.record.active, f"{peer} is assigned to {found}"
            assert peer in parts[found.id], f"{peer} is assigned to {found} in vain"
    for replica in replicas:
        lie = replica.snapshots.sets.peers
        assert not lie or not replica.record.ended, f"{replica} has ended and keeps snapshots"
        assert set(lie) <= set(members), f"{replica}: snapshots at peers that are gone"
    awaited = {(p, replica.id) for replica in replicas for p in replica.context.away.peers}
    welcome = {(p, replica.id) for replica in replicas for p in replica.context.welcome}
    expected = {(p, ReplicaId(held.run)) for p, held in machine.members.expected.items()}
    assert awaited <= expected <= welcome, "who is expected is who a run would take back"
    away = {peer for peer, _ in awaited}
    for peer, name in holders.items():
        if peer in away:
            continue
        assert peer in members, f"run {name} goes on without its holder {peer}"
        assert members[peer].state == "assigned", (
            f"{peer} holds stages and is {members[peer].state}"
        )

    asked = [replica.id for replica in replicas if replica.lifecycle.asked is not None]
    assert asked == ([machine.placing.planning] if machine.placing.planning else []), (
        "one plan at a time"
    )
    open_runs = [run for run in machine.runs.values() if not run.ended]
    assert len(open_runs) <= machine.options.most_waiting
    assert {name: run.record for name, run in machine.runs.items()} == machine.decided.runs
    for run in machine.runs.values():
        _validate_history(run.record)
    assert len(machine.members.streams) <= machine.options.most_streams
    machine.probing.validate()


def _validate_replica(replica: Replica) -> None:
    record, life = replica.record, replica.lifecycle
    assert record.phase in (WAITING, BUILDING, RUNNING, EXPORTING) or record.ended, record
    assert record.pausing == (replica.handover.errand is PAUSE), record
    assert not record.pausing or record.phase in (BUILDING, RUNNING), record
    assert record.active == (record.phase in (BUILDING, RUNNING, EXPORTING)), record
    assert record.committed <= record.steps, record
    assert (life.deadline.at is not None) == record.active, f"{record}: a wait without an end (I9)"
    assert life.asked is None or record.phase == WAITING, record
    assert record.active or not replica.context.away, f"{record} waits for holders"
    if record.active:
        assert record.plan is not None, record
        assert record.peers == record.plan.peers, record
        wanted = record.run.requirements
        assert wanted.allows(record.plan), f"{record}: {record.plan}, expected {wanted.batchings}"
        assert record.term >= 1, record
        now = replica.context.plan
        assert now is not None, record
        assert replace(now, keepers=record.plan.keepers) == record.plan, record
    if record.phase == EXPORTING:
        assert record.committed == record.steps, record


def _validate_history(run: RunRecord) -> None:
    numbers = [event.number for event in run.history.recent]
    first = numbers[0] if numbers else 0
    assert numbers == list(range(first, first + len(numbers))), f"{run}: gaps in {numbers}"
    assert not numbers or numbers[-1] + 1 == run.history.numbered, run
    assert len(run.history) <= run.run.options.kept_events
    if run.ended:
        last = run.history.recent[-1].state.phase
        assert last == run.state.phase, f"{run}: its last event is not its end"
