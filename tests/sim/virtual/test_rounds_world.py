"""Replicas that train apart and meet in rounds, in the simulated world: through broker and peers,
against plain loops in torch."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.job import Job
from shoal.proto.broker_pb2 import DONE
from shoal.sim.monitor.monitor import Monitor
from shoal.sim.virtual.world import PeerSpec

JOB: dict[str, Any] = {
    "version": 1,
    "name": "rounds",
    "model": {
        "factory": "shoal.examples.gpt:gpt",
        "args": {"layers": 2, "width": 8, "heads": 1, "length": 8, "dropout": 0.1},
    },
    "data": {"kind": "text", "length": 8},
    "plan": {"replicas": 2},
    "sync": {"kind": "local", "every": 3},
    "train": {
        "steps": 8,
        "batch": 8,
        "microbatch": 2,
        "lr": 1e-2,
        "eval_every": 3,
        "eval_batches": 1,
    },
}


def test_two_replicas(laboratory: Any) -> None:
    lab = laboratory(Job.from_table(JOB))
    world = lab.world([PeerSpec(name=f"p{i}", place=f"site-{i}") for i in range(2)], log=True)
    monitor = Monitor(world)
    world.until(lambda: len(world.broker.machine.members.pool) == 2)
    run = world.submit(lab.spec)
    try:
        monitor.finish(run, 3600.0)
    finally:
        for e in world.events(run):
            kind = e.WhichOneof("kind")
            if kind == "step":
                print(
                    f"{e.at_s:8.3f} r{e.replica} step {e.step.step} loss {e.step.outcome.loss:.4f} lr {e.step.outcome.lr:.5f}"
                )
            elif kind in ("plan",):
                print(f"{e.at_s:8.3f} r{e.replica} plan {len(e.plan.stages)} stages")
            else:
                print(
                    f"{e.at_s:8.3f} r{e.replica}",
                    kind,
                    str(getattr(e, kind))[:300].replace("\n", " "),
                )
    assert world.broker.ended[run].phase == DONE
