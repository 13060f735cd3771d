"""SkipPipe's twelve places in the virtual world: the machines of broker and peers carry out routes
of our search, and a step takes as long as planned.

A byte GPT of twelve blocks in six equal stages, the ends with the first nodes, stands for the
published model: peers are as slow, and links as slow for its smaller tensors, that a forward of a
stage and a hop take their published seconds. Only its positions are trained, so that holders of a
stage have no gradients to add up, which is no part of the published step either.
"""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from shoal.benchmarks.schedules.skip_places import EDGE_S, Instance
from shoal.client.models import models
from shoal.client.submission import prepare
from shoal.dag.cost.network import Network
from shoal.dag.plan.cut import cut
from shoal.dag.plan.plan import PeerId, Visit
from shoal.dag.plan.routes import segments
from shoal.dag.schedule.convert_plan import plan_to_proto
from shoal.job import Job
from shoal.planner.base.interface import PeerOffer, PlannerOptions, PlanRequest
from shoal.planner.cost.cost_model import CostModel
from shoal.planner.routes.route_search import Routes
from shoal.planner.skipping.layouts import StageLayout, row_of_blocks
from shoal.planner.skipping.route_plans import RoutedPlan, best_over
from shoal.proto.broker_pb2 import RunSpec
from shoal.sim.ghost.device import Ghosts
from shoal.sim.ghost.hashes import expected
from shoal.sim.virtual.wan import Wan
from shoal.sim.virtual.world import PeerSpec
from shoal.tests.sim.conftest import Laboratory

__all__ = ["Executed", "executed"]

STEPS = 3
BROKER = "broker"


@dataclass(frozen=True)
class Executed:
    """Seconds of a step: planned, and of the world; whether its losses were those of the loop."""

    planned_s: float
    world_s: float
    exact: bool
    plan: RoutedPlan


def _job(microbatches: int) -> Job:
    return Job.from_table(
        {
            "version": 1,
            "name": "twelve-places",
            "model": {
                "factory": "shoal.examples.gpt:gpt",
                "args": {"layers": 12, "width": 64, "heads": 1, "length": 128, "dropout": 0.0},
                "freeze": ["blocks.*", "bytes.*", "norm.*", "head.*"],
            },
            "data": {"kind": "text", "length": 128},
            "train": {"steps": STEPS, "batch": microbatches, "microbatch": 1, "eval_every": 0},
        }
    )


def executed(instance: Instance, routes: Routes) -> Executed:
    """Plans and carries out the routes of a search over an instance."""
    count = sum(map(len, routes.waves))
    with ExitStack() as stack:
        job = _job(count)
        module, prepared = models.build(job), stack.enter_context(prepare(job))
        return _executed(instance, routes, Laboratory(job, prepared, module))


def _executed(instance: Instance, routes: Routes, lab: Laboratory) -> Executed:
    graph, n = lab.graph.bind(1), len(instance.nodes)
    row = row_of_blocks(graph)
    stages = instance.rules.stages
    each = len(row) // stages
    cuts = (0, *(row[i].start for i in range(each, len(row), each)), row[-1].stop)
    cuts = (*cuts, len(graph.operators))
    names = [f"n{i}" for i in range(n)]
    # As fast that a forward of an inner stage takes the published seconds.
    probe = PlanRequest(graph, (PeerOffer(PeerId("x"), flops_per_s=1e9),), 1, 1)
    forward = CostModel(probe).forward_s[0]
    speed = 1e9 * float(forward[cuts[2]] - forward[cuts[1]]) / instance.forward_s
    specs = [PeerSpec(name=name, flops_per_s=speed) for name in names]
    offers = tuple(
        PeerOffer(PeerId(s.name), s.name, device_memory_bytes=s.memory_bytes, speeds=s.speeds)
        for s in specs
    )
    size = CostModel(probe).crossing_bytes(cuts[1])
    wan = _network(instance, size, names)
    place = [wan.peers.index(PeerId(name)) for name in names]
    options = PlannerOptions(skip=0.5, reorder=True, in_flight=None)
    request = PlanRequest(
        graph, offers, sum(map(len, routes.waves)), 1, 0, options, wan.part(place)
    )
    judge = CostModel(request)
    holders = [[p for p, stage in enumerate(routes.stage_of) if stage == k] for k in range(stages)]
    out = stages - instance.rules.length
    layout = StageLayout(cuts, (), out, out / stages).held([*holders, holders[0]])
    ways = [
        (*(Visit(k, PeerId(names[p])) for k, p in path), Visit(stages, PeerId(names[path[0][1]])))
        for wave in routes.waves
        for path in wave
    ]
    found = best_over(judge, layout, ways, reorder=True, recompute=False)
    assert found is not None, "the graph can be cut at its blocks"
    spec = RunSpec()
    spec.CopyFrom(lab.spec)
    spec.plan.CopyFrom(plan_to_proto(found.plan))
    world = lab.world(specs, wan=Wan(wan), device=Ghosts())
    events = world.finish(world.submit(spec))
    steps = [e.step for e in events if e.HasField("step")]
    parts = cut(graph, [(s.start, s.stop) for s in found.plan.stages])
    orders = [segments(parts, route) for route in found.plan.routes]
    loop = expected(graph, lab.job.seed, STEPS, len(ways), orders=orders).losses
    exact = [s.outcome.loss for s in steps] == loop
    seconds = statistics.median(s.seconds for s in steps[1:])
    return Executed(found.seconds, seconds, exact, found)


def _network(instance: Instance, size: int, names: list[str]) -> Network:
    """The instance's hops for tensors of `size` bytes: half of a delay is the link's, the rest and
    the published overhead are latency; and a broker that is near everybody."""
    n = len(names)
    delay = instance.delay_s
    hold = np.maximum(delay - EDGE_S, 1e-3) / 2
    latency = np.full((n + 1, n + 1), 0.01)
    bandwidth = np.full((n + 1, n + 1), 1e7)
    latency[:n, :n] = np.maximum(delay - hold, 0.0)
    bandwidth[:n, :n] = size / hold
    free = np.full(n + 1, np.inf)
    return Network((*map(PeerId, names), PeerId(BROKER)), latency, bandwidth, free, free)
