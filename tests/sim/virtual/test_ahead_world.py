"""Holders that step ahead, in the simulated world: through broker and peers, through the deaths of
holders, and with ghosts, whose sums say whether every gradient was counted once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shoal.dag.plan.plan import CodecChoice, PeerId, Plan, StageExchange, StageSlot, Visit
from shoal.dag.schedule.convert_plan import plan_to_proto
from shoal.job import Job
from shoal.planner.base.interface import CodecOptions, PeerOffer, PlannerOptions, PlanRequest
from shoal.planner.cost.candidate import Candidate, StageShare
from shoal.planner.cost.cost_model import CostModel
from shoal.proto.broker_pb2 import RunSpec
from shoal.sim.ghost.device import Ghosts
from shoal.sim.ghost.hashes import expected
from shoal.sim.monitor.monitor import Monitor
from shoal.sim.virtual.world import PeerSpec
from shoal.tests.sim.played import read_export

from ..recovery.test_recovery import JOB, STEPS, Lab

CODEC = "ef+topk:ratio=10,values=fp32"


def two_pipelines(operators: int, codec: str) -> Plan:
    """Embedding and output layer, which are tied, lie in different stages."""
    names = [PeerId(f"p{i}") for i in range(4)]
    middle = operators // 2
    slots = (
        StageSlot(0, middle, (names[0], names[1])),
        StageSlot(middle, operators, (names[2], names[3])),
    )
    exchanges = (StageExchange(0, strategy="ahead"), StageExchange(1, strategy="ahead"))
    routes = ((Visit(0, names[0]), Visit(1, names[2])), (Visit(0, names[1]), Visit(1, names[3])))
    choices = [
        CodecChoice(a, b, "sync", codec)
        for s in slots
        for a in s.holders
        for b in s.holders
        if a != b and codec
    ]
    return Plan(
        slots, routes, 2, "1f1b", tuple(choices), evaluation_routes=routes, exchanges=exchanges
    )


class Ahead(Lab):
    peers = 5

    def plan_of(self, operators: int) -> Plan:
        return two_pipelines(operators, CODEC)


@pytest.fixture(scope="module")
def lab(laboratory: Any) -> Ahead:
    return Ahead(laboratory)


def test_a_run_goes_on_after_the_death_of_any_holder_as_if_nothing_had_been(lab: Ahead) -> None:
    """Each has an optimizer and unsent updates of its own, which its copy on another peer has."""
    first = lab.calm.begun
    moments = range(first, lab.calm.records, max(1, (lab.calm.records - first) // 4))
    for number, moment in enumerate(moments):
        name = f"p{number % 4}"
        played = lab.play({moment: name})
        lab.assert_same(played, f"{name} at record {moment}")


def test_two_at_once(lab: Ahead) -> None:
    at = lab.calm.begun + 2 * (lab.calm.records - lab.calm.begun) // 3
    lab.assert_same(lab.play({at: "p1", at + 1: "p2"}, peers=7), "p1 and p2")


def test_ghosts_prove_that_every_gradient_counts_once(laboratory: Any, lab: Ahead) -> None:
    """Tied parameters first, then each stage's; hashes know of no optimizer."""
    found, graph = laboratory(lab.laboratory.job), lab.laboratory.graph
    world = found.world(4, device=Ghosts())
    plan = replace(two_pipelines(len(graph.operators), CODEC), codecs=())
    spec = RunSpec()
    spec.CopyFrom(found.spec)
    spec.plan.CopyFrom(plan_to_proto(plan))
    events = Monitor(world).finish(world.submit(spec))
    wanted = expected(graph.bind(2), found.job.seed, STEPS, 2)
    steps = [e.step for e in events if e.HasField("step")]
    assert [s.outcome.loss for s in steps] == wanted.losses
    files = [e.weights.files for e in events if e.HasField("weights")][-1]
    assert read_export(world.blobs[f.blob.hash] for f in files) == wanted.weights


def test_the_planner_lets_whole_pipelines_step_ahead(laboratory: Any) -> None:
    """As a job asks for it: four peers, two pipelines of two stages."""
    table = JOB | {
        "plan": {"stages": 2, "pipelines": 2},
        "codec": {"grad": "topk:ratio=20", "feedback": "ahead"},
        "model": JOB["model"] | {"args": JOB["model"]["args"] | {"width": 32}},
    }
    runs = []
    for feedback in ("ahead", "ef"):
        codec = table["codec"] | {"feedback": feedback}
        job = Job.from_table(table | {"name": f"feedback {feedback}", "codec": codec})
        found = laboratory(job)
        world = found.world(4)
        events = world.finish(world.submit(found.spec))
        plan = next(e.plan for e in events if e.HasField("plan"))
        assert [e.strategy for e in plan.exchanges] == ["ahead"] * 2 * (feedback == "ahead")
        assert {c.codec.partition(":")[0] for c in plan.codecs} == {"ef/1+topk/1"}
        runs.append([e.step for e in events if e.HasField("step")])
    ahead, late = ([s.outcome.loss for s in run] for run in runs)
    assert ahead[0] == pytest.approx(late[0])
    assert ahead[1:] != pytest.approx(late[1:], rel=1e-4)


def test_a_plan_that_cannot_step_ahead_says_so(laboratory: Any) -> None:
    graph = laboratory(Job.from_table(JOB)).graph.bind(2)
    specs = [PeerSpec(name=f"p{i}") for i in range(4)]
    offers = tuple(
        PeerOffer(PeerId(p.name), p.name, device_memory_bytes=p.memory_bytes, speeds=p.speeds)
        for p in specs
    )
    options = PlannerOptions(codecs=CodecOptions(sync="topk:ratio=20", feedback="ahead"))
    judge = CostModel(PlanRequest(graph, offers, 2, 2, options=options))
    n = judge.operators
    for last, can in ((3, True), (2, False)):  # pipelines of their own; both end at one peer
        first = (StageShare(0, 0, n // 2), StageShare(2, n // 2, n))
        second = (StageShare(1, 0, n // 2), StageShare(last, n // 2, n))
        plan, report = judge.plan(Candidate((first, second), (1, 1)))
        assert [e.strategy for e in plan.exchanges] == ["ahead", "ahead"] * can
        assert any("no stepping ahead" in reason for reason in report.reasons) != can
