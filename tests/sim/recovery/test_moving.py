"""A run moves to a better plan between two steps, and trains as if it had not.

The oracle is the same job on the peer that it began with: with one stage the losses are the same,
bit for bit, wherever they are computed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from shoal.dag.cost.speed import Speeds
from shoal.job import Job
from shoal.peer.core import events as p
from shoal.proto.broker_pb2 import DONE, RunEvent, RunSpec
from shoal.sim.monitor.monitor import Monitor
from shoal.sim.virtual.clock import Observed
from shoal.sim.virtual.world import PeerSpec, World

STEPS = 130
JOB: dict[str, Any] = {
    "version": 1,
    "name": "moving",
    "model": {
        "factory": "shoal.examples.gpt:gpt",
        "args": {"layers": 1, "width": 8, "heads": 1, "length": 8, "dropout": 0.1},
    },
    "data": {"kind": "text", "length": 8},
    "train": {"steps": STEPS, "batch": 4, "microbatch": 2, "lr": 1e-2, "eval_every": 0},
}


def peer(name: str, flops: float, **more: Any) -> PeerSpec:
    return PeerSpec(name=name, hardware=Speeds.of_flops(flops, 1e-4), **more)


def losses(events: list[RunEvent]) -> list[float]:
    return [e.step.outcome.loss for e in events if e.HasField("step")]


def test_a_faster_peer_that_joins_gets_the_work(laboratory: Callable[..., Any]) -> None:
    lab = laboratory(Job.from_table(JOB))
    spec = RunSpec()
    spec.CopyFrom(lab.spec)
    spec.job = Job.from_table(json.loads(spec.job) | {"plan": {"scheduler": "auto"}}).to_json()

    def play(*peers: PeerSpec) -> tuple[World, list[RunEvent], list[tuple[str, int]]]:
        world = lab.world(list(peers), log=False)
        monitor, begun = Monitor(world), []
        also = world.observe

        def observe(seen: Observed) -> None:
            also(seen)
            if isinstance(seen.record, p.Compute):
                begun.append((seen.who, seen.record.step))

        world.observe = observe
        return world, monitor.finish(world.submit(spec), 3600.0), begun

    _, calm, _ = play(peer("slow", 3e6))
    world, events, begun = play(peer("slow", 3e6), peer("fast", 3e7, joins_s=5.0))
    assert events[-1].state.phase == DONE
    assert losses(events) == losses(calm)
    assert world.broker.machine.replica(next(iter(world.broker.ended))).record.peers == ("fast",)
    reasons = [e.state.reason.text for e in events if e.HasField("state")]
    assert any("faster for" in text and "going on at step" in text for text in reasons)
    last = max(step for who, step in begun if who == "slow")
    assert min(step for who, step in begun if who == "fast") == last + 1, "no step is done again"
