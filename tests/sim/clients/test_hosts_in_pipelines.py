"""Clients whose data stays with hosts that have too little memory for the model, in the simulated
world: a host and peers without data are a pipeline, whose stages at both ends are the host's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.job import Job
from shoal.peer.data.manifest import Manifest
from shoal.proto.broker_pb2 import RunEvent
from shoal.sim.monitor.monitor import Monitor
from shoal.sim.virtual.world import PeerSpec

from .test_federated_world import job_of
from .test_hosts_world import Hosts

MODEL = """
from torch import nn

class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(),
            nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
        )

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.layers(x), y)

def wide():
    return Classifier()
"""
SMALL = 8000
"""Bytes of a peer that has no room for the model."""


def hosts_of(laboratory: Any, folder: Path, method: str = "fedavgm", **sync: Any) -> Hosts:
    """Three hosts, of which the last two are small, and two small peers without data."""
    job = job_of(folder, method, 3)
    (folder / "wide.py").write_text(MODEL)
    model = replace(job.model, factory=str(folder / "wide.py") + ":wide")
    train = replace(job.train, microbatch=1, clip=0.3)
    job = replace(job, name="hosts in pipelines", model=model, train=train)
    hosts = Hosts.of(laboratory(job), folder)
    hosts.job = replace(hosts.job, sync=replace(hosts.job.sync, per_round=3, **sync))
    hosts.spec.job = hosts.job.to_json()
    small = [replace(p, memory_bytes=SMALL) for p in hosts.peers[2:]]
    lent = [PeerSpec(name=f"lent{i}", place="c", memory_bytes=SMALL) for i in range(4)]
    hosts.peers = [hosts.peers[1], *small, *lent]
    return hosts


def plans(events: list[RunEvent]) -> list[Any]:
    return [e.plan for e in events if e.HasField("plan")]


def test_hosts_with_helpers_beside_one_that_needs_none_are_a_plain_loop(
    laboratory: Callable[[Job], Any], tmp_path: Path
) -> None:
    hosts = hosts_of(laboratory, tmp_path)
    world = hosts.world()
    run = world.submit(hosts.spec)
    try: world.finish(run, 300.0)
    finally:
        for e in world.events(run):
            if e.HasField("state"): print(e.state.reason.text)
            elif e.HasField("note"): print(e.note)
    done = hosts.assert_expected(world, run)
    for p in plans(world.events(run)):
        print([list(s.holders) for s in p.stages])
    assert [len(d.members) for d in done] == [3] * 3
