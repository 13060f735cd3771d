"""A holder dies, nothing of its stage is left, and another peer makes it anew from its neighbours.

The oracle is a plain loop that does the same in one process, written out here: before the step that
is done again, blocks 2 and 3 become the mean of blocks 1 and 4, weighted by squared gradient norms,
and begin without optimizer state at 1.1 times the learning rate. Until then the run is the plain
loop's, and nobody goes back. With "neighbour+" the broker plans, every second microbatch goes
through the blocks in another order, and the lost ones become copies of those that they change
places with.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from shoal.client.models import models
from shoal.dag.analysis.blocks import blocks
from shoal.dag.ir.graph import Graph
from shoal.dag.plan.plan import PeerId, Plan, StageSlot, Visit
from shoal.dag.plan.routes import routes_digest, swapped_digest, swaps
from shoal.dag.schedule.convert_plan import plan_from_proto, plan_to_proto
from shoal.job import Job, Train
from shoal.peer.core import events as p
from shoal.proto.broker_pb2 import DONE, FAILED, Checkpoint, RunEvent, RunSpec, Swap
from shoal.sim.ghost.device import Ghosts
from shoal.sim.monitor.monitor import Monitor
from shoal.sim.plain import oracle
from shoal.sim.virtual.clock import Observed
from shoal.sim.virtual.world import World

pytestmark = pytest.mark.usefixtures("plans_once")

STEPS = 7
JOB: dict[str, Any] = {
    "version": 1,
    "name": "neighbour",
    "model": {
        "factory": "shoal.examples.gpt:gpt",
        "args": {"layers": 6, "width": 8, "heads": 1, "length": 8, "dropout": 0.0},
    },
    "data": {"kind": "text", "length": 8},
    "plan": {"scheduler": "uniform"},
    "train": {"steps": STEPS, "batch": 4, "microbatch": 2, "lr": 1e-2, "eval_every": 0},
    "recovery": {"ladder": ["neighbour"]},
}
NAMES = ("p0", "p1", "p2")
LOST = ("blocks.2.", "blocks.3.")


def plan_of(graph: Graph, holders: Iterable[Iterable[str]] = (("p0",), ("p1",), ("p2",))) -> Plan:
    """Three stages of two blocks, with the embedding in the first and the head in the last; two
    microbatches, each over the first or second holder of a stage."""
    first = {b.name: b.start for b in blocks(graph)}
    starts = [0, first["blocks.2"], first["blocks.4"], len(graph.operators)]
    held = [tuple(map(PeerId, names)) for names in holders]
    slots = tuple(StageSlot(starts[k], starts[k + 1], held[k]) for k in range(3))
    routes = tuple(tuple(Visit(k, held[k][m % len(held[k])]) for k in range(3)) for m in range(2))
    return Plan(slots, routes, 2)


class Played:
    """The job in a world, where some die once a number of steps is done. `saved`: goes on from the
    first checkpoint of that one."""

    def __init__(
        self,
        laboratory: Any,
        dies: dict[str, int],
        *,
        peers: int = 4,
        recovery: dict[str, Any] | None = None,
        plan: Plan | None = None,
        stages: int | None = None,
        output: dict[str, Any] | None = None,
        saved: Played | None = None,
        ghosts: bool = False,
        at: Callable[[Observed], bool] = lambda seen: isinstance(seen.record, p.Computed),
    ) -> None:
        changed: dict[str, Any] = {"recovery": recovery or {}, "output": output or {}}
        if stages is not None:  # the broker plans, as many of blocks as there are peers where 0
            changed["plan"] = {"scheduler": "uniform"} | ({"stages": stages} if stages else {})
        job = Job.from_table(json.loads(laboratory.spec.job) | changed)
        spec = RunSpec()
        spec.CopyFrom(laboratory.spec)
        spec.job = job.to_json()
        if stages is None:
            spec.plan.CopyFrom(plan_to_proto(plan or plan_of(laboratory.graph)))
        options = {"device": Ghosts()} if ghosts else {}
        self.world: World = laboratory.world(peers, log=False, **options)
        if saved is not None:
            spec.resumed.CopyFrom(saved.checkpoints[0])
            self.world.saved |= saved.world.saved
        monitor = Monitor(self.world)
        self.computed: list[tuple[str, int, int]] = []
        """(who, term, step) of every action."""
        self.world.until(lambda: len(self.world.broker.machine.members.pool) == peers)
        self.run = self.world.submit(spec)
        also, waits = self.world.observe, dict(dies)

        def observe(seen: Observed) -> None:
            assert also is not None
            also(seen)
            if isinstance(seen.record, p.Compute):
                self.computed.append((seen.who, seen.record.term, seen.record.step))
            known = self.world.broker.machine.replica(self.run)
            for name, step in list(waits.items()):
                if known is not None and known.record.committed >= step and at(seen):
                    del waits[name]
                    self.world.kill(name)

        self.world.observe = observe
        self.events: list[RunEvent] = monitor.finish(self.run)
        assert not waits, "somebody did not die"

    @property
    def plans(self) -> list[Plan]:
        return [plan_from_proto(e.plan) for e in self.events if e.HasField("plan")]

    @property
    def end(self) -> Any:
        return self.world.broker.ended[self.run]

    @property
    def checkpoints(self) -> list[Checkpoint]:
        return [e.checkpoint for e in self.events if e.HasField("checkpoint")]

    @property
    def losses(self) -> list[float]:
        done = [e.step for e in self.events if e.HasField("step")]
        first = done[0].step  # where it goes on from a checkpoint
        assert [s.step for s in done] == list(range(first, first + len(done)))
        return [s.outcome.loss for s in done]

    @property
    def notes(self) -> str:
        return "\n".join(e.note or e.state.reason.text for e in self.events)


def plain(
    laboratory: Any,
    rebuilt_at: int,
    order: Sequence[int] = range(6),
    copied: Mapping[int, int] | None = None,
) -> list[float]:
    """The oracle, see the module; `rebuilt_at`: updates before that. `order`: of the blocks, for
    every second microbatch; `copied`: by lost block, the one that it becomes a copy of."""
    module, job = copy.deepcopy(laboratory.module), laboratory.job
    train, reader = job.train, laboratory.reader()
    losses: list[float] = []
    own = list(module.blocks)
    with models.ready(module, job):
        optimizer = oracle.optimizer_of(module, train)
        for step in range(STEPS):
            if step == rebuilt_at:
                optimizer = _rebuilt(module, optimizer, train, copied)
            for group in optimizer.param_groups:
                group["lr"] = oracle.learning_rate(train, step, STEPS) * group.get("times", 1.0)
            optimizer.zero_grad()
            total = 0.0
            for m in range(2):
                module.blocks = nn.ModuleList(own[i] for i in (order if m else range(6)))
                loss = module(**reader.batch(step, m, 2)) / 2
                loss.backward()
                total += float(loss.detach())
            module.blocks = nn.ModuleList(own)
            losses.append(total)
            grads = {n: q.grad.clone() for n, q in module.named_parameters()}
            module.__dict__["grads"] = grads
            nn.utils.clip_grad_norm_(module.parameters(), train.clip)
            optimizer.step()
    return losses


def _rebuilt(
    module: nn.Module, optimizer: Any, train: Train, copied: Mapping[int, int] | None
) -> torch.optim.Optimizer:
    named, grads = dict(module.named_parameters()), module.__dict__["grads"]

    def square(block: str) -> float:
        return float(sum(g.double().square().sum() for n, g in grads.items() if block in n))

    before, behind = square("blocks.1."), square("blocks.4.")
    prefixes = LOST if copied is None else tuple(f"blocks.{i}." for i in copied)
    again = oracle.optimizer_of(module, train)
    again.load_state_dict(optimizer.state_dict())
    with torch.no_grad():
        for name, parameter in named.items():
            lost = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
            if lost is None:
                continue
            again.state.pop(parameter)
            if copied is not None:
                other = copied[int(lost.split(".")[1])]
                parameter.copy_(named[name.replace(lost, f"blocks.{other}.")])
                continue
            a, b = (named[name.replace(lost, f"blocks.{i}.")] for i in (1, 4))
            parameter.copy_((before * a + behind * b) / (before + behind))
    for group in list(again.param_groups):
        mine = [q for n, q in named.items() if n.startswith(prefixes)]
        moved = [q for q in group["params"] if any(q is x for x in mine)]
        group["params"] = [q for q in group["params"] if not any(q is x for x in moved)]
        again.param_groups.append({**group, "params": moved, "times": 1.1})
    return again


@pytest.fixture(scope="module")
def made(laboratory: Callable[..., Any]) -> Any:
    return laboratory(Job.from_table(JOB))


def recovery(*ladder: str) -> dict[str, Any]:
    return {"ladder": list(ladder)}


@pytest.mark.parametrize("after", [1, 4])
def test_a_lost_stage_is_made_from_its_neighbours(made: Any, after: int) -> None:
    played = Played(made, {"p1": after}, recovery=recovery("neighbour"))
    assert played.end.phase == DONE, played.notes
    assert played.end.inexact_from == after
    assert f"the run is not exact from step {after} on" in played.notes
    assert "stage 1 -> p3 (from the pool); made anew" in played.notes
    assert f"not exact from step {after} on" in played.end.reason.text
    again = {step for _, term, step in played.computed if term > 1}
    assert min(again) == after, "somebody went back"
    assert played.losses == pytest.approx(plain(made, after), rel=1e-5)
    assert plain(made, after)[after:] != pytest.approx(plain(made, -1)[after:], rel=1e-5)


def test_a_run_in_which_nobody_is_lost_is_exact(made: Any) -> None:
    played = Played(made, {}, recovery=recovery("neighbour"))
    assert played.end.phase == DONE
    assert played.end.inexact_from == 0
    assert played.losses == pytest.approx(plain(made, -1), rel=1e-5)


def test_what_nobody_else_has_cannot_be_made(made: Any) -> None:
    """The first stage has the positions. The last rung is next, with the reason."""
    played = Played(made, {"p0": 3}, recovery=recovery("neighbour"))
    assert played.end.phase == FAILED
    assert "nobody else holds positions.weight" in played.end.reason.text
    played = Played(made, {"p0": 3}, recovery=recovery("neighbour", "checkpoint"))
    assert played.end.phase == DONE, played.notes
    assert "nobody else holds positions.weight" in played.notes
    assert played.end.inexact_from == 0
    assert played.losses == pytest.approx(plain(made, -1), rel=1e-5)


def blocks_of(made: Any, plan: Plan) -> list[list[int]]:
    """Of each stage."""
    named = [(int(b.name[7:]), b.start) for b in blocks(made.graph) if b.name[:7] == "blocks."]
    return [[i for i, at in named if s.start <= at < s.stop] for s in plan.stages]


@pytest.fixture(scope="module")
def swapping(made: Any) -> Played:
    return Played(made, {}, peers=5, stages=4, recovery=recovery("neighbour+"))


def test_a_run_whose_stages_change_places(made: Any, swapping: Played) -> None:
    (plan,) = swapping.plans
    assert swaps(plan) == ((1, 2), (3, 4))
    assert [len(s.holders) for s in plan.stages] == [2, 1, 1, 1, 1, 2]
    of = blocks_of(made, plan)
    assert swapping.end.inexact_from == 0
    order = [*of[2], *of[1], *of[4], *of[3]]
    assert swapping.losses == pytest.approx(plain(made, -1, order), rel=1e-5)
    assert swapping.losses != pytest.approx(plain(made, -1), rel=1e-5)


@pytest.mark.parametrize("stage", [1, 2, 3, 4])
def test_a_lost_stage_is_a_copy_of_the_one_that_it_changes_places_with(
    made: Any, swapping: Played, stage: int
) -> None:
    """Also the first and the last ones, with what stands before and behind them."""
    plan = swapping.plans[0]
    of, (lost,) = blocks_of(made, plan), plan.stages[stage].holders
    pair = {1: 2, 2: 1, 3: 4, 4: 3}
    mine, other = of[stage], of[pair[stage]]
    assert len(mine) == len(other)
    played = Played(made, {lost: 3}, peers=5, stages=4, recovery=recovery("neighbour+"))
    assert played.end.phase == DONE, played.notes
    assert played.end.inexact_from == 3
    order = [*of[2], *of[1], *of[4], *of[3]]
    wanted = plain(made, 3, order, dict(zip(mine, other, strict=True)))
    assert played.losses == pytest.approx(wanted, rel=1e-5)


def test_other_blocks_that_change_places_are_said(made: Any) -> None:
    """Five stages of blocks; the pool is empty, so four go on, with other cuts."""
    ladder = recovery("snapshot", "neighbour+")
    played = Played(made, {"p1": 4}, peers=5, stages=0, recovery=ladder)
    assert played.end.phase == DONE, played.notes
    first, then = played.plans
    assert [len(plan.stages) for plan in (first, then)] == [7, 6]
    assert routes_digest(first) != routes_digest(then)
    assert 0 < played.end.inexact_from <= 4, played.notes
    assert "or microbatches take other routes than before" in played.end.reason.text
    order = [i for k in (2, 1, 3, 5, 4) for i in blocks_of(made, first)[k]]
    at = played.end.inexact_from
    assert played.losses[:at] == pytest.approx(plain(made, -1, order)[:at], rel=1e-5)


def test_going_back_to_the_start_with_other_cuts_is_not_exact(made: Any) -> None:
    """Losses that were told of belong to another order of blocks than those that come."""
    ladder = recovery("neighbour+", "checkpoint")
    played = Played(made, {"p1": 4}, peers=5, stages=0, recovery=ladder)
    assert played.end.phase == DONE, played.notes
    first, then = played.plans
    assert routes_digest(first) != routes_digest(then)
    assert "from the starting weights" in played.notes
    assert played.end.inexact_from == 4


def test_what_goes_on_from_a_checkpoint_is_exact_where_the_same_change_places(made: Any) -> None:
    made_with = {"peers": 5, "output": {"every": 3}}
    plus, plain_ladder = recovery("neighbour+"), recovery("snapshot")
    swapped = Played(made, {}, stages=4, recovery=plus, **made_with)
    assert swapped.checkpoints[0].step == 3
    assert swapped.end.inexact_from == 0

    again = Played(made, {}, stages=4, recovery=plus, saved=swapped, **made_with)
    assert again.end.phase == DONE, again.notes
    assert routes_digest(again.plans[0]) == routes_digest(swapped.plans[0])
    assert again.end.inexact_from == 0
    assert again.losses == pytest.approx(swapped.losses[3:], rel=1e-5)

    older = copy.copy(swapped)  # of a version that said which operators change places
    older.events = [RunEvent.FromString(e.SerializeToString()) for e in swapped.events]
    plan = swapped.plans[0]
    at = [(plan.stages[a].start, plan.stages[a].stop, plan.stages[b].stop) for a, b in swaps(plan)]
    assert swapped_digest(plan, at) == swapped.checkpoints[0].routes
    saved = older.checkpoints[0]
    saved.routes = ""
    saved.swapped.extend(Swap(start=a, middle=b, stop=c) for a, b, c in at)
    from_older = Played(made, {}, stages=4, recovery=plus, saved=older, **made_with)
    assert from_older.end.inexact_from == 0

    none = Played(made, {}, stages=4, recovery=plain_ladder, saved=swapped, **made_with)
    assert none.end.phase == DONE, none.notes
    assert none.end.inexact_from == 3
    assert "not exact from step 3 on" in none.end.reason.text

    unswapped = Played(made, {}, recovery=plain_ladder, **made_with)
    plain_again = Played(made, {}, recovery=plain_ladder, saved=unswapped, **made_with)
    assert plain_again.end.phase == DONE, plain_again.notes
    assert plain_again.end.inexact_from == 0
    some = Played(made, {}, stages=4, recovery=plus, saved=unswapped, **made_with)
    assert some.end.inexact_from == 3


def test_nobody_in_the_pool(made: Any) -> None:
    played = Played(made, {"p1": 3}, peers=3, recovery=recovery("neighbour"))
    assert played.end.phase == FAILED
    assert "not made anew from its neighbours: nobody in the pool" in played.end.reason.text


def test_checkpoints_say_from_which_step_on_they_are_inexact(made: Any) -> None:
    ladder = recovery("neighbour")
    played = Played(made, {"p1": 4}, recovery=ladder, output={"every": 3})
    found = [e.checkpoint for e in played.events if e.HasField("checkpoint")]
    assert (found[0].step, found[-1].step) == (3, 7)
    assert all(c.inexact_from == (4 if c.step >= 4 else 0) for c in found)


def test_a_snapshot_comes_first(made: Any) -> None:
    played = Played(made, {"p1": 4}, recovery=recovery("snapshot", "neighbour"))
    assert played.end.phase == DONE
    assert played.end.inexact_from == 0, played.notes
    assert played.losses == pytest.approx(plain(made, -1), rel=1e-5)


def test_two_losses_at_different_steps(made: Any) -> None:
    played = Played(made, {"p1": 2, "p3": 5}, peers=5, recovery=recovery("neighbour"))
    assert played.end.phase == DONE, played.notes
    assert played.end.inexact_from == 2
    assert len(played.losses) == STEPS


def test_ghosts_do_the_same(made: Any) -> None:
    calm = Played(made, {}, recovery=recovery("neighbour"), ghosts=True)
    played = Played(made, {"p1": 4}, recovery=recovery("neighbour"), ghosts=True)
    assert played.end.phase == DONE, played.notes
    assert played.end.inexact_from == 4
    assert played.losses[:4] == calm.losses[:4]
    assert played.losses[4:] != calm.losses[4:]


def test_it_may_die_at_any_moment(made: Any) -> None:
    """Whatever comes of it is said: made anew at the step that was not done, or, where somebody has
    applied that step already, from the start."""
    rungs = _dies_at(made, range(0, 176, 35))
    assert rungs["neighbour"] > rungs["checkpoint"], rungs


@pytest.mark.slow
def test_it_may_die_at_every_moment(made: Any) -> None:
    rungs = _dies_at(made, range(176))
    assert rungs["neighbour"] > rungs["checkpoint"], rungs


def _dies_at(made: Any, moments: Iterable[int]) -> dict[str, int]:
    """`moments`: so many records of the world after step 2 was committed; ghosts."""
    rungs = {"neighbour": 0, "checkpoint": 0}
    for moment in moments:
        after = itertools.count()
        played = Played(
            made,
            {"p1": 2},
            recovery=recovery("neighbour", "checkpoint"),
            ghosts=True,
            at=lambda seen, n=moment, after=after: next(after) >= n,  # type: ignore[misc]
        )
        assert played.end.phase == DONE, (moment, played.notes)
        assert len(played.losses) == STEPS
        if played.end.inexact_from:
            rungs["neighbour"] += 1
            assert "made anew from the blocks" in played.notes, moment
        else:
            rungs["checkpoint"] += 1
            assert "has other updates" in played.notes, (moment, played.notes)
    return rungs
