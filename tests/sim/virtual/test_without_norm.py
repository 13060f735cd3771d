"""Plans in which nobody waits for the norm but who reports it: exact, through deaths, with ghosts,
and made by the planner where they are safe."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shoal.dag.cost.network import uniform
from shoal.dag.plan.plan import PeerId, Plan
from shoal.dag.schedule.convert_plan import plan_to_proto
from shoal.job import Job
from shoal.planner.base.interface import PeerOffer, PlannerOptions, PlanRequest
from shoal.planner.cost.candidate import Candidate, StageShare
from shoal.planner.cost.cost_model import CostModel
from shoal.proto.broker_pb2 import RunSpec
from shoal.sim.ghost.device import Ghosts
from shoal.sim.ghost.hashes import expected
from shoal.sim.monitor.monitor import Monitor
from shoal.tests.sim.played import read_export
from shoal.tests.sim.recovery.test_recovery import JOB, STEPS, Lab

TRAIN = JOB["train"] | {"clip": 0.0}


class Without(Lab):
    def plan_of(self, operators: int) -> Plan:
        return replace(super().plan_of(operators), without_norm=True)


@pytest.fixture(scope="module")
def lab(laboratory: Any, plans_once: None) -> Without:
    return Without(laboratory, train=TRAIN)


def test_a_run_is_the_same_bits_as_one_that_waits(laboratory: Any, lab: Without) -> None:
    lab.assert_same(Lab(laboratory, train=TRAIN).calm)


def test_a_run_goes_on_after_any_death_as_if_nothing_had_been(lab: Without) -> None:
    first = lab.calm.begun
    for number, moment in enumerate(range(first, lab.calm.records, 61)):
        name = f"p{number % 2}"
        lab.assert_same(lab.play({moment: name}), f"{name} at record {moment}")


def test_ghosts_prove_that_every_gradient_counts_once(laboratory: Any, lab: Without) -> None:
    found, graph = lab.laboratory, lab.laboratory.graph
    world = found.world(2, device=Ghosts())
    spec = RunSpec()
    spec.CopyFrom(lab.spec)
    events = Monitor(world).finish(world.submit(spec))
    wanted = expected(graph.bind(2), found.job.seed, STEPS, 2, clips=False)
    steps = [e.step for e in events if e.HasField("step")]
    assert [s.outcome.loss for s in steps] == wanted.losses
    files = [e.weights.files for e in events if e.HasField("weights")][-1]
    assert read_export(world.blobs[f.blob.hash] for f in files) == wanted.weights


def test_the_planner_saves_the_way_there_and_back_where_nothing_needs_it(laboratory: Any) -> None:
    """Not where siblings of a lost holder may have to go on from one and the same step."""
    graph = laboratory(Job.from_table(JOB)).graph.bind(2)
    names = [PeerId(f"p{i}") for i in range(4)]
    offers = tuple(PeerOffer(p, device_memory_bytes=1 << 30, flops_per_s=1e9) for p in names)
    network = uniform(names, latency_s=0.1, bandwidth=1e6)
    steps = {}
    for norm in (True, False):
        options = PlannerOptions(norm=norm)
        judge = CostModel(PlanRequest(graph, offers, 2, 2, options=options, links=network))
        n = judge.operators
        first = (StageShare(0, 0, n // 2), StageShare(1, n // 2, n))
        second = (StageShare(2, 0, n // 2), StageShare(3, n // 2, n))
        alone = judge.plan(Candidate((first,), (2,)))
        assert alone.plan.without_norm is not norm
        assert not judge.plan(Candidate((first, second), (1, 1))).plan.without_norm
        steps[norm] = alone.report.predicted.step_s
    assert steps[False] == pytest.approx(steps[True] - 0.1, abs=0.02)
    assert plan_to_proto(alone.plan).without_norm
