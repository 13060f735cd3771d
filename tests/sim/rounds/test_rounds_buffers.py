"""Buffers of replicas that train apart, in the simulated world: running statistics and counters are
those of a plain loop."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from safetensors.torch import load
from torch import Tensor, nn

from shoal.job import Job
from shoal.proto.broker_pb2 import DONE
from shoal.sim import round_oracle
from shoal.sim.monitor.monitor import Monitor
from shoal.sim.round_log import committed_rounds
from shoal.sim.virtual.world import PeerSpec
from shoal.tests.sim.played_rounds import METHODS, TIES, sync_of

JOB: dict[str, Any] = {
    "version": 1,
    "model": {"factory": "shoal.tests.sim.rounds.normed:net"},
    "data": {"kind": "text", "length": 8, "holdout": 0.0},
    "plan": {"replicas": 2},
    "train": {"steps": 7, "batch": 12, "microbatch": 2, "lr": 0.05, "optimizer": "sgd"},
}
SIZE = 2


def by_microbatch(
    modules: Sequence[nn.Module], batches: Sequence[Mapping[str, Tensor]]
) -> list[float]:
    """A batch norm has the statistics of one microbatch at a time."""
    losses = []
    for module, batch in zip(modules, batches, strict=True):
        parts = [{n: t.split(SIZE)[i] for n, t in batch.items()} for i in range(3)]
        found = [module(**part) / len(parts) for part in parts]
        for loss in found:
            loss.backward()
        losses.append(sum(float(loss.detach()) for loss in found))
    return losses


@pytest.mark.parametrize("method", ["diloco", "average", "sparse-loco"])
def test_they_are_those_of_a_plain_loop(laboratory: Any, method: str) -> None:
    """One replica is faster, so its counter is the larger one, and its statistics weigh more."""
    sync = {"kind": "local", "every": 3, **sync_of(method)}
    lab = laboratory(Job.from_table(JOB | {"name": f"buffers-{method}", "sync": sync}))
    peers = [PeerSpec(name=f"p{i}", place=f"s{i}", flops_per_s=f) for i, f in enumerate((4e7, 9e7))]
    world = lab.world(peers, log=False)
    monitor = Monitor(world)
    world.until(lambda: len(world.broker.machine.members.pool) == 2)
    run = world.submit(lab.spec)
    events = monitor.finish(run, 3600.0)
    assert world.broker.ended[run].phase == DONE
    [files] = [e.weights.files for e in events if e.HasField("weights")]
    got = {n: t for f in files for n, t in load(world.blobs[f.blob.hash]).items()}

    reader, train, count = lab.reader(), lab.job.train, 6

    def batches(samples: Sequence[int]) -> dict[str, Tensor]:
        each = [reader.batch(s // SIZE // count, s // SIZE % count, SIZE) for s in samples[::SIZE]]
        return {name: torch.cat([e[name] for e in each]) for name in each[0]}

    played = committed_rounds(events, microbatches=count, microbatch_size=SIZE)
    assert len({m.steps for r in played for m in r.members}) > 1
    plain = METHODS[method]()
    result = round_oracle.train(
        copy.deepcopy(lab.module),
        played,
        batches,
        train,
        plain,
        steps=train.steps,
        gradients=by_microbatch,
    )
    assert got["norm.num_batches_tracked"] == result.buffers["norm.num_batches_tracked"] > 3 * 7
    for name in ("norm.running_mean", "norm.running_var"):
        torch.testing.assert_close(got[name], result.buffers[name], rtol=1e-3, atol=2e-5)
    for name, tensor in plain.shared.items():
        apart = ~torch.isclose(got[name], tensor, rtol=1e-3, atol=2e-5)
        assert int(apart.sum()) <= TIES.get(method, 0.0) * tensor.numel(), name
