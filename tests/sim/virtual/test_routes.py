"""Microbatches that leave stages out, and visit neighbours the other way round.

The oracle is the plain loop with the module's own blocks, those of each microbatch in its order;
that of ghosts is the plain loop of hashes.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.client.models import models
from shoal.dag.analysis.blocks import blocks
from shoal.dag.ir.graph import Graph
from shoal.dag.plan.cut import cut
from shoal.dag.plan.full_steps import FullSteps
from shoal.dag.plan.outline import Outline
from shoal.dag.plan.plan import (
    CodecChoice,
    PeerId,
    Plan,
    PlanError,
    Route,
    ScheduleName,
    StageSlot,
    Visit,
)
from shoal.dag.plan.routes import routes_digest, segments, swaps
from shoal.dag.schedule.convert_plan import plan_from_proto, plan_to_proto
from shoal.dag.schedule.flow import Flow
from shoal.dag.schedule.schedule import check_listed, listed
from shoal.job import Job
from shoal.job.plan_options import SkipScaling
from shoal.proto.broker_pb2 import RunSpec
from shoal.sim.ghost.device import Ghosts
from shoal.sim.ghost.hashes import expected
from shoal.sim.plain import oracle

STEPS, MICROBATCHES, SIZE = 5, 4, 1
ENDS = (0, 2, 4, 5, 6)
"""Blocks of the four stages of blocks: two, two, one and one."""
JOB: dict[str, Any] = {
    "version": 1,
    "name": "swapped",
    "model": {
        "factory": "shoal.examples.gpt:gpt",
        "args": {"layers": 6, "width": 8, "heads": 1, "length": 8, "dropout": 0.0},
    },
    "data": {"kind": "text", "length": 8},
    "plan": {"scheduler": "uniform"},
    "train": {"steps": STEPS, "batch": 4, "microbatch": SIZE, "lr": 1e-2, "eval_every": 2},
}
PEERS = tuple(PeerId(f"p{i}") for i in range(4))


@pytest.fixture(scope="module")
def made(laboratory: Callable[..., Any]) -> Any:
    return laboratory(Job.from_table(JOB))


def scaled(made: Any, scaling: SkipScaling) -> Any:
    """The laboratory with another value of `plan.skip_scaling`; by SGD, to which scale matters."""
    found, job = copy.copy(made), made.job
    found.job = replace(
        job,
        plan=replace(job.plan, skip=0.5, skip_scaling=scaling),
        train=replace(job.train, optimizer="sgd", lr=0.3),
    )
    found.spec = RunSpec()
    found.spec.CopyFrom(made.spec)
    found.spec.job = found.job.to_json()
    return found


def plan_of(graph: Graph, schedule: ScheduleName = "1f1b", **changes: Any) -> Plan:
    """Embedding and head are held twice, each beside one of the stages that change places."""
    first = {b.name: b.start for b in blocks(graph)}
    last = next(b for b in blocks(graph) if b.name == "blocks.5")
    bounds = [0, *(first[f"blocks.{i}"] for i in ENDS[:-1]), last.stop, len(graph.operators)]
    held = (PEERS[:2], *((p,) for p in PEERS), PEERS[2:])
    slots = tuple(StageSlot(a, b, h) for a, b, h in zip(bounds, bounds[1:], held, strict=False))
    a, b, c, d = PEERS
    in_order = zip(range(6), (a, a, b, c, d, d), strict=True)
    other = ((0, b), (2, b), (1, a), (4, d), (3, c), (5, c))
    routes = (tuple(Visit(*v) for v in in_order), tuple(Visit(*v) for v in other))
    plan = Plan(
        slots, routes * 2, SIZE, schedule=schedule, evaluation_routes=(routes[0],) * MICROBATCHES
    )
    return replace(plan, **changes)


def blocks_of(route: Route) -> list[int]:
    """Numbers of the module's blocks that a microbatch goes through, in order."""
    inner = [v.stage for v in route if 0 < v.stage < 5]
    return [b for k in inner for b in range(ENDS[k - 1], ENDS[k])]


class Deeper(nn.Module):
    """Blocks of which what they add is multiplied."""

    def __init__(self, blocks: Sequence[nn.Module], by: float) -> None:
        super().__init__()
        self.stage, self.by = nn.Sequential(*blocks), by

    def forward(self, x: Tensor) -> Tensor:
        grown: Tensor = x + self.by * (self.stage(x) - x)
        return grown


def plain(
    laboratory: Any,
    ways: Sequence[Sequence[int]],
    steps: int = STEPS,
    *,
    then: tuple[int, Sequence[Sequence[int]]] = (-1, ()),
    full: FullSteps | None = None,
) -> list[float]:
    """`ways`: by microbatch, the numbers of its blocks in order; `then`: from a step on other ones;
    in the steps of `full` all blocks.
    What makes up for microbatches that leave a block out is as the job says: its gradients count
    as if all had gone through it, or it adds as much more; blocks of one stage (`ENDS`) together.
    """
    module, job = copy.deepcopy(laboratory.module), laboratory.job
    blocks, scaling, own = list(module.blocks), job.plan.skip_scaling, ways
    reader, losses = laboratory.reader(), list[float]()
    with models.ready(module, job):
        optimizer = oracle.optimizer_of(module, job.train)
        for step in range(steps):
            own = then[1] if step == then[0] else own
            ways = [range(len(blocks))] * len(own) if full and full.has(step) else own
            visits = [[b in way for way in ways].count(True) for b in range(len(blocks))]
            for group in optimizer.param_groups:
                group["lr"] = oracle.learning_rate(job.train, step, steps)
            optimizer.zero_grad()
            total = 0.0
            for m, way in enumerate(ways):
                module.blocks = nn.ModuleList(blocks[b] for b in way)
                if scaling == "stochastic-depth":
                    stages = [range(a, b) for a, b in pairwise(ENDS) if a in way]
                    stages.sort(key=lambda stage: way.index(stage[0]))
                    module.blocks = nn.ModuleList(
                        Deeper([blocks[b] for b in stage], len(ways) / visits[stage[0]])
                        for stage in stages
                    )
                loss = module(**reader.batch(step, m, SIZE)) / len(ways)
                loss.backward()
                total += float(loss.detach())
            module.blocks = nn.ModuleList(blocks)
            for block, count in zip(blocks, visits, strict=True):
                for parameter in block.parameters():
                    assert parameter.grad is not None
                    parameter.grad *= len(ways) / count if scaling == "renormalise" else 1.0
            losses.append(total)
            nn.utils.clip_grad_norm_(module.parameters(), job.train.clip)
            optimizer.step()
    return losses


def plain_over(
    laboratory: Any, routes: Sequence[Route], full: FullSteps | None = None
) -> list[float]:
    return plain(laboratory, [*map(blocks_of, routes)], full=full)


def full_steps(routes: Sequence[Route], before: int, since: int) -> FullSteps:
    """Those of a plan with these routes: whoever runs a stage in other steps runs it in these."""
    alone = {v.stage: v for route in routes for v in route}
    own = ({v.stage: v for v in route} for route in routes)
    return FullSteps(
        before, since, tuple(tuple(by.get(k, alone[k]) for k in range(6)) for by in own)
    )


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_it_is_the_plain_loop_with_blocks_in_another_order(
    made: Any, schedule: ScheduleName
) -> None:
    trained = made.train(made.world(4), plan_of(made.graph, schedule))
    torch.testing.assert_close(
        trained.losses, plain_over(made, plan_of(made.graph).routes), rtol=1e-5, atol=0
    )
    assert abs(trained.losses[-1] - made.plain().losses[-1]) > 1e-4, "the order makes a difference"


def drawn(seed: int) -> tuple[Route, ...]:
    """Routes that leave inner stages out, and have inner neighbours change places."""
    rng, a, b, c, d = random.Random(seed), *PEERS
    while True:
        routes = []
        for _ in range(MICROBATCHES):
            order = [k for k in range(1, 5) if rng.random() < 0.6]
            for low in (1, 2, 3):
                if {low, low + 1} <= {*order} and rng.random() < 0.3:
                    at = order.index(low)
                    order[at : at + 2] = [low + 1, low]
                    break
            inner = [Visit(k, (a, b, c, d)[k - 1]) for k in order]
            ends = rng.choice((a, b)), rng.choice((c, d))
            routes.append((Visit(0, ends[0]), *inner, Visit(5, ends[1])))
        if {v.stage for route in routes for v in route} == set(range(6)):
            return tuple(routes)


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(k, marks=pytest.mark.slow) for k in range(3, 24))]
)
def test_any_routes_are_the_plain_loop_over_their_blocks(made: Any, seed: int) -> None:
    routes = drawn(seed)
    plan = plan_of(made.graph, ("1f1b", "gpipe", "listed")[seed % 3], routes=routes)
    trained = made.train(made.world(4), plan)
    torch.testing.assert_close(trained.losses, plain_over(made, routes), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("scaling", "seed"),
    [
        pytest.param(scaling, seed, marks=() if seed < 2 else pytest.mark.slow)
        for scaling in ("sum", "stochastic-depth")
        for seed in range(12)
    ],
)
def test_what_makes_up_for_visits_left_out_is_as_the_job_says(
    made: Any, scaling: SkipScaling, seed: int
) -> None:
    routes, lab = drawn(seed + 30), scaled(made, scaling)
    slots = list(plan_of(lab.graph).stages)
    for k in (1, 3):
        slots[k] = replace(slots[k], recompute=seed % 3 == 1)
    schedule = ("listed", "zero-bubble", "1f1b")[seed % 3]
    plan = plan_of(lab.graph, schedule, routes=routes, stages=tuple(slots))
    trained = lab.train(lab.world(4), plan)
    wanted = plain_over(lab, routes)
    torch.testing.assert_close(trained.losses, wanted, rtol=1e-5, atol=0)
    other = plain_over(scaled(made, "renormalise"), routes)
    assert abs(wanted[-1] - other[-1]) > 1e-4, "it makes a difference"


@pytest.mark.parametrize(
    ("seed", "lost"),
    [
        (0, ""),
        (1, "p2"),
        (2, "p1"),
        *(pytest.param(k, ("", "p2", "p1")[k % 3], marks=pytest.mark.slow) for k in range(3, 15)),
    ],
)
def test_the_first_steps_and_the_last_may_be_full(made: Any, seed: int, lost: str) -> None:
    """Whoever has the plan knows by its number what a step is: where a peer dies at a border,
    another that takes its part and goes back before it, or its siblings, too."""
    routes, rng = drawn(seed + 50), random.Random(seed)
    lab = scaled(made, rng.choice(("renormalise", "sum", "stochastic-depth")))
    full = full_steps(routes, *((2, 4) if lost else (rng.randrange(4), rng.choice((3, 4, 9)))))
    schedule = ("listed", "zero-bubble", "1f1b", "gpipe")[seed % 4]
    world, spec = lab.world(5 if lost else 4), RunSpec()
    spec.CopyFrom(lab.spec)
    slots = list(plan_of(lab.graph).stages)
    if lost == "p1":  # all of it is held twice
        slots[2] = replace(slots[2], holders=(PEERS[1], PEERS[2]))
    plan = plan_of(lab.graph, schedule, routes=routes, full=full, stages=tuple(slots))
    spec.plan.CopyFrom(plan_to_proto(plan))
    run = world.submit(spec)
    if lost:
        world.until(lambda: len([e for e in world.events(run) if e.HasField("step")]) == 2)
        world.kill(lost)
    trained = lab.finish(world, run)
    wanted = plain_over(lab, routes, full)
    torch.testing.assert_close(trained.losses, wanted, rtol=1e-5, atol=0)
    assert abs(wanted[-1] - plain_over(lab, routes)[-1]) > 1e-5 or full.before >= full.since
    assert world.broker.ended[run].inexact_from == 0
    assert len({e.term for e in world.events(run) if e.HasField("plan")}) == 1 + bool(lost)


@pytest.mark.parametrize("seed", range(6))
def test_ghosts_of_any_routes_are_the_plain_loop_of_hashes(made: Any, seed: int) -> None:
    plan = plan_of(made.graph, routes=drawn(seed))
    assert_hashes(made, plan)


def test_ghosts_of_it_are_the_plain_loop_of_hashes(made: Any) -> None:
    assert_hashes(made, plan_of(made.graph))


def test_ghosts_of_full_steps_are_the_plain_loop_of_hashes(made: Any) -> None:
    routes = drawn(3)
    assert_hashes(made, plan_of(made.graph, routes=routes, full=full_steps(routes, 1, 4)))


def assert_hashes(made: Any, plan: Plan) -> None:
    graph = made.graph.bind(SIZE)
    stages = cut(graph, [(s.start, s.stop) for s in plan.stages])
    orders = [segments(stages, route) for route in plan.routes]
    full = plan.full.has if plan.full else lambda step: False
    wanted = expected(graph, made.job.seed, STEPS, MICROBATCHES, orders=orders, full=full)
    world, spec = made.world(4, device=Ghosts()), RunSpec()
    spec.CopyFrom(made.spec)
    spec.plan.CopyFrom(plan_to_proto(plan))
    losses = [e.step.outcome.loss for e in world.finish(world.submit(spec)) if e.HasField("step")]
    assert losses == wanted.losses
    assert losses != expected(graph, made.job.seed, STEPS, MICROBATCHES).losses


def test_gradients_find_the_positions_of_their_values(made: Any) -> None:
    """A value has two names where stages have changed places: one for both ends of a link."""
    pairs = [(a, b) for a in PEERS for b in PEERS if a != b]
    value = [CodecChoice(a, b, "activation", "topk:ratio=4.0,values=fp32") for a, b in pairs]
    back = [CodecChoice(a, b, "activation_grad", "support:ratio=4.0,values=fp32") for a, b in pairs]
    whole = made.train(made.world(4), plan_of(made.graph, codecs=tuple(value)))
    sparse = made.train(made.world(4), plan_of(made.graph, codecs=(*value, *back)))
    assert sparse.losses[0] == whole.losses[0]  # the same forward
    assert sparse.losses[1:] != whole.losses[1:]
    assert sparse.norms[0] < whole.norms[0]


def test_which_stages_change_places(made: Any) -> None:
    assert swaps(plan_of(made.graph)) == ((1, 2), (3, 4))


def test_stages_that_are_no_links_of_a_chain_keep_their_places(made: Any) -> None:
    """Here the first block is cut in its middle, where two values cross."""
    graph = made.graph.bind(SIZE)
    plan = plan_of(made.graph)
    slots = list(plan.stages)
    slots[1] = StageSlot(slots[1].start, slots[1].stop - 3, slots[1].holders)
    slots[2] = StageSlot(slots[1].stop, slots[2].stop, slots[2].holders)
    broken = plan_of(made.graph, stages=tuple(slots))
    stages = cut(graph, [(s.start, s.stop) for s in broken.stages])
    with pytest.raises(PlanError, match="another order with stage 1, which cannot be, as"):
        Flow(broken, stages, ())


def test_ends_keep_their_places(made: Any) -> None:
    plan = plan_of(made.graph)
    first = plan.routes[0]
    for a in (0, 4):
        route = list(first)
        route[a], route[a + 1] = route[a + 1], route[a]
        broken = plan_of(made.graph, routes=(tuple(route),))
        with pytest.raises(PlanError, match="in order, but for inner ones"):
            broken.validate(len(made.graph.operators))


def test_full_steps_visit_all_stages_in_order_where_the_others_do(made: Any) -> None:
    routes, operators = drawn(3), len(made.graph.operators)
    full = full_steps(routes, 1, 4)
    plan_of(made.graph, routes=routes, full=full).validate(operators)
    first, *rest = full.routes
    own = next(v for v in routes[0] if v.stage == 0)
    other = Visit(0, PEERS[0] if own.peer == PEERS[1] else PEERS[1])
    for broken, words in (
        ((first[:2] + first[3:], *rest), r"microbatch 0 visits stages \[0, 1, 3, 4, 5\] in full"),
        (tuple(rest), "3 microbatches have a route in full steps: expected 4"),
        (((other, *first[1:]), *rest), "microbatch 0 visits stage 0 at .*, but not in full steps"),
    ):
        wrong = replace(full, routes=broken)
        with pytest.raises(PlanError, match=words):
            plan_of(made.graph, routes=routes, full=wrong).validate(operators)
    stages = cut(made.graph.bind(SIZE), [(s.start, s.stop) for s in plan_of(made.graph).stages])
    proved = listed(plan_of(made.graph, routes=routes, full=full), stages)
    check_listed(proved, stages)
    assert plan_from_proto(plan_to_proto(replace(proved, outline=Outline()))) == proved
    assert proved.full is not None
    late = replace(proved.full, visits=tuple(v[::-1] for v in proved.full.visits))
    with pytest.raises(PlanError):
        check_listed(replace(proved, full=late), stages)


@pytest.mark.parametrize("seed", range(4))
def test_the_word_for_routes_says_whether_steps_so_far_were_alike(made: Any, seed: int) -> None:
    """The oracle: the list of the ways of all microbatches in all of these steps."""
    rng = random.Random(seed)
    plans = []
    for k in (1, 1, 2):
        routes = drawn(k)
        full = (
            full_steps(routes, rng.randrange(5), rng.randrange(5)) if rng.random() < 0.8 else None
        )
        plans.append(plan_of(made.graph, routes=routes, full=full))

    def ways(plan: Plan, until: int) -> list[object]:
        whole = tuple(range(6))
        return [
            tuple(
                whole if plan.full and plan.full.has(step) else tuple(v.stage for v in route)
                for route in plan.routes
            )
            for step in range(until)
        ]

    for until in range(1, 7):
        for one in plans:
            for two in plans:
                alike = routes_digest(one, until) == routes_digest(two, until)
                assert alike == (ways(one, until) == ways(two, until)), (one.full, two.full, until)


def test_a_route_needs_its_ends_and_a_stage_its_visits(made: Any) -> None:
    first, operators = plan_of(made.graph).routes[0], len(made.graph.operators)
    for short in (first[1:], first[:-1]):
        with pytest.raises(PlanError, match="expected 0 to 5 in order, but for inner ones"):
            plan_of(made.graph, routes=(first, short)).validate(operators)
    with pytest.raises(PlanError, match="no microbatch visits stage 2: it would never be trained"):
        plan_of(made.graph, routes=((*first[:2], *first[3:]),) * 4).validate(operators)
    held_out = plan_of(made.graph, evaluation_routes=((*first[:2], *first[3:]),))
    with pytest.raises(PlanError, match=r"held-out microbatch 0 visits .* 0 to 5 in order$"):
        held_out.validate(operators)


@pytest.mark.parametrize(
    ("lost", "there", "left"),
    [("p1", 4, {"p0", "p2", "p3"}), ("p2", 5, {"p0", "p1", "p3", "p4"})],
)
def test_a_lost_peer_changes_no_routes_and_no_loss(
    made: Any, lost: str, there: int, left: set[str]
) -> None:
    """Its visits go to another holder, or all of its stages to a peer from the pool."""
    routes = drawn(7)
    slots = list(plan_of(made.graph).stages)
    slots[2] = replace(slots[2], holders=(PEERS[1], PEERS[2]))  # all of p1 is held twice
    plan = plan_of(made.graph, stages=tuple(slots), routes=routes)
    world = made.world(there)
    spec = RunSpec()
    spec.CopyFrom(made.spec)
    spec.plan.CopyFrom(plan_to_proto(plan))
    run = world.submit(spec)
    world.until(lambda: len([e for e in world.events(run) if e.HasField("step")]) == 2)
    world.kill(lost)
    trained = made.finish(world, run)
    torch.testing.assert_close(trained.losses, plain_over(made, routes), rtol=1e-5, atol=0)
    assert world.broker.ended[run].inexact_from == 0
    plans = [plan_from_proto(e.plan) for e in world.events(run) if e.HasField("plan")]
    assert {*plans[-1].peers} == left
