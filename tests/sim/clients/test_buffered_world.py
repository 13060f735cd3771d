"""FedBuff in the simulated world: versions that wait for nobody, of clients some of whom began with
older ones, through broker and peers, against a plain loop over what was committed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.dag.plan.action import Action, Kind
from shoal.dag.rounds.cohorts import cohort_of, places_of
from shoal.job import Job
from shoal.proto.broker_pb2 import DONE, FAILED, RoundDone, RoundWork
from shoal.sim.ghost.device import Ghosts
from shoal.sim.ghost.round_hashes import expected_rounds
from shoal.sim.plain.plain_cohorts import expected_versions, last_version
from shoal.sim.plain.round_log import committed_rounds
from shoal.sim.virtual.orders import ActionTimes
from shoal.tests.sim.clients.moments import broker_again, losing

from .test_diverged_clients import odd_job
from .test_federated_world import exported, job_of, world_of
from .test_hosts_world import Hosts

ROUNDS = 6
SLOW: Mapping[str, float] = {"p0": 1.0, "p1": 7.0, "p2": 1.5}
"""Seconds that clients take on a peer, however many it has."""


@pytest.fixture(scope="module")
def captured(laboratory: Callable[[Job], Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    job = job_of(tmp_path_factory.mktemp("buffered"), "fedavg", ROUNDS)
    return laboratory(replace(job, name="buffered"))


def of(captured: Any, method: str = "fedbuff", rounds: int = ROUNDS, **options: Any) -> Any:
    """What was captured, of a job with these options."""
    lab, job = copy.copy(captured), captured.job
    options = {"buffer": 3, "lr": 0.75, **options} if method == "fedbuff" else {}
    sync = replace(job.sync, method=method, options=options)
    lab.job = replace(job, sync=sync, train=replace(job.train, rounds=None, steps=rounds))
    lab.spec = copy.deepcopy(captured.spec)
    lab.spec.job, lab.spec.steps = lab.job.to_json(), rounds
    return lab


@pytest.fixture
def takes(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Seconds that clients take, by name of a peer."""
    usual, known = ActionTimes.seconds, dict(SLOW)

    def seconds(times: ActionTimes, action: Action) -> float:
        if action.kind is Kind.CONTRIBUTE:
            return known[str(times._peer).partition("-")[0]]
        return usual(times, action)

    monkeypatch.setattr(ActionTimes, "seconds", seconds)
    return known


def assert_plain(lab: Any, world: Any, run: str) -> list[RoundDone]:
    """It is done, and its weights are those of a plain loop that is fed with the log. Returns the
    rounds."""
    events = world.events(run)
    assert events[-1].state.phase == DONE, events[-1].state.reason.text
    got, wanted = exported(world, run), last_version(lab.module, lab.job, events, lab.reader())
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(got[name], tensor.float(), rtol=1e-4, atol=1e-6)
    return [e.round_done for e in events if e.HasField("round_done")]


def begun(world: Any, run: str, *, last: bool = False) -> list[dict[int, RoundWork]]:
    """By round, the work of each replica when the round began; `last`: as it was told of last."""
    found: dict[int, dict[int, RoundWork]] = {}
    for event in world.events(run):
        if event.HasField("round_begun"):
            about = event.round_begun
            work = {w.replica: w for w in about.work}
            before = found.get(about.round, {})
            found[about.round] = before | work if last else before or work
    return [found[n] for n in sorted(found)]


def oldest(done: Sequence[RoundDone]) -> int:
    """By how many versions somebody was behind."""
    return max(m.behind for d in done for m in d.members)


def clients(lab: Any, number: int, work: RoundWork) -> list[int]:
    return cohort_of(12, lab.job.seed, number - work.behind, places_of(work.cohort))


def test_who_is_slow_counts_later_by_how_old_its_version_is(
    captured: Any, takes: dict[str, float]
) -> None:
    lab = of(captured)
    world = world_of(lab)
    run = world.submit(lab.spec)
    world.finish(run)
    done, events = assert_plain(lab, world, run), world.events(run)
    told = [e.evaluated for e in events if e.HasField("evaluated")]
    losses = expected_versions(lab.module, lab.job, events, lab.reader(), size=4)
    assert losses == pytest.approx({t.step: t.evaluation.loss for t in told}, rel=1e-4)
    assert oldest(done) >= 2
    took = done[-1].seconds + sum(d.seconds for d in done[:-1])
    assert took < ROUNDS * takes["p1"] / 2, "nobody waits for who is slow"
    sizes = lab.spec.client_sizes
    for number, (d, work) in enumerate(zip(done, begun(world, run), strict=True)):
        mine = {n: clients(lab, number, w) for n, w in work.items()}
        at_work = [c for some in mine.values() for c in some]
        assert len(at_work) == len({*at_work}) == 5, "so many train, none at two peers"
        assert sum(len(mine[m.replica]) for m in d.members) >= 3
        assert any(not m.behind for m in d.members)
        assert {m.replica for m in d.members} | {*d.going} == {*work}
        for m in d.members:
            samples = sum(sizes[c] for c in mine[m.replica])
            stale = any(other.behind for other in d.members)
            unit = 2**20 / (1 + m.behind) ** 0.5 if stale else 1
            assert m.weight == round(samples * unit)


def test_where_none_is_late_it_is_fedavg_to_the_bit(captured: Any) -> None:
    def hashes(lab: Any) -> list[int]:
        world = world_of(lab)
        run = world.submit(lab.spec)
        return [e.round_done.hash for e in world.finish(run) if e.HasField("round_done")]

    buffered = of(captured, buffer="100%", lr=1.0, rounds=3)
    assert hashes(buffered) == hashes(of(captured, "fedavg", 3))


@pytest.mark.parametrize("lost", ["p0", pytest.param("p1", marks=pytest.mark.slow)])
def test_whoever_is_lost_at_any_moment_its_clients_are_nobodys(
    captured: Any, takes: dict[str, float], lost: str
) -> None:
    lab = of(captured, rounds=4)

    def play(deadly: int) -> tuple[Any, str, int]:
        world = world_of(lab)
        run, count = losing(world, lab.spec, deadly, lost)
        return world, run, count

    _, _, records = play(0)
    ages = list[int]()
    for part in range(1, 4):
        world, run, _ = play(records * part // 4)
        done = assert_plain(lab, world, run)
        ages.append(oldest(done))
        assert int(lost[1]) not in {m.replica for m in done[-1].members}
    assert max(ages) >= 1 or lost == "p1"


@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.slow)])
def test_whenever_the_broker_is_started_again_it_goes_on(
    captured: Any, takes: dict[str, float], every: int
) -> None:
    lab, takes["p1"] = of(captured, rounds=4), 3.5

    def play(deadly: int) -> tuple[Any, str, int]:
        world = world_of(lab)
        run, written = broker_again(world, lab.spec, deadly, 0.2)
        return world, run, written

    world, run, records = play(0)
    assert oldest(assert_plain(lab, world, run)) == 2
    found = [play(deadly) for deadly in range(2, records + 1, every)]
    ages = [oldest(assert_plain(lab, world, run)) for world, run, _ in found]
    assert min(ages) >= 1, "work that goes on survives the broker"


def test_what_is_too_old_is_discarded_and_said_to_be(
    captured: Any, takes: dict[str, float]
) -> None:
    lab = of(captured, max_staleness=1, rounds=9)
    world = world_of(lab)
    run = world.submit(lab.spec)
    events = world.finish(run)
    done = assert_plain(lab, world, run)
    assert oldest(done) <= 1
    notes = [e.note for e in events if "discarded" in e.note]
    assert notes[0].startswith("round ")
    assert "replica 1 began" in notes[0]
    joined = [d.round for d in done for m in d.joined if m.replica == 1]
    assert joined, "it goes on from the version of the others"
    assert 1 in begun(world, run)[joined[0] + 1]
    for number, work in enumerate(begun(world, run)):
        counted = [w for w in work.values() if w.behind <= 1]
        assert sum(len(clients(lab, number, w)) for w in counted) == 5, "its clients are free"


def test_a_version_that_only_the_lost_had_ends_the_run(
    captured: Any, takes: dict[str, float]
) -> None:
    lab = of(captured)
    world = world_of(lab)
    run = world.submit(lab.spec)
    world.until(lambda: any(e.HasField("round_done") for e in world.events(run)))
    world.kill("p0")
    world.kill("p2")
    world.finish(run)
    last = world.events(run)[-1].state
    assert last.phase == FAILED
    assert "nobody is left that has its version" in last.reason.text


def test_ghosts_come_to_what_a_loop_of_hashes_makes_of_older_versions(
    captured: Any, takes: dict[str, float]
) -> None:
    lab = of(captured)
    world = world_of(lab, device=Ghosts())
    run = world.submit(lab.spec)
    events = world.finish(run)
    rounds = committed_rounds(
        events, microbatches=1, microbatch_size=1, clients=12, seed=lab.job.seed
    )
    assert any(m.behind for r in rounds for m in r.members)
    graph = lab.graph.bind(lab.job.train.microbatch_size)
    loop = expected_rounds(graph, lab.job.seed, rounds, 1, clips=False)
    assert [e.round_done.hash for e in events if e.HasField("round_done")] == loop.versions


@pytest.mark.slow
def test_clients_of_no_number_are_left_out_of_the_version_that_others_count_for(
    laboratory: Callable[[Job], Any], takes: dict[str, float], tmp_path: Path
) -> None:
    job, found = odd_job(tmp_path, "fedavg"), 0
    sync = replace(job.sync, method="fedbuff", per_round=7, options={"buffer": 4})
    lab = laboratory(replace(job, name="odd buffered", sync=sync))
    for slow in ("p0", "p1", "p2"):
        takes |= dict.fromkeys(("p0", "p1", "p2"), 1.0) | {slow: 3.5}
        world = world_of(lab)
        run = world.submit(lab.spec)
        world.finish(run)
        assert oldest(assert_plain(lab, world, run)) >= 1
        left = [w for work in begun(world, run, last=True) for w in work.values() if w.left_out]
        found += any(w.behind for w in left)
    assert found, "none was behind"


@pytest.mark.slow
def test_a_run_goes_on_from_a_checkpoint_without_those_who_were_training(
    captured: Any, takes: dict[str, float]
) -> None:
    lab, takes["p1"] = of(captured), 3.5
    lab.job = replace(lab.job, output=replace(lab.job.output, every=2))
    lab.spec.job = lab.job.to_json()
    world = world_of(lab)
    events = world.finish(world.submit(lab.spec))
    saved = next(e.checkpoint for e in events if e.HasField("checkpoint"))
    assert saved.step == 2
    until = next(i for i, e in enumerate(events) if e.HasField("round_done") and e.round_done.round)
    assert events[until].round_done.going, "somebody was training"
    version = last_version(lab.module, lab.job, events[: until + 1], lab.reader())
    lab.module = copy.deepcopy(lab.module)
    lab.module.load_state_dict(version, strict=False)
    again = world_of(lab)
    again.saved |= world.saved
    lab.spec.resumed.CopyFrom(saved)
    run = again.submit(lab.spec)
    again.finish(run)
    done = assert_plain(lab, again, run)
    assert [d.round for d in done] == [2, 3, 4, 5]
    assert oldest(done) >= 1


@pytest.mark.slow
def test_who_is_behind_has_the_version_of_others_whatever_codec_writes_means(
    captured: Any, takes: dict[str, float]
) -> None:
    lab = of(captured)
    lab.job = replace(lab.job, codec=replace(lab.job.codec, sync="int8"))
    lab.spec.job = lab.job.to_json()
    world = world_of(lab)
    run = world.submit(lab.spec)
    events = world.finish(run)  # and the monitor compares what they begin with
    assert events[-1].state.phase == DONE, events[-1].state.reason.text
    assert oldest([e.round_done for e in events if e.HasField("round_done")]) >= 2


def test_hosts_that_keep_their_data_wait_for_nobody(
    captured: Any, takes: dict[str, float], tmp_path: Path
) -> None:
    hosts = Hosts.of(of(captured, "fedavg"), tmp_path)
    sync = replace(hosts.job.sync, method="fedbuff", per_round=3, options={"buffer": 2})
    hosts.job = replace(hosts.job, sync=sync)
    hosts.spec.job = hosts.job.to_json()
    takes |= {"h0": 1.0, "h1": 5.0, "h2": 1.5}
    world = hosts.world()
    run = world.submit(hosts.spec)
    world.finish(run)
    done = hosts.assert_expected(world, run)
    assert oldest(done) >= 2
    assert {len(d.members) for d in done} <= {2, 3}
    told = [e.evaluated for e in world.events(run) if e.HasField("evaluated")]
    assert [t.step for t in told] == [2, 4, 6], "by who begins with the version"
