"""Aggregates that bear with wrong clients, in the simulated world: through broker and peers,
against a plain loop over the same cohorts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.broker.policies import segments
from shoal.dag.rounds import combiners, wiring
from shoal.job import Job
from shoal.peer.rounds.algebra import RoundAlgebra
from shoal.proto.broker_pb2 import DONE
from shoal.sim.ghost.device import Ghosts
from shoal.sim.ghost.round_hashes import expected_rounds
from shoal.sim.ghost.rounds import HashAlgebra
from shoal.sim.plain.client_loops import train_cohorts
from shoal.sim.plain.plain_cohorts import aggregate_of, committed_cohorts, expected_versions
from shoal.sim.plain.round_log import committed_rounds
from shoal.tests.sim.clients.moments import losing
from shoal.tests.sim.clients.test_federated_world import METHODS, exported, job_of, world_of

RULES: dict[str, dict[str, Any]] = {
    "median": {},
    "trimmed-mean": {"byzantine": 2},
    "krum": {"byzantine": "20%"},
    "multi-krum": {"byzantine": 1},
    "flag": {},
}


def robust(folder: Path, aggregate: str, method: str = "fedavg") -> Job:
    job = job_of(folder, method)
    sync = replace(job.sync, aggregate=aggregate, weight="equal", **RULES[aggregate])
    return replace(job, sync=sync)


def assert_expected(lab: Any, world: Any, run: str) -> list[Any]:
    """It is done, and its weights are those of a plain loop over what it committed. Returns the
    rounds."""
    events = world.events(run)
    assert events[-1].state.phase == DONE, events[-1].state.reason.text
    got, job, reader = exported(world, run), lab.job, lab.reader()
    _, rule = METHODS[job.sync.chosen]
    made = train_cohorts(
        lab.module,
        committed_cohorts(events, job, reader),
        lambda at: reader.samples(np.array(at)),
        rule,
        lr=job.train.lr,
        momentum=job.train.momentum,
        aggregate=aggregate_of(job),
    )
    assert got.keys() == made.shared.keys()
    for name, tensor in made.shared.items():
        torch.testing.assert_close(got[name], tensor.float(), rtol=1e-4, atol=1e-6)
    seen = [e.evaluated for e in events if e.HasField("evaluated")]
    said = {e.step: e.evaluation.loss for e in seen}
    size = job.train.microbatch_size
    assert said == pytest.approx(expected_versions(lab.module, job, events, reader, size=size))
    assert said
    return [e.round_done for e in events if e.HasField("round_done")]


@pytest.fixture(autouse=True)
def divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small vectors are divided among all who may add up, too."""
    monkeypatch.setattr(segments, "UNDIVIDED", 10)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("aggregate", "peers"),
    [
        *(("median", 1), ("median", 2), ("trimmed-mean", 3), ("krum", 3)),
        ("flag", 2),
        pytest.param("median", 3, marks=SLOW),
        *(pytest.param("trimmed-mean", n, marks=SLOW) for n in (1, 2)),
        *(pytest.param("krum", n, marks=SLOW) for n in (1, 2)),
        *(pytest.param("multi-krum", n, marks=SLOW) for n in (1, 2, 3)),
        *(pytest.param("flag", n, marks=SLOW) for n in (1, 3)),
    ],
)
def test_the_version_is_that_of_a_plain_loop(
    laboratory: Callable[[Job], Any], tmp_path: Path, aggregate: str, peers: int
) -> None:
    job = robust(tmp_path, aggregate, "fedavgm" if peers == 2 else "fedavg")
    lab = laboratory(replace(job, plan=replace(job.plan, replicas=peers)))
    world = world_of(lab, peers)
    run = world.submit(lab.spec)
    world.finish(run)
    done = assert_expected(lab, world, run)
    assert [sum(m.weight for m in d.members) for d in done] == [5] * 4
    assert {len(d.members) for d in done} == {peers}


@pytest.mark.slow
@pytest.mark.parametrize(("aggregate", "lost"), [("trimmed-mean", "p1"), ("krum", "p0")])
def test_whoever_is_lost_at_any_moment_its_clients_are_left_out(
    laboratory: Callable[[Job], Any], tmp_path: Path, aggregate: str, lost: str
) -> None:
    """Of Krum the one who adds up all is lost."""
    lab = laboratory(robust(tmp_path, aggregate))

    def play(deadly: int) -> tuple[Any, str, int]:
        world = world_of(lab)
        run, count = losing(world, lab.spec, deadly, lost)
        return world, run, count

    _, _, records = play(0)
    smaller = 0
    for part in range(1, 9):
        world, run, _ = play(records * part // 9)
        done = assert_expected(lab, world, run)
        smaller += any(len(d.members) < 3 for d in done)
    assert smaller, "nobody was ever left out"


def test_clients_come_in_blocks_where_many_do_not_fit_into_one_frame(
    laboratory: Callable[[Job], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wiring, "PIECE", 60)
    monkeypatch.setattr(combiners, "_CHUNK", 7)
    lab = laboratory(robust(tmp_path, "median"))
    world = world_of(lab)
    run = world.submit(lab.spec)
    world.finish(run)
    assert_expected(lab, world, run)


def test_ghosts_come_to_what_a_loop_of_hashes_makes_of_committed_clients(
    laboratory: Callable[[Job], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wiring, "PIECE", 60)  # a frame for each client
    lab = laboratory(robust(tmp_path, "krum"))
    graph = lab.graph.bind(lab.job.train.microbatch_size)

    def play() -> tuple[list[int], list[int]]:
        world = world_of(lab, device=Ghosts())
        events = world.finish(world.submit(lab.spec))
        rounds = committed_rounds(
            events, microbatches=1, microbatch_size=1, clients=12, seed=lab.job.seed
        )
        loop = expected_rounds(graph, lab.job.seed, rounds, 1, clips=False)
        return [e.round_done.hash for e in events if e.HasField("round_done")], loop.versions

    found, wanted = play()
    assert found == wanted
    assert len(set(found)) == 4
    whole = HashAlgebra.combined

    def without_the_last(algebra: HashAlgebra, came: Any, plan: Any) -> Any:
        return whole(algebra, {part: blocks[:-1] for part, blocks in came.items()}, plan)

    monkeypatch.setattr(HashAlgebra, "combined", without_the_last)
    found, wanted = play()
    assert found != wanted
    assert HashAlgebra.combined is not RoundAlgebra.combined
