"""A holder dies, and the training is what it would have been (I1, I2).

The oracle is the same world without a death: losses, norms and exported weights must be the same,
bit for bit, each step committed once.
"""

from __future__ import annotations

from typing import Any

from shoal.dag.convert_plan import plan_to_proto
from shoal.dag.plan import PeerId, Plan, StageSlot, Visit
from shoal.job import Job
from shoal.proto import broker_pb2
from shoal.proto.broker_pb2 import DONE
from shoal.sim.virtual.clock import Observed

JOB = {
    "version": 1,
    "name": "recovery",
    "model": {
        "factory": "shoal.examples.gpt:gpt",
        "args": {"layers": 1, "width": 8, "heads": 1, "length": 8, "dropout": 0.1},
    },
    "data": {"kind": "text", "length": 8},
    "train": {"steps": 6, "batch": 4, "microbatch": 2, "lr": 1e-2, "eval_every": 3},
}


class Lab:
    def __init__(self, laboratory: Any, job: dict[str, Any] | None = None) -> None:
        self.laboratory = laboratory(Job.from_table(job or JOB))
        n = len(self.laboratory.graph.operators)
        p0, p1 = PeerId("p0"), PeerId("p1")
        slots = (StageSlot(0, n // 2, (p0,)), StageSlot(n // 2, n, (p1,)))
        plan = Plan(slots, ((Visit(0, p0), Visit(1, p1)),) * 2, 2)
        self.spec = broker_pb2.RunSpec()
        self.spec.CopyFrom(self.laboratory.spec)
        self.spec.plan.CopyFrom(plan_to_proto(plan))

    def play(self, peers: int = 3, **kills: Any) -> Any:
        """kill: name -> the number of the record at which it dies."""
        world = self.laboratory.world(peers)
        world.until(lambda: len(world.broker.machine.members.pool) == peers)
        run = world.submit(self.spec)
        count = 0

        def observe(seen: Observed) -> None:
            nonlocal count
            count += 1
            for name, at in kills.items():
                if at == count:
                    world.kill(name)

        world.observe = observe
        world.finish(run)
        world.run, world.count = run, count
        return world


def steps(world: Any) -> list[Any]:
    done = [e.step for e in world.events(world.run) if e.HasField("step")]
    return [(s.step, s.outcome.SerializeToString(), s.evaluation.loss) for s in done]


def weights(world: Any) -> list[Any]:
    return [list(e.weights.files) for e in world.events(world.run) if e.HasField("weights")]


def test_exp(laboratory: Any) -> None:
    import random
    import time

    lab = Lab(laboratory)
    calm = lab.play()
    print(calm.broker.ended[calm.run].phase, calm.count, len(steps(calm)))
    for e in calm.events(calm.run):
        if e.HasField("state") or e.note:
            print(e.at_s, e.state.phase, e.state.reason.text, e.note)
    rng = random.Random(0)
    for name in ("p1", "p0", "p2"):
        for i in range(20):
            at = rng.randrange(calm.count)
            t = time.time()
            world = lab.play(**{name: at})
            end = world.broker.ended[world.run]
            ok = (
                end.phase == DONE
                and steps(world) == steps(calm)
                and weights(world) == weights(calm)
            )
            print(name, at, end.phase, ok, round(time.time() - t, 2), round(world.now, 2))
            if not ok:
                for e in world.events(world.run):
                    if e.HasField("state") or e.note:
                        print("   ", e.at_s, e.term, e.state.phase, e.state.reason.text, e.note)


def test_dbg(laboratory: Any) -> None:
    import random

    lab = Lab(laboratory)
    calm = lab.play()
    rng = random.Random(0)
    ats = [rng.randrange(calm.count) for _ in range(9)]
    lab.laboratory
    import shoal.sim.virtual.world as w

    orig = w.World.finish

    def fin(self, run, limit_s=100.0):
        try:
            return orig(self, run, limit_s)
        finally:
            for e in self.events(run):
                if e.HasField("state") or e.note:
                    print("   ", e.at_s, e.term, e.state.phase, e.state.reason.text, e.note)

    w.World.finish = fin
    lab.play(p1=ats[8])
