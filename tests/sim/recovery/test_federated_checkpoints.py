"""Checkpoints of federated training: a run that goes on from one makes the rounds that were left,
as if it had never ended, whoever trains the clients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.job import Job
from shoal.proto.broker_pb2 import DONE
from shoal.sim.plain.client_loops import train_cohorts
from shoal.sim.plain.plain_cohorts import committed_cohorts
from shoal.tests.sim.clients.test_federated_world import METHODS, exported, job_of, world_of
from shoal.tests.sim.clients.test_hosts_world import Hosts


def hashes(events: list[Any]) -> list[int]:
    return [e.round_done.hash for e in events if e.HasField("round_done")]


@pytest.mark.parametrize(
    ("method", "peers"), [("fedavg", 3), ("fedavg", 2), ("fedadam", 3), ("fednova", 1)]
)
def test_the_rounds_that_are_left_are_those_of_a_run_that_never_ended(
    laboratory: Callable[[Job], Any], tmp_path: Path, method: str, peers: int
) -> None:
    job = job_of(tmp_path, method, 5)
    job = replace(job, output=replace(job.output, every=2))
    lab = laboratory(job)
    world = world_of(lab)
    run = world.submit(lab.spec)
    whole = world.finish(run)
    saved = [e.checkpoint for e in whole if e.HasField("checkpoint")]
    assert [c.step for c in saved] == [2, 4, 5]

    plan = replace(job.plan, replicas=peers)
    other = laboratory(replace(job, name=f"{job.name} on {peers}", plan=plan))
    again = world_of(other, peers)
    again.saved |= world.saved
    other.spec.resumed.CopyFrom(saved[0])
    went_on = again.submit(other.spec)
    rest = again.finish(went_on)
    assert rest[-1].state.phase == DONE, rest[-1].state.reason.text
    assert len(hashes(rest)) == 3
    if peers == 3:
        assert hashes(rest) == hashes(whole)[2:], "to the bit"
    reader = lab.reader()
    made = train_cohorts(
        lab.module,
        committed_cohorts(whole, job, reader),
        lambda at: reader.samples(np.array(at)),
        METHODS[method][1],
        lr=job.train.lr,
        momentum=job.train.momentum,
    )
    got = exported(again, went_on)
    for name, tensor in made.shared.items():
        torch.testing.assert_close(got[name], tensor.float(), rtol=1e-4, atol=1e-6)


def test_hosts_go_on_with_their_own_data(laboratory: Callable[[Job], Any], tmp_path: Path) -> None:
    hosts = Hosts.of(laboratory(job_of(tmp_path, "fedavgm")), tmp_path)
    output = replace(hosts.job.output, every=2)
    hosts.spec.job = replace(hosts.job, output=output).to_json()
    world = hosts.world()
    whole = world.finish(world.submit(hosts.spec))
    first = next(e.checkpoint for e in whole if e.HasField("checkpoint"))
    assert first.step == 2
    again = hosts.world()
    again.saved |= world.saved
    hosts.spec.resumed.CopyFrom(first)
    rest = again.finish(again.submit(hosts.spec))
    assert rest[-1].state.phase == DONE, rest[-1].state.reason.text
    assert hashes(rest) == hashes(whole)[2:], "to the bit"
