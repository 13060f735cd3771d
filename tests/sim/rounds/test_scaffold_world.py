"""SCAFFOLD in the simulated world: through broker and peers, against a plain loop over the same
cohorts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.job import Job
from shoal.job.clients.local_work import LocalWork
from shoal.peer.federated.client_states import ClientStates
from shoal.proto.broker_pb2 import DONE
from shoal.sim.plain.client_loops import FederatedResult, train_cohorts
from shoal.sim.plain.client_methods import Scaffold
from shoal.sim.plain.plain_cohorts import committed_cohorts, method_of

from .test_federated_world import exported, job_of, world_of


def scaffold(folder: Path, rounds: int = 5, **sync: Any) -> Job:
    job = job_of(folder, "fedavg", rounds)
    found = {"method": "scaffold", "local": LocalWork(steps=3), "weight": "equal", **sync}
    return replace(
        job,
        name=f"scaffold {sync} {rounds}",
        sync=replace(job.sync, **{"options": {"lr": 0.8}, **found}),
        train=replace(job.train, momentum=0.0),
    )


def plain(lab: Any, events: Any) -> tuple[Scaffold, dict[str, Any]]:
    """The plain loop over what a run committed, and the version that it came to. Its mean control
    variate is that of all clients behind each round in which nobody lost its own."""
    method, reader = method_of(lab.job, events), lab.reader()
    assert isinstance(method, Scaffold)

    def conserved(count: int, result: FederatedResult) -> None:
        if any(method.lost.get(count, ())):
            return
        for name, c in method.c.items():
            own = torch.stack([each[name] for each in method.own]).mean(0)
            torch.testing.assert_close(c, own, rtol=1e-9, atol=1e-12)

    made = train_cohorts(
        lab.module,
        committed_cohorts(events, lab.job, reader),
        lambda at: reader.samples(np.array(at)),
        method,
        lr=lab.job.train.lr,
        clip=lab.job.train.clip,
        committed=conserved,
    )
    return method, made.shared


def assert_expected(lab: Any, world: Any, run: str) -> Scaffold:
    events = world.events(run)
    assert events[-1].state.phase == DONE, events[-1].state.reason.text
    method, wanted = plain(lab, events)
    got = exported(world, run)
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(got[name], tensor.float(), rtol=1e-4, atol=1e-6)
    return method


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_the_version_is_that_of_a_plain_loop(
    laboratory: Callable[[Job], Any], tmp_path: Path, clip: float
) -> None:
    job = scaffold(tmp_path)
    lab = laboratory(replace(job, name=f"clip {clip}", train=replace(job.train, clip=clip)))
    world = world_of(lab)
    run = world.submit(lab.spec)
    world.finish(run)
    method = assert_expected(lab, world, run)
    assert any(float(c.abs().max()) > 1e-3 for c in method.c.values())
    assert method.afresh == {0}
    assert not any(method.lost.values())
