"""Clients of a peer that is lost in a round, which others train in the same round, in the simulated
world: as if nobody had been lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.broker.events import PeerSaid, Persist, Publish, RunAsked, RunId
from shoal.dag.cost.network import Network
from shoal.dag.plan.action import Action, Kind
from shoal.dag.plan.plan import PeerId
from shoal.dag.rounds.cohorts import cohort_of
from shoal.job import Job
from shoal.job.units import Duration
from shoal.peer.core.events import BeginRound
from shoal.peer.data.partition import partition_of
from shoal.sim.ghost.device import Ghosts
from shoal.sim.ghost.round_hashes import expected_rounds
from shoal.sim.plain.plain_cohorts import committed_cohorts
from shoal.sim.plain.round_log import committed_rounds
from shoal.sim.virtual.control import BROKER
from shoal.sim.virtual.orders import ActionTimes
from shoal.sim.virtual.wan import Wan

from .moments import in_rounds
from .test_federated_world import assert_expected, job_of, world_of


def played(lab: Any, lost: dict[str, int], restart: int = 0, **options: Any) -> tuple[Any, str]:
    """Return the world of a run that has ended, and its id. `lost`: by peer, the round in which it
    is lost, once it has begun. `restart`: after so many records behind the first loss the broker is
    started again; 0: it is not."""
    world = world_of(lab, **options)
    run, checks, written = world.submit(lab.spec), world.observe, 0

    def observe(seen: Any) -> None:
        nonlocal written
        checks(seen)
        record = seen.record
        begins = isinstance(record, BeginRound) and lost.get(seen.who) == record.start.round
        if begins and world.peers[seen.who].alive:
            world.kill(seen.who)
        written += isinstance(record, Persist) and not all(p.alive for p in world.peers.values())
        if restart and isinstance(record, Persist) and written == restart:
            world.restart_broker(1.0)

    world.observe = observe
    world.finish(run)
    assert not any(world.peers[name].alive for name in lost)
    return world, run


def clients(lab: Any, world: Any, run: str) -> list[list[int]]:
    """Return by round whose work is in the version."""
    found = committed_cohorts(world.events(run), lab.job, lab.reader())
    return [[work.client for work in cohort] for cohort in found]


@pytest.mark.parametrize(
    ("method", "round_"),
    [
        ("fednova", 1),
        pytest.param("fedprox", 0, marks=pytest.mark.slow),
        *(pytest.param("fedavgm", n, marks=pytest.mark.slow) for n in range(4)),
    ],
)
def test_who_is_lost_has_its_clients_trained_by_others_in_the_same_round(
    laboratory: Callable[[Job], Any], tmp_path: Path, method: str, round_: int
) -> None:
    rounds = max(2, round_ + 1)
    lab = laboratory(replace(job_of(tmp_path, method, rounds), name=f"{rounds} of {method}"))
    whole = played(lab, {})
    world, run = played(lab, {"p1": round_})
    done = assert_expected(lab, world, run)
    assert clients(lab, world, run) == clients(lab, *whole)
    assert [len(d.members) for d in done] == [3] * round_ + [2] * (rounds - round_)
    same = assert_expected(lab, *whole)
    for mine, its in zip(done, same, strict=True):
        assert mine.clients_moved == pytest.approx(its.clients_moved, rel=1e-4)
        assert mine.mean_moved == pytest.approx(its.mean_moved, rel=1e-4)


def test_one_after_the_other_may_be_lost(laboratory: Callable[[Job], Any], tmp_path: Path) -> None:
    lab, again = laboratory(replace(job_of(tmp_path, "fedavg", 3), name="three")), False
    world = world_of(lab)
    run, checks = world.submit(lab.spec), world.observe

    def observe(seen: Any) -> None:
        nonlocal again
        checks(seen)
        begins = isinstance(seen.record, BeginRound)
        if begins and seen.record.start.round == 1 and seen.who == "p0" and not again:
            world.kill("p0")
            again = True
        if begins and seen.record.start.more and seen.who == "p2" and world.peers["p2"].alive:
            world.kill("p2")

    world.observe = observe
    world.finish(run)
    assert not world.peers["p2"].alive
    done = assert_expected(lab, world, run)
    assert [len(d.members) for d in done] == [3, 1, 1]
    assert [len(c) for c in clients(lab, world, run)] == [5] * 3


@pytest.mark.slow
def test_whenever_the_broker_is_started_again_meanwhile_they_count_once(
    laboratory: Callable[[Job], Any], tmp_path: Path
) -> None:
    lab, counts = laboratory(replace(job_of(tmp_path, "fedavg", 2), name="two")), set[int]()
    for restart in range(1, 12):
        world, run = played(lab, {"p1": 1}, restart)
        assert_expected(lab, world, run)
        counts |= {len(c) for c in clients(lab, world, run)}
    assert max(counts) == 5


@pytest.mark.parametrize("name", ["p0", pytest.param("p1", marks=pytest.mark.slow)])
def test_who_leaves_waits_for_nobody_to_take_its_part(
    laboratory: Callable[[Job], Any], tmp_path: Path, name: str
) -> None:
    """Clients make no step behind which a spare peer with a copy could: it had waited for all of
    the time that steps take where nothing is known of them, 300 s."""
    lab = laboratory(job_of(tmp_path, "fedavg", 6))
    world, at = world_of(lab, 4), 0.0

    def leave(number: int) -> None:
        nonlocal at
        if number == 260:
            at = world.now
            world.leave(name)

    run, _ = in_rounds(world, lab.spec, leave)
    assert_expected(lab, world, run)
    waits = [line for line in world.log if f" {name} waits for" in line]
    assert not any("to take its part at step" in line for line in waits), waits
    ends = [e.at_s for e in world.events(run) if e.HasField("round_done") and e.at_s > at]
    gone = [line for line in world.log if f" {name} says goodbye" in line]
    assert not waits or float(gone[0].split()[0]) < ends[1], "behind the round, at the latest"


@pytest.mark.parametrize(
    "tables",
    [
        {"sync": {"deadline": Duration("50ms")}},
        {"sync": {"aggregate": "median", "weight": "equal"}},
    ],
)
def test_where_they_cannot_be_trained_they_are_left_out(
    laboratory: Callable[[Job], Any], tmp_path: Path, tables: dict[str, Any]
) -> None:
    job = job_of(tmp_path, "fedavg", 2)
    sync = replace(job.sync, **tables["sync"])
    lab = laboratory(replace(job, name=f"left out {sync.aggregate} {sync.deadline}", sync=sync))
    world, run = played(lab, {"p1": 1})
    assert min(len(c) for c in clients(lab, world, run)) < 5


def test_ghosts_train_them_too(laboratory: Callable[[Job], Any], tmp_path: Path) -> None:
    lab = laboratory(job_of(tmp_path, "fedavg"))
    graph = lab.graph.bind(lab.job.train.microbatch_size)
    world, run = played(lab, {"p1": 1}, device=Ghosts())
    events = world.events(run)
    assert any(w.more for e in events for w in e.round_begun.work)
    rounds = committed_rounds(
        events, microbatches=1, microbatch_size=1, clients=12, seed=lab.job.seed
    )
    loop = expected_rounds(graph, lab.job.seed, rounds, 1, clips=False)
    assert [e.round_done.hash for e in events if e.HasField("round_done")] == loop.versions


def test_one_of_them_that_diverges_is_left_out_whatever_is_said_twice(
    laboratory: Callable[[Job], Any], tmp_path: Path
) -> None:
    job = replace(job_of(tmp_path, "fedavg", 2), name="diverges")
    assert job.data.partition is not None
    reader = laboratory(replace(job, name="before")).reader()
    [odd] = cohort_of(12, job.seed, 1, [2])
    bad = partition_of(job.data.partition, "y", reader).train(odd)[0]
    with np.load(tmp_path / "data.npz") as found:
        x = found["x"].copy()
        x[bad] = np.inf
        np.savez(tmp_path / "data.npz", x=x, y=found["y"])
    lab, said = laboratory(job), list[Any]()
    world = world_of(lab)
    run, checks = world.submit(lab.spec), world.observe

    def observe(seen: Any) -> None:
        checks(seen)
        record = seen.record
        if isinstance(record, BeginRound) and record.start.round == 1 and seen.who == "p1":
            world.kill("p1")
        if isinstance(record, PeerSaid) and record.message.round.round == 1 and len(said) < 2:
            said.append(record)
        if isinstance(record, Publish) and any(w.more for w in record.event.round_begun.work):
            world.after(0.0, lambda: [world.broker.handle(again) for again in said])

    world.observe = observe
    world.finish(run)
    assert [r.message.round.more for r in said] == [0, 0]
    assert_expected(lab, world, run)
    last = cohort_of(12, job.seed, 1, range(5))
    assert sorted(clients(lab, world, run)[1]) == sorted({*last} - {odd})


def test_who_is_not_back_yet_behind_a_restart_of_the_broker_is_waited_for(
    laboratory: Callable[[Job], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of clients nobody knows how long local work takes, and p0 is the nearest."""
    lab = laboratory(replace(job_of(tmp_path, "fedavg", 2), name="2 of fedavg"))
    usual = ActionTimes.seconds

    def seconds(times: ActionTimes, action: Action) -> float:
        return 2.0 if action.kind is Kind.CONTRIBUTE else usual(times, action)

    monkeypatch.setattr(ActionTimes, "seconds", seconds)
    names, shape = tuple(map(PeerId, ("p0", "p1", "p2", BROKER))), (4, 4)
    latency = np.full(shape, 0.2)
    latency[0, 3] = latency[3, 0] = 0.001
    free = np.full(4, np.inf)
    wan = Wan(Network(names, latency, np.full(shape, 1e8), free, free), seed=0)
    world = world_of(lab, wan=wan)
    run, checks, begun = world.submit(lab.spec), world.observe, set()

    def observe(seen: Any) -> None:
        checks(seen)
        if isinstance(seen.record, BeginRound) and not seen.record.start.round:
            begun.add(seen.who)
            if len(begun) == 3:
                world.restart_broker(3.0)

    world.observe = observe
    world.finish(run)
    assert [len(d.members) for d in assert_expected(lab, world, run)] == [3, 3]


def test_a_pause_that_would_lose_the_version_is_refused(
    laboratory: Callable[[Job], Any], tmp_path: Path
) -> None:
    """Behind the first round the peers alone have it, and a pause gives them back."""
    lab = laboratory(job_of(tmp_path, "fedavg", 2))
    world = world_of(lab)
    run = world.submit(lab.spec)
    world.until(lambda: any(e.HasField("round_done") for e in world.events(run)))
    said = str(world.broker.ask(lambda request: RunAsked(request, RunId(run), "pause")))
    assert "of 1 round, is with its peers alone" in said
    assert f"`shoal finish {run}`" in said
    world.finish(run)
    assert_expected(lab, world, run)
