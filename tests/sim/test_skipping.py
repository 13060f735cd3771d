"""A job that lets its microbatches leave stages out: planned by the broker, run in the world.

The oracle is the plain loop over the module's own blocks, those of each microbatch in its order.
"""

from __future__ import annotations

import copy
import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from shoal.dag.analysis.blocks import blocks
from shoal.dag.cost.network import uniform
from shoal.dag.plan.cut import cut
from shoal.dag.plan.full_steps import FullSteps
from shoal.dag.plan.plan import PeerId, Plan, Route
from shoal.dag.plan.routes import segments
from shoal.dag.schedule.convert_plan import plan_from_proto, plan_to_proto
from shoal.job import Job
from shoal.net.transports.memory import steady
from shoal.planner.base.interface import PeerOffer, PlannerOptions, PlanRequest
from shoal.planner.schedulers.schedulers import plan as make_plan
from shoal.proto.broker_pb2 import Checkpoint, RunEvent, RunSpec
from shoal.sim.following import Following
from shoal.sim.ghost.device import Ghosts
from shoal.sim.ghost.hashes import expected
from shoal.sim.monitor.monitor import Monitor
from shoal.sim.report.summary import Summary
from shoal.sim.virtual.world import PeerSpec
from shoal.tests.sim.virtual.test_routes import plain

pytestmark = pytest.mark.usefixtures("plans_once")

STEPS, MICROBATCHES = 5, 6
JOB: dict[str, Any] = {
    "version": 1,
    "name": "skipping",
    "model": {
        "factory": "shoal.examples.gpt:gpt",
        "args": {"layers": 6, "width": 16, "heads": 1, "length": 16, "dropout": 0.0},
    },
    "data": {"kind": "text", "length": 16},
    "plan": {"skip": 0.34, "reorder": True},
    "train": {
        "steps": STEPS, "batch": MICROBATCHES, "microbatch": 1, "lr": 1e-2, "eval_every": 2,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def made(laboratory: Callable[..., Any]) -> Any:
    return laboratory(Job.from_table(JOB))


def blocks_by_microbatch(made: Any, plan: Plan) -> list[list[int]]:
    starts = {int(b.name[7:]): b.start for b in blocks(made.graph) if b.name.startswith("blocks.")}

    def of(route: Route) -> list[int]:
        spans = [plan.stages[v.stage] for v in route]
        return [i for s in spans for i, at in starts.items() if s.start <= at < s.stop]

    return [of(route) for route in plan.routes]


def played(made: Any, *, lost: str = "") -> tuple[list[float], list[Plan], list[RunEvent]]:
    """Losses, plans and events of the job in a world, in which one may die after two steps."""
    peers = [PeerSpec(name=f"p{i}", flops_per_s=1e8) for i in range(4)]
    world = made.world(peers, carry=steady(0.01, 1e6))
    run = world.submit(made.spec)
    if lost:
        world.until(lambda: len([e for e in world.events(run) if e.HasField("step")]) == 2)
        world.kill(lost)
    trained, events = made.finish(world, run), world.events(run)
    plans = [plan_from_proto(e.plan) for e in events if e.HasField("plan")]
    return trained.losses, plans, events


def test_it_is_the_plain_loop_over_the_same_routes(made: Any) -> None:
    losses, [plan], events = played(made)
    assert any(len(route) < len(plan.stages) for route in plan.routes)
    wanted = plain(made, blocks_by_microbatch(made, plan), STEPS)
    torch.testing.assert_close(losses, wanted, rtol=1e-5, atol=0)
    assert events[-1].state.inexact_from == 0
    followed = Following(Summary(name="", world="", seed=0), {})
    for event in events:
        followed.see(event)
    assert followed.summary.visits == tuple(
        sum(v.stage == k for route in plan.routes for v in route) for k in range(len(plan.stages))
    )


def with_full_steps(made: Any, warmup: int, fade_out: int) -> Any:
    """The laboratory with full steps at the begin and at the end."""
    found, job = copy.copy(made), made.job
    found.job = replace(
        job, plan=replace(job.plan, skip_warmup=warmup, skip_fade_out=fade_out, replan=False)
    )
    found.spec = RunSpec()
    found.spec.CopyFrom(made.spec)
    found.spec.job = found.job.to_json()
    return found


@pytest.mark.parametrize("lost", ["", "p1"])
def test_the_first_steps_and_the_last_leave_nothing_out_where_the_job_says_so(
    made: Any, lost: str
) -> None:
    """With a peer lost where the first of the others begins, too: no step that was told has other
    routes under the next plan, so the run is exact to its end."""
    lab = with_full_steps(made, 2, 1)
    losses, plans, events = played(lab, lost=lost)
    full = FullSteps(2, STEPS - 1)
    for plan in plans:
        assert plan.full is not None
        assert (plan.full.before, plan.full.since) == (full.before, full.since)
        assert all(len(route) == len(plan.stages) for route in plan.full.routes)
        assert any(len(route) < len(plan.stages) for route in plan.routes)
    ways = blocks_by_microbatch(lab, plans[-1])
    torch.testing.assert_close(losses, plain(lab, ways, STEPS, full=full), rtol=1e-5, atol=0)
    assert events[-1].state.inexact_from == 0
    report = next(e.report for e in events if e.HasField("plan"))
    assert report.predicted.full_step_s > report.predicted.step_s
    assert any("steps below 2 and from 4 on visit all stages" in why for why in report.reasons)


def job_with(made: Any, plan: dict[str, Any], resumed: Checkpoint | None = None) -> RunSpec:
    """The job with another [plan], which leaves a checkpoint every two steps."""
    spec = RunSpec()
    spec.CopyFrom(made.spec)
    table = json.loads(spec.job) | {"plan": plan, "output": {"every": 2}}
    spec.job = Job.from_table(table).to_json()
    if resumed is not None:
        spec.resumed.CopyFrom(resumed)
    return spec


@pytest.mark.parametrize(
    ("first", "then", "full"),
    [
        pytest.param({"skip": 0.34}, {}, 0, marks=pytest.mark.slow),
        pytest.param({}, {"skip": 0.34, "schedule": "zero-bubble"}, 0, marks=pytest.mark.slow),
        pytest.param({"skip": 0.34}, {"skip": 0.5, "reorder": True}, 0, marks=pytest.mark.slow),
        pytest.param({"skip": 0.34, "skip_warmup": 3}, {}, 3, marks=pytest.mark.slow),
        pytest.param({}, {"skip": 0.34, "skip_warmup": 3}, 3, marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_goes_on_with_another_share_to_skip(
    made: Any, first: dict[str, Any], then: dict[str, Any], full: int
) -> None:
    """From there on losses are those of the other routes, and the run says from which step on it is
    not what it was; where all steps so far were full it is exact."""
    peers = [PeerSpec(name=f"p{i}", flops_per_s=1e8) for i in range(3)]
    world = made.world(peers, carry=steady(0.01, 1e6))
    events = list(world.finish(world.submit(job_with(made, first))))
    found = next(e.checkpoint for e in events if e.HasField("checkpoint"))
    assert found.step == 2
    again = made.world(peers, carry=steady(0.01, 1e6))
    again.saved |= world.saved
    after = list(again.finish(again.submit(job_with(made, then, found))))
    assert after[-1].state.step == STEPS, after[-1].state.reason.text
    one, two = (
        blocks_by_microbatch(made, next(plan_from_proto(e.plan) for e in run if e.HasField("plan")))
        for run in (events, after)
    )
    wanted = plain(made, one, STEPS, then=(2, two), full=FullSteps(full, 99) if full else None)
    losses = [e.step.outcome.loss for e in after if e.HasField("step")]
    torch.testing.assert_close(losses, wanted[2:], rtol=1e-5, atol=0)
    assert after[-1].state.inexact_from == (0 if full else 2)


def test_ghosts_of_it_are_compared_step_by_step(made: Any) -> None:
    lab = with_full_steps(made, 2, 1)
    world = lab.world(
        [PeerSpec(name=f"p{i}", flops_per_s=1e8) for i in range(4)],
        carry=steady(0.01, 1e6),
        device=Ghosts(),
    )
    monitor = Monitor(world, seed=0)
    events = monitor.finish(world.submit(lab.spec))
    [plan] = [plan_from_proto(e.plan) for e in events if e.HasField("plan")]
    graph = lab.graph.bind(1)
    stages = cut(graph, [(s.start, s.stop) for s in plan.stages])
    orders = [segments(stages, route) for route in plan.routes]
    assert plan.full is not None
    wanted = expected(graph, lab.job.seed, STEPS, MICROBATCHES, orders=orders, full=plan.full.has)
    assert [e.step.outcome.loss for e in events if e.HasField("step")] == wanted.losses


@pytest.mark.slow
def test_a_plan_anew_after_a_loss_has_other_routes_and_says_from_where_on(made: Any) -> None:
    """Steps that are done again are told once, as they were the first time."""
    losses, [first, later], events = played(made, lost="p1")
    at, told = events[-1].state.inexact_from, 2
    assert 0 < at <= told
    ways = blocks_by_microbatch(made, first)
    then = at, blocks_by_microbatch(made, later)
    before, behind = plain(made, ways, STEPS), plain(made, ways, STEPS, then=then)
    torch.testing.assert_close(losses, before[:told] + behind[told:], rtol=1e-5, atol=0)


def test_a_step_takes_the_predicted_time(made: Any) -> None:
    peers = [PeerSpec(name=f"p{i}", flops_per_s=s) for i, s in enumerate([2e8, 1e8, 1e8, 4e8])]
    offers = tuple(
        PeerOffer(PeerId(p.name), p.name, device_memory_bytes=p.memory_bytes, speeds=p.speeds)
        for p in peers
    )
    links = uniform([PeerId(p.name) for p in peers], 0.02, 1e6)
    options = PlannerOptions(skip=0.34, reorder=True, full_steps=(0, 7))
    request = PlanRequest(made.graph.bind(1), offers, MICROBATCHES, 1, 0, options, links)
    found, report = make_plan(request)
    spec = RunSpec()
    spec.CopyFrom(made.spec)
    train = replace(made.job.train, steps=12, eval_every=0)
    spec.job, spec.steps = replace(made.job, train=train).to_json(), 12
    spec.plan.CopyFrom(plan_to_proto(found))
    world = made.world(peers, carry=steady(0.02, 1e6))
    events = world.finish(world.submit(spec))
    seconds = [e.step.seconds for e in events if e.HasField("step")]
    predicted = report.predicted
    assert predicted.step_s == pytest.approx(statistics.median(seconds[1:7]), rel=0.03)
    assert predicted.full_step_s == pytest.approx(statistics.median(seconds[8:]), rel=0.03)
