"""Buffers of replicas that train apart, in the simulated world: running statistics and counters are
those of a plain loop."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load

from shoal.job import Job
from shoal.proto.broker_pb2 import DONE, RoundWork
from shoal.sim.monitor.monitor import Monitor
from shoal.sim.plain.plain_rounds import train_rounds
from shoal.sim.plain.round_buffers import WithBuffers
from shoal.sim.plain.round_oracle import PlainReplica, Round
from shoal.sim.virtual.world import PeerSpec
from shoal.tests.sim.played_rounds import TIES, sync_of

JOB: dict[str, Any] = {
    "version": 1,
    "model": {"factory": "shoal.tests.sim.rounds.normed:net"},
    "data": {"kind": "text", "length": 8, "holdout": 0.0},
    "plan": {"replicas": 3},
    "train": {"steps": 13, "batch": 12, "microbatch": 2, "lr": 0.05, "optimizer": "sgd"},
}
SIZE = 2


class Buffers:
    """What a run came to, its plain loop, and how far the two are apart."""

    def __init__(self, laboratory: Any, method: str, options: Mapping[str, Any]) -> None:
        sync = sync_of(method)
        sync |= {"every": 4, "options": sync["options"] | options}
        name = f"buffers-{method}-{sorted(options.items())}"
        self.lab = laboratory(Job.from_table(JOB | {"name": name, "sync": sync}))
        # One replica is faster, so that its counters are larger, and its statistics weigh more.
        flops = (4e7, 9e7, 4e7)
        peers = [PeerSpec(name=f"p{i}", place=f"s{i}", flops_per_s=f) for i, f in enumerate(flops)]
        world = self.lab.world(peers, log=False)
        monitor = Monitor(world)
        world.until(lambda: len(world.broker.machine.members.pool) == len(peers))
        run = world.submit(self.lab.spec)
        self.events = monitor.finish(run, 3600.0)
        assert world.broker.ended[run].phase == DONE
        [files] = [e.weights.files for e in self.events if e.HasField("weights")]
        self.got = {n: t for f in files for n, t in load(world.blobs[f.blob.hash]).items()}

    @property
    def work(self) -> list[RoundWork]:
        return [w for e in self.events for w in e.round_begun.work]

    def apart(self) -> list[str]:
        """Which tensors are not those of the plain loop."""
        job = self.lab.job
        wanted = train_rounds(
            copy.deepcopy(self.lab.module),
            job,
            self.events,
            self.lab.reader(),
            microbatches=job.train.microbatches,
            microbatch_size=SIZE,
            steps=job.train.steps,
        ).shared
        assert wanted.keys() == self.got.keys()
        ties = TIES.get(job.sync.chosen, 0.0)
        found = []
        for name, tensor in wanted.items():
            same = torch.isclose(self.got[name], tensor, rtol=1e-3, atol=2e-5)
            if int((~same).sum()) > ties * tensor.numel():
                found.append(name)
        return found


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("diloco", {}),
        ("average", {}),
        ("sparse-loco", {}),
        ("diloco", {"overlap": 2}),
        ("streaming-diloco", {"overlap": 1}),
        ("saps", {}),
        ("noloco", {}),
    ],
)
def test_they_are_those_of_a_plain_loop(
    laboratory: Any, method: str, options: dict[str, Any]
) -> None:
    found = Buffers(laboratory, method, options)
    assert len({w.steps for w in found.work}) > 1
    assert bool(options.get("overlap")) == any(w.late for w in found.work)
    assert found.apart() == []


def test_the_comparison_is_of_buffers_that_met_and_that_came_late(
    laboratory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain loop in which they do not, while weights do, comes to other ones."""
    late, pairs = Buffers(laboratory, "diloco", {"overlap": 2}), Buffers(laboratory, "noloco", {})

    def never(self: WithBuffers, j: int, number: int, replica: PlainReplica) -> None:
        self.method.stepped(j, number, replica)

    monkeypatch.setattr(WithBuffers, "stepped", never)
    commit = WithBuffers.commit

    def alone(self: WithBuffers, count: int, r: Round, replicas: Any) -> None:
        weights_meet = self.method.commit
        with monkeypatch.context() as patched:
            patched.setattr(self.method, "commit", lambda n, _, all_: weights_meet(n, r, all_))
            commit(self, count, replace(r, pairs=()), replicas)

    monkeypatch.setattr(WithBuffers, "commit", alone)
    for found in late, pairs:
        wrong = found.apart()
        assert any("running_mean" in name for name in wrong)
        assert all("running" in name or "batches" in name for name in wrong)
