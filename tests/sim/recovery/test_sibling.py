"""A holder dies whose stage another one holds, too: that one does its microbatches.

The oracle is the same world without a death; committed steps are not done again. Moments of death
are numbered by the records of the world, as in test_recovery.py.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.broker.recovery.sibling import rerouted, rerouted_pairs
from shoal.dag.plan.cut import bare_stages
from shoal.dag.plan.plan import PeerId, Plan, StageSlot, Visit
from shoal.dag.schedule.convert_plan import plan_to_proto
from shoal.dag.schedule.schedule import check_listed
from shoal.job import Job
from shoal.peer.core import events as p
from shoal.proto.broker_pb2 import DONE, RunEvent, RunSpec
from shoal.sim.monitor.monitor import Monitor
from shoal.sim.virtual.clock import Observed
from shoal.sim.virtual.orders import Orders
from shoal.sim.virtual.world import World
from shoal.tests.broker.conftest import chain_outline
from shoal.tests.sim.played import kind_of, sampled_by_kind

STEPS = 6
JOB: dict[str, Any] = {
    "version": 1,
    "name": "sibling",
    "model": {
        "factory": "shoal.examples.gpt:gpt",
        "args": {"layers": 1, "width": 8, "heads": 1, "length": 8, "dropout": 0.1},
    },
    "data": {"kind": "text", "length": 8},
    "plan": {"scheduler": "uniform"},
    "train": {
        **{"steps": STEPS, "batch": 8, "microbatch": 2, "lr": 1e-2},
        **{"eval_every": 2, "eval_batches": 1},
    },
}
HOLDERS = (("p0", "p1"), ("p2", "p3"))
SAMPLE = 6


def plan_of(operators: int) -> Plan:
    """Two pipelines over two stages, four microbatches."""
    half = operators // 2
    slots = tuple(
        StageSlot(a, b, tuple(map(PeerId, holders)))
        for (a, b), holders in zip(((0, half), (half, operators)), HOLDERS, strict=True)
    )
    routes = tuple(
        (Visit(0, PeerId(HOLDERS[0][m % 2])), Visit(1, PeerId(HOLDERS[1][m % 2]))) for m in range(4)
    )
    return Plan(slots, routes, 2, evaluation_routes=routes)


@dataclass
class Played:
    world: World
    events: list[RunEvent]
    records: int
    begun: int
    computed: list[tuple[str, int, int]] = field(default_factory=list)
    """(who, term, step) of every action."""
    kinds: list[str] = field(default_factory=list)
    """Of each record."""

    @property
    def losses(self) -> list[float]:
        return [e.step.outcome.loss for e in self.events if e.HasField("step")]

    @property
    def steps(self) -> list[int]:
        return [e.step.step for e in self.events if e.HasField("step")]

    @property
    def reasons(self) -> str:
        return "\n".join(e.state.reason.text for e in self.events if e.HasField("state"))


class Lab:
    def __init__(self, laboratory: Any) -> None:
        self.lab = laboratory(Job.from_table(JOB))
        self.orders = Orders()
        self.spec = RunSpec()
        self.spec.CopyFrom(self.lab.spec)
        self.spec.plan.CopyFrom(plan_to_proto(plan_of(len(self.lab.graph.operators))))
        self.calm = self.play()

    def play(self, at: int = -1, name: str = "", **tables: Any) -> Played:
        world = self.lab.world(4, log=False)
        world.orders = self.orders
        spec = RunSpec()
        spec.CopyFrom(self.spec)
        spec.job = Job.from_table(json.loads(spec.job) | tables).to_json()
        monitor, also = Monitor(world, tolerance=1e-5), world.observe
        run = world.submit(spec)
        played = Played(world, [], 0, 0)

        def observe(seen: Observed) -> None:
            also(seen)
            if run in world.broker.ended:
                return
            played.records += 1
            played.kinds.append(kind_of(seen))
            record = seen.record
            if isinstance(record, p.Compute):
                played.begun = played.begun or played.records
                played.computed.append((seen.who, record.term, record.step))
            if played.records == at:
                world.kill(name)

        world.observe = observe
        played.events = monitor.finish(run, 3600.0)
        return played

    def assert_same(self, played: Played, where: object) -> None:
        assert played.events[-1].state.phase == DONE, f"{where}: {played.reasons}"
        assert played.steps == list(range(STEPS)), where
        assert played.losses == pytest.approx(self.calm.losses, rel=1e-5), where


@pytest.fixture(scope="module")
def lab(laboratory: Callable[..., Any], plans_once: None) -> Lab:
    return Lab(laboratory)


def moments(lab: Lab, count: int) -> list[int]:
    first, last = lab.calm.begun, lab.calm.records
    return [first + (last - first) * i // count for i in range(count)]


@pytest.mark.parametrize("name", ["p0", "p3"])
def test_one_may_die_at_any_moment(lab: Lab, name: str) -> None:
    _dies_at(lab, name, moments(lab, SAMPLE))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["p0", "p1", "p2", "p3"])
def test_one_may_die_at_every_kind_of_moment(lab: Lab, name: str) -> None:
    """By turns: of about 2,000 moments, one of each of 300 kinds."""
    begun = lab.calm.begun
    sample = sampled_by_kind(lab.calm.kinds[begun - 1 :], 1)
    _dies_at(lab, name, [begun + i for i in sample[int(name[1]) :: 4]])


def _dies_at(lab: Lab, name: str, records: Any) -> None:
    live = 0
    for at in records:
        played = lab.play(at, name)
        lab.assert_same(played, (name, at))
        if "siblings do" in played.reasons and "has other updates" not in played.reasons:
            live += 1
            again = {step for _, term, step in played.computed if term > 1}
            before = [e.step.step for e in played.events if e.HasField("step") and e.term == 1]
            assert not again & set(before), f"{at}: a committed step is done again"
    assert live, "nobody was replaced by a sibling"


def test_without_the_rung_it_goes_back_to_a_snapshot(lab: Lab) -> None:
    at = (lab.calm.begun + lab.calm.records) // 2
    played = lab.play(at, "p1", recovery={"ladder": ["snapshot", "checkpoint"]})
    lab.assert_same(played, at)
    assert "siblings do" not in played.reasons


# ---------------------------------------------------------------- plans


@given(st.data())
def test_a_rerouted_plan_is_whole_and_even(data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, 4))
    holders = [
        tuple(PeerId(f"p{k}.{i}") for i in range(data.draw(st.integers(1, 4))))
        for k in range(stages)
    ]
    count = data.draw(st.integers(1, 12))
    routes = tuple(
        tuple(Visit(k, data.draw(st.sampled_from(holders[k]))) for k in range(stages))
        for _ in range(count)
    )
    slots = tuple(StageSlot(k, k + 1, holders[k]) for k in range(stages))
    plan = Plan(slots, routes, 1, outline=chain_outline(stages))
    gone = data.draw(st.sets(st.sampled_from(plan.peers), min_size=1, max_size=3))
    found = rerouted(plan, gone)
    if any(set(h) <= gone for h in holders):
        assert found is None
        return
    assert found is not None
    found.validate(stages)
    check_listed(found, bare_stages(found))
    assert not set(found.peers) & gone
    for before, after in zip(plan.routes, found.routes, strict=True):
        assert all(a == b for a, b in zip(before, after, strict=True) if a.peer not in gone)
    pairs = [(a.peer, b.peer) for r in plan.routes for a, b in itertools.pairwise(r)]
    known = {frozenset(pair) for pair in rerouted_pairs(plan, pairs, gone)}
    for route in found.routes:
        for a, b in itertools.pairwise(route):
            assert frozenset((a.peer, b.peer)) in known
