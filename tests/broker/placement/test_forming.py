"""A run's replicas begin together, with the plans that were made for all of them at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shoal.broker.events import FormReplicas, MakePlan, PlanFailed, PlanReady, ReplicasFormed
from shoal.broker.journal.decided import DurableState
from shoal.broker.placement.placing import _over
from shoal.broker.placement.waiting import Offered
from shoal.proto.broker_pb2 import BUILDING, FAILED, WAITING, Formation, FormedReplica
from shoal.tests.broker.conftest import make_plan, make_spec

LOCAL = {"sync": {"kind": "local"}, "plan": {"replicas": 2}}


def answer(ask: FormReplicas, *groups: str, kind: str = "local", each: int = 1) -> ReplicasFormed:
    """Each group of peers is a replica, with so many microbatches of a local step."""
    formation = Formation(kind=kind, replicas=[FormedReplica(peers=g) for g in groups])
    plans = tuple(
        PlanReady(ask.replica, ask.version, make_plan(*g, microbatches=each)) for g in groups
    )
    return ReplicasFormed(ask.replica, ask.version, formation, plans)


def submitted(world: Any, peers: str, **job: Any) -> tuple[Any, list[Any]]:
    for peer in peers:
        world.join(peer)
    return world.submit(make_spec(**job))


def phases(world: Any, run: Any) -> list[Any]:
    return [r.phase for r in world.state(run).replicas]


def test_all_begin_at_once_and_who_is_left_over_keeps_snapshots(world: Any) -> None:
    run, out = submitted(world, "abc", **LOCAL)
    ask = world.only(out, FormReplicas)
    assert [o.peer for o in ask.peers] == ["a", "b", "c"]
    out = world.handle(answer(ask, "a", "b"))
    assert phases(world, run) == [BUILDING, BUILDING]
    kinds = [e.WhichOneof("kind") for e in world.published(out)]
    assert kinds.count("formed") == 1
    replicas = world.machine.runs[run].replicas
    assert [r.record.peers for r in replicas] == [("a",), ("b",)]
    assert [r.record.plan.warm for r in replicas] == [("c",), ()]


def test_none_begins_before_there_are_peers_for_all(world: Any) -> None:
    run, out = submitted(world, "a", **LOCAL)
    assert not any(isinstance(i, FormReplicas | MakePlan) for i in out)
    assert "needs 2 peers" in world.state(run).reason.text
    ask = world.only(world.join("b"), FormReplicas)
    text = "2 replicas hold the model 2 times, short by 1 B"
    world.handle(PlanFailed(ask.replica, ask.version, text, "memory", 1))
    assert phases(world, run) == [WAITING, WAITING]
    assert text in world.state(run).reason.text
    assert isinstance(world.only(world.join("c"), FormReplicas), FormReplicas)


def test_one_that_is_lost_later_is_planned_by_itself(world: Any) -> None:
    run, out = submitted(world, "ab", recovery={"ladder": ["checkpoint"]}, **LOCAL)
    world.handle(answer(world.only(out, FormReplicas), "a", "b"))
    world.break_stream("b")
    assert phases(world, run) == [BUILDING, WAITING]
    waits = world.state(run).replicas[1].reason.text
    assert "has 0 in the pool; 1 more works for its other replicas: start" in waits
    ask = world.only(world.join("c"), MakePlan)
    assert (ask.replica, [o.peer for o in ask.peers]) == (f"{run}.1", ["c"])


def test_who_lacks_memory_later_is_asked_for_once_over_its_own_share(world: Any) -> None:
    """Peers of another replica's share are nothing new to it."""
    _, out = submitted(world, "ab", recovery={"ladder": ["checkpoint"]}, **LOCAL)
    world.handle(answer(world.only(out, FormReplicas), "a", "b"))
    world.break_stream("a")
    world.break_stream("b")
    asked: list[tuple[str, tuple[str, ...]]] = []
    for peer in "cd":
        out = world.join(peer)
        while asks := [i for i in out if isinstance(i, MakePlan)]:
            asked.append((asks[0].replica, tuple(o.peer for o in asks[0].peers)))
            assert len({*asked}) == len(asked), "asked again over the same peers"
            out = world.handle(
                PlanFailed(asks[0].replica, asks[0].version, "too little", "memory", 1 << 30)
            )
    assert len({replica for replica, _ in asked}) == 2


def test_how_many_there_are_is_known_from_the_formation_on(world: Any) -> None:
    run, out = submitted(world, "abc", microbatches=4, sync={"kind": "local"})
    assert len(world.state(run).replicas) == 1
    world.handle(answer(world.only(out, FormReplicas), "ab", "c", each=2))
    found = world.machine.runs[run]
    assert len(found.replicas) == found.submitted.requirements.replicas == 2
    assert found.has_rounds
    assert phases(world, run) == [BUILDING, BUILDING]
    options = world.machine.options
    again = DurableState(options, world.journal).runs[run]
    kept = DurableState(options, DurableState(options, world.journal).snapshot()).runs[run]
    for record in (again, kept):
        assert [r.peers for r in record.replicas] == [("a", "b"), ("c",)]
        assert record.run.requirements == found.submitted.requirements
    world.restart()  # what was being built is planned anew
    assert phases(world, run) == [WAITING, WAITING]


def test_equal_weights_are_planned_as_ever(world: Any) -> None:
    run, out = submitted(world, "ab", sync={"kind": "auto"})
    ask = world.only(out, FormReplicas)
    told = Formation(kind="allreduce", reasons=["one replica"])
    out = world.handle(ReplicasFormed(ask.replica, ask.version, told))
    make = world.only(out, MakePlan)
    world.handle(PlanReady(make.replica, make.version, make_plan("a", "b")))
    assert phases(world, run) == [BUILDING]
    found = world.machine.runs[run]
    assert not found.has_rounds
    assert found.submitted.requirements.sync.kind == "allreduce"


def test_a_peer_that_left_meanwhile_has_them_formed_again(world: Any) -> None:
    run, out = submitted(world, "abc", **LOCAL)
    ask = world.only(out, FormReplicas)
    world.break_stream("b")
    again = world.only(world.handle(answer(ask, "a", "b")), FormReplicas)
    assert [o.peer for o in again.peers] == ["a", "c"]
    assert phases(world, run) == [WAITING, WAITING]


@pytest.mark.parametrize(
    ("groups", "kind", "each", "says"),
    [
        (("a", "a"), "local", 1, "a peer is in two replicas"),
        (("a",), "local", 2, "it has 1 replicas, the run 2"),
        (("a", "b"), "local", 2, "do not share the 2 microbatches"),
        (("a", "b"), "allreduce", 1, "2 plans for 2 replicas of kind"),
        ((), "local", 1, "it has no plan"),
        (("a", "x"), "local", 1, "not offered"),
    ],
)
def test_a_formation_that_cannot_be_is_refused(
    world: Any, groups: tuple[str, ...], kind: str, each: int, says: str
) -> None:
    run, out = submitted(world, "ab", **LOCAL)
    world.handle(answer(world.only(out, FormReplicas), *groups, kind=kind, each=each))
    assert world.state(run).phase == FAILED
    assert says in world.state(run).reason.text


def test_a_client_is_planned_over_its_host_and_peers_without_data_of_others() -> None:
    mine, its = (SimpleNamespace(hash=h) for h in "ab")
    replica: Any = SimpleNamespace(
        context=SimpleNamespace(forms=False),
        run=SimpleNamespace(owner="ann", spec=SimpleNamespace(client_data=[mine, its])),
        record=SimpleNamespace(data=mine),
    )
    has = {"host": "a", "twin": "a", "other": "b", "both": "ab", "none": "", "another": "c"}
    members: Any = [
        SimpleNamespace(id=name, manifests={("ann", h): () for h in hashes})
        for name, hashes in has.items()
    ]
    members.append(SimpleNamespace(id="of another's run", manifests={("bob", "b"): ()}))
    found = [m.id for m in _over(replica, [], Offered(tuple(members)))]
    assert found == [m.id for m in members if m.id != "other"]
