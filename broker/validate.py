"""The invariants of the broker's machine; tests call this after every event."""

from __future__ import annotations

from ..dag.plan.plan import PeerId
from ..proto.broker_pb2 import BUILDING, EXPORTING, RUNNING, WAITING
from .events import RunId
from .machine import BrokerMachine
from .recovery.handing import PAUSE
from .runs.runs import Run

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

    holders: dict[PeerId, RunId] = {}
    parts = {run.id: frozenset(run.parts) for run in machine.runs.values()}
    for run in machine.runs.values():
        _validate_run(run)
        if run.active:
            for peer in filter(run.needs, run.peers):
                assert peer not in holders, f"{peer} holds stages of {holders[peer]} and {run.id}"
                holders[peer] = run.id
    for peer, member in members.items():
        if member.state == "assigned":
            found = machine.runs.get(member.run) if member.run else None
            assert found is not None, f"{peer} is assigned to nothing"
            assert found.active, f"{peer} is assigned to {found}"
            assert peer in parts[found.id], f"{peer} is assigned to {found} in vain"
    for run in machine.runs.values():
        assert not run.sets.peers or not run.ended, f"{run} has ended and keeps {run.sets}"
        assert set(run.sets.peers) <= set(members), f"{run}: snapshots at peers that are gone"
    awaited = {(p, run.id) for run in machine.runs.values() for p in run.returning.away}
    welcome = {(p, run.id) for run in machine.runs.values() for p in run.welcome}
    expected = {(p, RunId(held.run)) for p, held in machine.members.expected.items()}
    assert awaited <= expected <= welcome, "who is expected is who a run would take back"
    away = {peer for peer, _ in awaited}
    for peer, run_id in holders.items():
        if peer in away:
            continue
        assert peer in members, f"run {run_id} goes on without its holder {peer}"
        assert members[peer].state == "assigned", (
            f"{peer} holds stages and is {members[peer].state}"
        )

    asked = [run.id for run in machine.runs.values() if run.asked is not None]
    assert asked == ([machine.placing.planning] if machine.placing.planning else []), (
        "one plan at a time"
    )
    open_runs = [run for run in machine.runs.values() if not run.ended]
    assert len(open_runs) <= machine.options.most_waiting
    assert len(machine.members.streams) <= machine.options.most_streams
    machine.probing.validate()


def _validate_run(run: Run) -> None:
    assert run.phase in (WAITING, BUILDING, RUNNING, EXPORTING) or run.ended, run
    assert run.pausing == (run.handing.errand is PAUSE), run
    assert not run.pausing or run.phase in (BUILDING, RUNNING), run
    assert run.active == (run.phase in (BUILDING, RUNNING, EXPORTING)), run
    assert run.committed <= run.spec.steps, run
    assert (run.deadline is not None) == run.active, f"{run}: a wait without an end (I9)"
    assert run.asked is None or run.phase == WAITING, run
    assert run.active or not run.returning, f"{run} waits for holders"
    if run.active:
        assert run.plan is not None, run
        assert run.peers == run.plan.peers, run
        assert run.wish.allows(run.plan), f"{run}: {run.plan}, expected {run.wish.batchings}"
        assert run.term >= 1, run
    if run.phase == EXPORTING:
        assert run.committed == run.spec.steps, run
    numbers = [event.number for event in run.history.recent]
    first = numbers[0] if numbers else 0
    assert numbers == list(range(first, first + len(numbers))), f"{run}: gaps in {numbers}"
    assert not numbers or numbers[-1] + 1 == run.history.numbered, run
    assert len(run.history) <= run.options.kept_events
    if run.ended:
        assert run.history.recent[-1].state.phase == run.phase, (
            f"{run}: its last event is not its end"
        )
