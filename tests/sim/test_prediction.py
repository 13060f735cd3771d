"""The plan's prediction against what the simulated world measures: both price work and links alike,
so their difference is what the event calculation leaves out of the protocol.

Frames are 64 KiB here: smaller ones that wait together travel in one message of up to that size and
arrive together, which the event calculation does not know (frames of 16 KiB on a link that is the
bottleneck cost GPipe a fifth of its step).
"""

from __future__ import annotations

import statistics
from itertools import pairwise

import numpy as np
import pytest

from shoal.broker.scheduler.candidate import Candidate, Share, chain, to_plan
from shoal.broker.scheduler.interface import PeerOffer, PlanOptions, PlanRequest
from shoal.broker.scheduler.judge import Judge
from shoal.dag.convert_plan import plan_to_proto
from shoal.dag.network import uniform
from shoal.dag.plan import PeerId
from shoal.job import Job
from shoal.net.memory import steady
from shoal.proto.broker_pb2 import RunSpec
from shoal.sim.virtual.world import PeerSpec

JOB = Job.from_table(
    {
        "version": 1,
        "name": "predicted",
        "model": {
            "factory": "shoal.examples.gpt:gpt",
            "args": {"layers": 2, "width": 128, "heads": 2, "length": 64, "dropout": 0.0},
        },
        "data": {"kind": "text", "length": 64},
        "train": {"steps": 3, "batch": 16, "microbatch": 2, "eval_every": 0},
    }
)


@pytest.fixture(scope="module")
def gpt(laboratory):
    return laboratory(JOB)


@pytest.mark.parametrize("latency_s", [0.001, 0.05])
@pytest.mark.parametrize("bandwidth", [1e6, 1e7])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_a_step_of_the_world_takes_what_the_plan_predicts(
    gpt, latency_s: float, bandwidth: float, schedule: str
) -> None:
    speeds = [2e9, 5e8, 1e9]
    peers = [PeerSpec(name=f"p{i}", flops_per_s=s) for i, s in enumerate(speeds)]
    world = gpt.world(peers, carry=steady(latency_s, bandwidth))
    offers = tuple(
        PeerOffer(PeerId(p.name), p.name, device_memory_bytes=p.memory_bytes, speeds=p.speeds)
        for p in peers
    )
    request = PlanRequest(
        gpt.prepared.graph.bind(2),
        offers,
        8,
        2,
        options=PlanOptions(),
        links=uniform([PeerId(p.name) for p in peers], latency_s, bandwidth),
    )
    judge = Judge(request)
    n = judge.operators
    thirds = [0, n // 3, 2 * n // 3, n]
    candidate = chain([0, 1, 2], thirds, 8, schedule)
    if schedule == "interleaved":
        cuts = [int(x) for x in np.linspace(0, n, 7)]
        shares = tuple(Share(i % 3, a, b) for i, (a, b) in enumerate(pairwise(cuts)))
        candidate = Candidate((shares,), (8,), schedule)
    plan = to_plan(candidate, [o.peer for o in offers], 2)
    predicted = judge.seconds(candidate)
    spec = RunSpec()
    spec.CopyFrom(gpt.spec)
    spec.plan.CopyFrom(plan_to_proto(plan))
    events = world.finish(world.submit(spec))
    seconds = [e.step.seconds for e in events if e.HasField("step")]
    measured = statistics.median(seconds[1:])
    assert predicted == pytest.approx(measured, rel=0.05)
