"""Clients that move by what is no finite number: they alone are left out of their round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.broker.events import Persist
from shoal.broker.round_rows import RoundRows
from shoal.job import Job
from shoal.proto.broker_pb2 import DONE
from shoal.sim.plain.client_loops import train_cohorts
from shoal.sim.plain.plain_cohorts import aggregate_of, committed_cohorts
from shoal.tests.sim.clients.test_federated_world import (
    METHODS,
    assert_expected,
    exported,
    job_of,
    world_of,
)

ODD = 17
"""A sample whose client comes to no number."""


def odd_job(folder: Path, method: str, **sync: Any) -> Job:
    job = job_of(folder, method, 5)
    with np.load(folder / "data.npz") as found:
        x = found["x"].copy()
        x[ODD] = np.inf
        np.savez(folder / "data.npz", x=x, y=found["y"])
    name = f"odd {method} {sync}"
    return replace(job, name=name, sync=replace(job.sync, per_round=9, **sync))


def without_odd(lab: Any, world: Any, run: str) -> tuple[int, int]:
    """Assert that the client with the odd sample is in no round, and named. Return how many rounds
    it was asked in, and how many clients were in rounds."""
    events, job, reader = world.events(run), lab.job, lab.reader()
    assert events[-1].state.phase == DONE, events[-1].state.reason.text
    cohorts = [*committed_cohorts(events, job, reader)]
    assert not any(ODD in batch for c in cohorts for work in c for batch in work.batches)
    notes = [e.note for e in events if "no finite number: left out" in e.note]
    rows = RoundRows()
    for event in events:
        rows.see(event)
    lost = sum(row.asked - row.came for row in rows.rows)
    assert lost == len(notes)
    return len(notes), sum(map(len, cohorts))


@pytest.mark.parametrize("method", ["fedavg", "fednova"])
def test_others_of_its_peer_count(
    laboratory: Callable[[Job], Any], tmp_path: Path, method: str
) -> None:
    lab = laboratory(odd_job(tmp_path, method))
    world = world_of(lab)
    run = world.submit(lab.spec)
    world.finish(run)
    asked, came = without_odd(lab, world, run)
    assert asked
    assert asked + came == 5 * 9
    done = assert_expected(lab, world, run)
    assert [len(d.members) for d in done] == [3] * 5, "peers stay in their rounds"


@pytest.mark.parametrize(
    "sync", [{"aggregate": "median", "weight": "equal"}, {"secure": True}, {"compression": "topk"}]
)
def test_whatever_is_made_of_contributions(
    laboratory: Callable[[Job], Any], tmp_path: Path, sync: dict[str, Any]
) -> None:
    lab = laboratory(odd_job(tmp_path, "fedavg", **sync))
    world = world_of(lab)
    run = world.submit(lab.spec)
    world.finish(run)
    asked, _ = without_odd(lab, world, run)
    assert asked
    made = train_cohorts(
        lab.module,
        committed_cohorts(world.events(run), lab.job, lab.reader()),
        lambda at: lab.reader().samples(np.array(at)),
        METHODS["fedavg"][1],
        lr=lab.job.train.lr,
        momentum=lab.job.train.momentum,
        aggregate=aggregate_of(lab.job),
    )
    got = exported(world, run)
    for name, tensor in made.shared.items():
        np.testing.assert_allclose(got[name], tensor.float(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("deadly", [0, 1, 2, 4, 9])
def test_whoever_dies_behind_it(
    laboratory: Callable[[Job], Any], tmp_path: Path, deadly: int
) -> None:
    """The broker dies behind one record after the other from the first one of a client on."""
    lab = laboratory(odd_job(tmp_path, "fedavg"))
    world, count = world_of(lab), -1
    run, checks = world.submit(lab.spec), world.observe

    def observe(seen: Any) -> None:
        nonlocal count
        checks(seen)
        if isinstance(seen.record, Persist):
            odd = count >= 0 or any("no finite number" in e.note for e in world.events(run))
            count += odd
            if odd and count == deadly:
                world.restart_broker(1.0)

    world.observe = observe
    world.finish(run)
    without_odd(lab, world, run)
    assert_expected(lab, world, run)
