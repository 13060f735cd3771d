"""A holder leaves in good order: its part is handed over, and no step is done twice.

The oracle is the same world in which nobody leaves: losses, norms, evaluations and exported weights
must be the same, bit for bit. Moments are numbered by the records of the world, events and
instructions, as in test_recovery.py; a sample of them is tried here, one of each
kind with `-m slow`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from shoal.dag.plan.plan import PeerId, Plan, StageSlot, Visit
from shoal.dag.schedule.convert_plan import plan_to_proto
from shoal.dag.schedule.schedule import Action, Kind
from shoal.job import Job
from shoal.peer.core import events as p
from shoal.proto import broker_pb2
from shoal.proto.broker_pb2 import DONE
from shoal.sim.monitor.monitor import Monitor
from shoal.sim.virtual.clock import Observed
from shoal.sim.virtual.orders import Orders
from shoal.sim.virtual.world import PeerSpec, World
from shoal.tests.sim.played import Played, kind_of, sampled_by_kind

STEPS = 8
JOB: dict[str, Any] = {
    "version": 1,
    "name": "handing",
    "model": {
        "factory": "shoal.examples.gpt:gpt",
        "args": {"layers": 1, "width": 8, "heads": 1, "length": 8, "dropout": 0.1},
    },
    "data": {"kind": "text", "length": 8},
    "train": {
        **{"steps": STEPS, "batch": 4, "microbatch": 2, "lr": 1e-2},
        **{"eval_every": 2, "eval_batches": 1},
    },
}
SAMPLE = 8

Act = Callable[[World], None]


@dataclass
class Handed(Played):
    """`begun`: the record at which the first step began."""

    moments: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    computed: Counter[tuple[int, Action]] = field(default_factory=Counter)
    """How often each forward and backward of each step was begun, by whomever."""

    @property
    def again(self) -> list[tuple[int, str]]:
        """Actions that were begun more than once."""
        return [(step, str(action)) for (step, action), n in self.computed.items() if n > 1]


class Lab:
    """Plays a job on p0, p1, … in a row, and spares, again and again."""

    def __init__(
        self, laboratory: Any, stages: int = 2, flops: float = 1e10, **tables: Any
    ) -> None:
        """`tables`: in place of the job's; they must not change the model. `flops`: per second, of
        each peer."""
        self.laboratory = laboratory(Job.from_table(JOB))
        self.orders = Orders()
        n = len(self.laboratory.graph.operators)
        peers = [PeerId(f"p{i}") for i in range(stages)]
        cuts = [i * n // stages for i in range(stages + 1)]
        slots = tuple(StageSlot(a, b, (q,)) for a, b, q in zip(cuts, cuts[1:], peers, strict=False))
        routes = (tuple(Visit(i, q) for i, q in enumerate(peers)),) * 2
        plan = Plan(slots, routes, 2, evaluation_routes=routes)
        self.spec = broker_pb2.RunSpec()
        self.spec.CopyFrom(self.laboratory.spec)
        self.spec.plan.CopyFrom(plan_to_proto(plan))
        job = Job.from_table(json.loads(self.spec.job) | tables)
        self.spec.job, self.spec.steps = job.to_json(), job.train.steps or 0
        self.stages, self.flops = stages, flops
        self.calm = self.play()
        assert self.calm.end.phase == DONE
        assert not self.calm.again

    def play(
        self,
        acts: dict[int, Act] | None = None,
        spares: int = 1,
        specs: dict[str, dict[str, Any]] | None = None,
    ) -> Handed:
        """acts: by number of the record, what happens there."""
        names = [f"p{i}" for i in range(self.stages + spares)]
        also_said = specs or {}
        peers = [PeerSpec(name=n, flops_per_s=self.flops, **also_said.get(n, {})) for n in names]
        world = self.laboratory.world(peers, log=False, control_latency_s=0.002)
        world.orders = self.orders
        monitor = Monitor(world)
        world.until(lambda: len(world.broker.machine.members.pool) == len(peers))
        run = world.submit(self.spec)
        played = Handed(world, run)
        also = world.observe

        def observe(seen: Observed) -> None:
            also(seen)
            if run in world.broker.ended:
                return
            played.records += 1
            played.moments.append(f"{seen.who} {type(seen.record).__name__}")
            played.kinds.append(kind_of(seen))
            if isinstance(seen.record, p.Compute):
                played.begun = played.begun or played.records
                if seen.record.action.kind in (Kind.FORWARD, Kind.BACKWARD):
                    played.computed[seen.record.step, seen.record.action] += 1
            if act := (acts or {}).get(played.records):
                act(world)

        world.observe = observe
        monitor.finish(run, 3600.0)
        return played

    def assert_same(self, played: Handed, where: str = "") -> None:
        played.assert_like(self.calm, where)

    def assert_nothing_again(self, played: Handed, where: str = "") -> None:
        self.assert_same(played, where)
        assert not played.again, f"{where}: {played.notes}"


def leave(*names: str) -> Act:
    """Their owners stop them, behind the record that is being handled."""

    def act(world: World) -> None:
        for name in names:
            if world.peers[name].alive:
                world.after(0.0, partial(world.leave, name))

    return act


@pytest.fixture(scope="module")
def made(laboratory: Any, plans_once: None) -> Any:
    return partial(Lab, laboratory)


@pytest.fixture(scope="module")
def lab(made: Any) -> Lab:
    return made()


def sampled(played: Handed, part: int = 0, parts: int = 1) -> range:
    """Every so manieth record of the training, each part other ones."""
    every = max(parts, (played.records - played.begun) * parts // SAMPLE)
    return range(played.begun + part * every // parts, played.records, every)


@pytest.mark.parametrize("name", ["p0", "p1"])
def test_it_may_leave_at_any_moment(lab: Lab, name: str) -> None:
    handed = 0
    for at in sampled(lab.calm, int(name[1]), 2):
        played = lab.play({at: leave(name)})
        lab.assert_nothing_again(played, f"{name} at {at} ({lab.calm.moments[at - 1]})")
        handed += "hands over at step" in played.notes
    assert handed > SAMPLE // 4


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["p0", "p1", "p2"])
def test_it_may_leave_at_every_kind_of_moment(lab: Lab, name: str) -> None:
    """For each, 150 of about 1,100 moments: one of each kind."""
    begun = lab.calm.begun
    for i in sampled_by_kind(lab.calm.kinds[begun - 1 :], 1, turn=int(name[1])):
        at = begun + i
        played = lab.play({at: leave(name)})
        lab.assert_nothing_again(played, f"{name} at {at} ({lab.calm.moments[at - 1]})")


def test_two_may_leave_at_once(lab: Lab) -> None:
    """With a spare for each."""
    for at in sampled(lab.calm, 1, 4):
        played = lab.play({at: leave("p0", "p1")}, spares=2)
        lab.assert_nothing_again(played, f"at {at} ({lab.calm.moments[at - 1]})")


def test_a_leaver_may_die_while_it_hands_over(lab: Lab) -> None:
    at = lab.calm.begun + (lab.calm.records - lab.calm.begun) // 3
    left = lab.play({at: leave("p1")})
    assert "hands over" in left.notes
    for later in range(at + 20, left.records, max(1, (left.records - at) // 4)):
        played = lab.play({at: leave("p1"), later: lambda world: world.kill("p1")})
        lab.assert_same(played, f"killed at {later} ({left.moments[later - 1]})")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_another_may_die_while_one_hands_over(lab: Lab) -> None:
    at = lab.calm.begun + (lab.calm.records - lab.calm.begun) // 3
    left = lab.play({at: leave("p1")}, spares=3)
    for name in ("p0", "p2"):
        for later in range(at + 1, left.records, max(1, (left.records - at) // 4)):
            kill = partial(World.kill, name=name)
            played = lab.play({at: leave("p1"), later: kill}, spares=3)
            lab.assert_same(played, f"{name} at {later} ({left.moments[later - 1]})")


def test_a_run_of_one_stage_is_handed_over(made: Any) -> None:
    lab = made(stages=1, flops=1e6)
    played = lab.play({(lab.calm.begun + lab.calm.records) // 2: leave("p0")})
    lab.assert_nothing_again(played)
    assert "hands over" in played.notes


@pytest.mark.parametrize(
    "codec", ["delta+topk:ratio=4", pytest.param("topk:ratio=4", marks=pytest.mark.slow)]
)
def test_codecs_with_a_memory_are_handed_over(made: Any, codec: str) -> None:
    lab = made(codec={"activation": codec, "activation_grad": codec})
    at = lab.calm.begun + (lab.calm.records - lab.calm.begun) // 3
    played = lab.play({at: leave("p0")})
    lab.assert_nothing_again(played)
    assert "hands over" in played.notes


def test_without_anybody_who_takes_the_part_it_leaves_after_its_step(made: Any) -> None:
    """The run waits for another peer, which begins with what is left: nothing."""
    lab = made(stages=1, flops=1e5)
    told: list[str] = []

    def watch(world: World) -> None:
        leave("p0")(world)
        world.after(30.0, lambda: world.join(PeerSpec(name="p9", flops_per_s=1e5)))
        also = world.observe

        def observe(seen: Observed) -> None:
            assert also is not None
            also(seen)
            if isinstance(seen.record, p.ShowWaiting):
                told.append(seen.record.what)

        world.observe = observe

    at = lab.calm.begun + (lab.calm.records - lab.calm.begun) // 4
    played = lab.play({at: watch}, spares=0)
    lab.assert_same(played)
    assert told == [
        "the broker to say who takes its part",
        "the end of the step: nobody who stays can keep its snapshot",
    ]
    assert "it said goodbye (the owner stopped it)" in played.notes


def test_where_no_single_peer_takes_the_part_the_rest_is_planned_anew(lab: Lab) -> None:
    """Behind the same step; another cut adds up in another order."""
    at = lab.calm.begun + (lab.calm.records - lab.calm.begun) // 3
    played = lab.play({at: leave("p1")}, spares=0)
    assert played.end.phase == DONE
    assert not [which for which, n in played.computed.items() if n > 1 and which[1].stage == 0]
    steps = [e.step.step for e in played.world.events(played.run) if e.HasField("step")]
    assert steps == list(range(STEPS))
    assert "hands over" in played.notes
    losses = [e.step.outcome.loss for e in played.world.events(played.run) if e.HasField("step")]
    calm = [e.step.outcome.loss for e in lab.calm.world.events(lab.calm.run) if e.HasField("step")]
    assert losses == pytest.approx(calm, rel=1e-5)


def test_a_part_is_handed_over_before_its_holder_means_to_leave(lab: Lab) -> None:
    """p1 said how long it stays: somebody who stays has its part by then."""
    done = [e.at_s for e in lab.calm.world.events(lab.calm.run) if e.HasField("step")]
    played = lab.play(specs={"p1": {"stays_s": done[STEPS // 2]}})
    lab.assert_nothing_again(played)
    assert "hands over" in played.notes
    assert "p2 (warm)" in played.notes


def test_who_stays_is_used_first(lab: Lab) -> None:
    """Both spares could keep copies; p2, which came first, leaves before the run is over."""
    at = lab.calm.begun + (lab.calm.records - lab.calm.begun) // 3
    stays = 0.9 * lab.calm.world.now
    played = lab.play({at: leave("p1")}, spares=2, specs={"p2": {"stays_s": stays}})
    lab.assert_same(played)
    assert "-> p3" in played.notes


def test_a_stream_that_breaks_and_comes_back_costs_no_recovery(lab: Lab) -> None:
    """The links with its neighbours hold all the while, so its process is alive."""
    for name in ("p0", "p1"):
        at = lab.calm.begun + (lab.calm.records - lab.calm.begun) // 3
        cut = partial(World.cut, name=name)
        played = lab.play({at: cut, at + 200: cut})
        lab.assert_nothing_again(played, name)
        assert played.end.term == 1, played.notes
