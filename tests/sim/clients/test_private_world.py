"""Clients that noise hides, in the simulated world: through broker and peers, against a plain loop
over the same cohorts with the same noise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.broker.policies import segments
from shoal.client import submission
from shoal.dag.rounds.vector import Span
from shoal.job import Job
from shoal.job.clients.client_privacy import SPARE_SUMS, ClientPrivacy
from shoal.peer.rounds.client_tensors import ClientTensors
from shoal.proto.broker_pb2 import DONE, FAILED, RoundPlan
from shoal.sim.ghost.device import Ghosts
from shoal.sim.plain.client_loops import train_cohorts
from shoal.sim.plain.plain_cohorts import aggregate_of, committed_cohorts, expected_versions
from shoal.tests.sim.clients.moments import broker_again, losing
from shoal.tests.sim.clients.test_federated_world import METHODS, exported, job_of, world_of

CLIP = 0.4
"""Some clients of these jobs move farther, and some do not."""


@pytest.fixture(autouse=True)
def small_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs say how much noise they want, so that no accountant is asked; and small vectors are
    divided among all who may add up."""
    monkeypatch.setattr(submission, "with_noise", lambda job: job)
    monkeypatch.setattr(segments, "UNDIVIDED", 10)


def private(folder: Path, method: str = "fedavg", rounds: int = 4, noise: float = 0.2) -> Job:
    job = job_of(folder, method, rounds)
    privacy = ClientPrivacy(clip=CLIP, epsilon=8.0, delta=1e-5, noise=noise)
    return replace(job, sync=replace(job.sync, weight="equal", privacy=privacy))


def assert_expected(lab: Any, world: Any, run: str) -> list[Any]:
    """It is done, and its weights are those of a plain loop over what it committed. Returns the
    rounds."""
    events = world.events(run)
    assert events[-1].state.phase == DONE, events[-1].state.reason.text
    got, job, reader = exported(world, run), lab.job, lab.reader()
    made = train_cohorts(
        lab.module,
        committed_cohorts(events, job, reader),
        lambda at: reader.samples(np.array(at)),
        METHODS[job.sync.chosen][1],
        lr=job.train.lr,
        momentum=job.train.momentum,
        aggregate=aggregate_of(job, events),
    )
    for name, tensor in made.shared.items():
        torch.testing.assert_close(got[name], tensor.float(), rtol=1e-4, atol=2e-6)
    return [e.round_done for e in events if e.HasField("round_done")]


@pytest.mark.parametrize(("method", "peers"), [("fedprox", 1), ("fedadam", 3)])
def test_what_clients_moved_is_told_by_the_version_alone(
    laboratory: Callable[[Job], Any], tmp_path: Path, method: str, peers: int
) -> None:
    job = private(tmp_path, method)
    lab = laboratory(replace(job, plan=replace(job.plan, replicas=peers)))
    world = world_of(lab, peers)
    run = world.submit(lab.spec)
    events = world.finish(run)
    done = assert_expected(lab, world, run)
    assert [d.sums for d in done] == [1, 2, 3, 4]
    assert all(d.drift == d.clients_moved == 0.0 for d in done), "what clients moved is not told"
    said = {
        e.evaluated.step: e.evaluated.evaluation.loss for e in events if e.HasField("evaluated")
    }
    size = lab.job.train.microbatch_size
    wanted = expected_versions(lab.module, lab.job, events, lab.reader(), size=size)
    assert said == pytest.approx(wanted)
    assert said


@pytest.mark.parametrize("odd", [[17], pytest.param(slice(None), marks=pytest.mark.slow)])
def test_a_client_that_comes_to_no_number_moves_by_nothing_and_nobody_hears_of_it(
    laboratory: Callable[[Job], Any], tmp_path: Path, odd: Any
) -> None:
    """One sample is odd, or all are, and so all clients."""
    job = private(tmp_path, "fedavgm")
    with np.load(tmp_path / "data.npz") as found:
        x = found["x"].copy()
        x[odd] = np.inf
        np.savez(tmp_path / "data.npz", x=x, y=found["y"])
    name = f"odd {odd}"
    lab = laboratory(replace(job, name=name, sync=replace(job.sync, per_round=12)))
    world = world_of(lab)
    run = world.submit(lab.spec)
    events = world.finish(run)
    done = assert_expected(lab, world, run)
    assert [sum(m.weight for m in d.members) for d in done] == [12] * 4, "all clients"
    assert not any(w.left_out for e in events for w in e.round_begun.work)
    assert not any("finite" in e.note for e in events)


class Drawn:
    """Noise that was drawn, by round, attempt and part, with whom it was added to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sums: dict[tuple[int, int, Span], set[tuple[Any, ...]]] = {}
        whole = ClientTensors.sum

        def sum_(algebra: ClientTensors, part: Span, plan: RoundPlan) -> Any:
            givers = [
                tuple((g.peer, g.weight) for g in s.givers)
                for s in plan.segments
                if s.start <= part[0] < s.stop
            ]
            self.sums.setdefault((plan.round, plan.attempt, part), set()).add(*givers[:1])
            return whole(algebra, part, plan)

        monkeypatch.setattr(ClientTensors, "sum", sum_)

    @property
    def attempts(self) -> set[tuple[int, int]]:
        return {(round_, attempt) for round_, attempt, _ in self.sums}


def test_whoever_is_lost_at_any_moment_no_noise_is_in_two_sums_and_none_is_not_counted(
    laboratory: Callable[[Job], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = laboratory(private(tmp_path))

    def play(deadly: int) -> tuple[Any, str, int, Drawn]:
        drawn = Drawn(monkeypatch)
        world = world_of(lab)
        run, count = losing(world, lab.spec, deadly)
        monkeypatch.undo()
        monkeypatch.setattr(segments, "UNDIVIDED", 10)
        return world, run, count, drawn

    _, _, records, _ = play(0)
    again = smaller = 0
    for part in range(1, 6, 2):
        world, run, _, drawn = play(records * part // 6)
        done = assert_expected(lab, world, run)
        assert all(len(givers) == 1 for givers in drawn.sums.values()), "one noise, two sums"
        assert done[-1].sums >= len(drawn.attempts), "a sum was not counted"
        again += done[-1].sums > len(done)
        smaller += any(len(d.members) < 3 for d in done)
    assert smaller, "nobody was ever left out"
    assert again, "no attempt was ever made again"


def test_a_broker_that_is_started_again_counts_on(
    laboratory: Callable[[Job], Any], tmp_path: Path
) -> None:
    lab = laboratory(private(tmp_path))

    def play(deadly: int) -> tuple[Any, str, int]:
        world = world_of(lab)
        run, written = broker_again(world, lab.spec, deadly)
        return world, run, written

    _, _, records = play(0)
    for deadly in range(3, records, 24):
        world, run, _ = play(deadly)
        events, done = world.events(run), assert_expected(lab, world, run)
        planned = sum(e.HasField("round_planned") for e in events)
        assert done[-1].sums == planned >= len(done)


def test_of_a_run_whose_rounds_are_made_again_the_last_ones_are_left_out(
    laboratory: Callable[[Job], Any], tmp_path: Path
) -> None:
    """On ghosts, which the broker tells the same."""
    lab = laboratory(private(tmp_path, rounds=6))
    world = world_of(lab, device=Ghosts())
    world.until(lambda: len(world.broker.machine.members.pool) == 3)
    run = world.submit(lab.spec)
    checks, killed = world.observe, 0

    def observe(seen: Any) -> None:
        nonlocal killed
        checks(seen)
        planned = sum(e.HasField("round_planned") for e in world.events(run))
        if planned == 2 and not killed and world.peers["p1"].alive:
            killed = 1
            world.kill("p1")

    world.observe = observe
    events = world.finish(run)
    assert killed
    assert events[-1].state.phase == DONE, events[-1].state.reason.text
    done = [e.round_done for e in events if e.HasField("round_done")]
    assert done[-1].sums <= 6 + SPARE_SUMS
    again = done[-1].sums - len(done)
    assert again > 0
    assert len(done) == 6 - again


def test_no_sum_is_made_beyond_the_budget(
    laboratory: Callable[[Job], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = laboratory(private(tmp_path))
    monkeypatch.setattr(ClientPrivacy, "sums", lambda self, rounds: 1)
    monkeypatch.setattr("shoal.broker.records.cohort_ledger.SPARE_SUMS", -9)
    world = world_of(lab)
    run = world.submit(lab.spec)
    events = world.finish(run)
    assert (events[-1].state.phase, events[-1].state.reason.code) == (FAILED, "privacy")
    assert sum(e.HasField("round_planned") for e in events) == 1


def test_without_any_noise_a_peer_trains_no_hidden_clients(
    laboratory: Callable[[Job], Any], tmp_path: Path
) -> None:
    lab = laboratory(private(tmp_path, noise=0.0))
    world = world_of(lab)
    run = world.submit(lab.spec)
    last = world.finish(run)[-1].state
    assert last.phase == FAILED
    assert "noise" in last.reason.text


def test_without_noise_and_with_a_clip_that_nobody_reaches_it_is_fedavg(
    laboratory: Callable[[Job], Any], tmp_path: Path
) -> None:
    found = []
    for noise, clip in ((1e-12, 500.0), (0.0, 0.0)):
        job = private(tmp_path, noise=noise)
        privacy = replace(job.sync.privacy, clip=clip) if clip else None  # type: ignore[type-var]
        lab = laboratory(replace(job, sync=replace(job.sync, privacy=privacy), name=f"clip {clip}"))
        world = world_of(lab)
        run = world.submit(lab.spec)
        world.finish(run)
        found.append(exported(world, run))
    hidden, plain = found
    for name, tensor in plain.items():
        torch.testing.assert_close(hidden[name], tensor, rtol=0.0, atol=3e-7)
