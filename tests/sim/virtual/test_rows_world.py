"""Many holders that exchange gradients in rows, in the simulated world: real tensors against the
plain loop, ghosts against theirs, and the plan's seconds against the world's."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from shoal.dag.cost.network import uniform
from shoal.dag.exchange.rows import even_rows
from shoal.dag.plan.cut import cut, tied_groups
from shoal.dag.plan.plan import PeerId, Plan, StageExchange, StageSlot, Visit
from shoal.dag.schedule.convert_plan import plan_to_proto
from shoal.dag.schedule.flow import Flow
from shoal.dag.schedule.schedule import listed
from shoal.job import Job
from shoal.net.transports.memory import steady
from shoal.peer.compute.exchange import TransferSpecs
from shoal.planner.base.interface import PeerOffer, PlanRequest
from shoal.planner.cost.candidate import Candidate, StageShare
from shoal.planner.cost.cost_model import CostModel
from shoal.proto.broker_pb2 import RunSpec
from shoal.sim.ghost.device import Ghosts
from shoal.sim.ghost.hashes import expected
from shoal.sim.monitor.monitor import Monitor
from shoal.sim.virtual.world import PeerSpec
from shoal.tests.sim.played import read_export

HOLDERS = 10


def job_of(name: str, width: int) -> Job:
    args = {"layers": 2, "width": width, "heads": 2, "length": 16, "dropout": 0.0}
    return Job.from_table(
        {
            "version": 1,
            "name": name,
            "model": {"factory": "shoal.examples.gpt:gpt", "args": args},
            "data": {"kind": "text", "length": 16, "holdout": 0.2},
            "train": {
                **{"steps": 4, "batch": 24, "microbatch": 2, "lr": 1e-3},
                **{"eval_every": 2, "eval_batches": 2},
            },
            "recovery": {"ladder": []},  # snapshots on the links are not what is looked at
        }
    )


def peers(count: int) -> list[PeerSpec]:
    return [PeerSpec(name=f"p{i}", flops_per_s=1e9) for i in range(count)]


def plan_of(operators: int, cut: int) -> Plan:
    """Ten holders of the first stage, nine of them of the second one as well, which has two more;
    twelve microbatches, so that some holders have two and some none."""
    names = [PeerId(f"p{i}") for i in range(HOLDERS + 2)]
    first, second = tuple(names[:HOLDERS]), tuple(names[:0:-1])
    slots = (
        StageSlot(0, cut, first),
        StageSlot(cut, operators, second),
    )
    exchanges = (
        StageExchange(0, "two-level"),
        StageExchange(1, "two-level", even_rows(second, 4)),
    )
    routes = tuple((Visit(0, first[m * 3 % 8]), Visit(1, second[m * 5 % 11])) for m in range(12))
    plan = Plan(slots, routes, 2, evaluation_routes=routes[:2], exchanges=exchanges)
    return plan.validate(operators)


def spec_of(lab: Any, plan: Plan) -> RunSpec:
    spec = RunSpec()
    spec.CopyFrom(lab.spec)
    spec.plan.CopyFrom(plan_to_proto(plan))
    return spec


def test_who_runs_which_microbatches_is_what_the_routes_say(laboratory):
    graph = laboratory(job_of("rows", 16)).graph.bind(2)
    n = len(graph.operators)
    plan = plan_of(n, n // 2)
    stages = cut(graph, [(s.start, s.stop) for s in plan.stages])
    wire = TransferSpecs(Flow(listed(plan, stages), stages, tied_groups(graph, stages)), graph)
    for training, routes in ((True, plan.routes), (False, plan.evaluation_routes)):
        for peer in (*plan.peers, "nobody"):
            for stage in (0, 1):
                mine = tuple(m for m, r in enumerate(routes) if Visit(stage, PeerId(peer)) in r)
                assert wire.microbatches(peer, stage, training=training) == mine


@pytest.mark.parametrize("part", [3, 2])
def test_a_stage_with_ten_holders_trains_as_the_plain_loop(laboratory, equal_training, part):
    lab = laboratory(job_of("rows", 16))
    n = len(lab.graph.operators)
    world = lab.world(peers(HOLDERS + 2))
    got = lab.train(world, plan_of(n, n // part))
    equal_training(got, lab.plain())
    assert len(got.evaluations) == 2


def test_the_monitor_accepts_rows_and_ghosts_prove_them(laboratory):
    lab = laboratory(job_of("rows", 16))
    n = len(lab.graph.operators)
    spec = spec_of(lab, plan_of(n, n // 2))
    world = lab.world(peers(HOLDERS + 2))
    real = Monitor(world, losses=lab.plain().losses).finish(world.submit(spec))
    world = lab.world(peers(HOLDERS + 2), device=Ghosts())
    ghost = Monitor(world).finish(world.submit(spec))
    wanted = expected(lab.graph.bind(2), lab.job.seed, 4, 12)
    steps = [[e.step for e in events if e.HasField("step")] for events in (real, ghost)]
    assert [s.outcome.loss for s in steps[1]] == wanted.losses
    files = [e.weights.files for e in ghost if e.HasField("weights")][-1]
    assert read_export(world.blobs[f.blob.hash] for f in files) == wanted.weights
    # The same frames of the same sizes: the modelled network carries what tensors would be.
    assert [s.sent_bytes for s in steps[1]] == [s.sent_bytes for s in steps[0]]


@pytest.mark.parametrize(("latency_s", "bandwidth"), [(0.05, 1e7), (0.001, 1e6)])
def test_a_step_takes_what_the_plan_predicts(laboratory, latency_s, bandwidth):
    lab = laboratory(job_of("wide-rows", 96))
    specs = peers(HOLDERS)
    offers = tuple(
        PeerOffer(PeerId(p.name), p.name, device_memory_bytes=p.memory_bytes, speeds=p.speeds)
        for p in specs
    )
    links = uniform([PeerId(p.name) for p in specs], latency_s, bandwidth)
    judge = CostModel(PlanRequest(lab.graph.bind(2), offers, 12, 2, links=links))
    lines = tuple((StageShare(i, 0, judge.operators),) for i in range(HOLDERS))
    candidate = Candidate(lines, (2, 2, *(1,) * (HOLDERS - 2)))
    plan, report = judge.plan(candidate)
    assert [e.collective for e in plan.exchanges] == ["two-level"]
    world = lab.world(specs, carry=steady(latency_s, bandwidth), device=Ghosts())
    events = world.finish(world.submit(spec_of(lab, plan)))
    measured = statistics.median([e.step.seconds for e in events if e.HasField("step")][1:])
    print("measured", measured, report.predicted.step_s)
    assert report.predicted.step_s == pytest.approx(measured, rel=0.05)
