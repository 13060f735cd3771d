"""Ghosts: any plan of a job gives the hashes of the plain loop, and every mistake changes them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.dag.cost.cost import OperatorCost
from shoal.dag.cost.speed import Work
from shoal.dag.exchange.collectives import SUMS
from shoal.dag.ir.graph import (
    Buffer,
    BufferUpdate,
    Graph,
    Input,
    Operator,
    Output,
    Parameter,
    Ref,
    TensorSpec,
)
from shoal.dag.plan.action import ExchangeContent
from shoal.dag.plan.cut import cut
from shoal.dag.plan.plan import PeerId, Plan, StageExchange, StageSlot, Visit
from shoal.dag.plan.plan_slice import PlanSlice
from shoal.dag.schedule.flow import Role
from shoal.dag.schedule.schedule import Action, Kind, listed
from shoal.job import Job, Train
from shoal.net.links.frame import Arrived, FrameKey
from shoal.net.links.messages import (
    Ack,
    Announcement,
    Chunk,
    Credit,
    FrameHeader,
    Partial,
    encoded,
    size_of,
)
from shoal.peer.compute.order import BuildOrder
from shoal.sim.ghost.device import GhostDevice, Ghosts, hollow
from shoal.sim.ghost.hashes import Expected, expected
from shoal.sim.ghost.plan import Shards
from shoal.sim.virtual.world import PeerSpec
from shoal.tests.dag.schedule.checker import check
from shoal.tests.sim.played import read_export

SPEC = TensorSpec((4, 3), "float32")
SEED, STEPS, MICROBATCHES, HELD_OUT = 7, 4, 4, 2


def operator(name: str, *reads: str, grad: bool = True) -> Operator:
    args = tuple(Ref(v) for v in reads)
    return Operator(name, f"test.{name}.default", args, (), (Output(SPEC, grad),))


def graph_of() -> Graph:
    """A chain with a skip, a tied and a frozen parameter, statistics, a weight that is made early
    and a metric that is made behind the loss."""
    return Graph(
        inputs=(Input("x", SPEC), Input("y", SPEC)),
        parameters=(
            *(Parameter(f"w{i}", SPEC) for i in range(5)),
            Parameter("tied", SPEC),
            Parameter("frozen", SPEC, trainable=False),
        ),
        buffers=(
            Buffer("mean", SPEC, update=BufferUpdate("ema", "statistic", 0.1)),
            Buffer("table", SPEC),
        ),
        operators=(
            operator("count", "in:y", grad=False),
            operator("embed", "in:x", "param:tied"),
            operator("a", "embed", "param:w0"),
            operator("statistic", "a", "buffer:mean", grad=False),
            operator("b", "a", "param:w1", "buffer:table"),
            operator("c", "embed", "b", "param:w2"),
            operator("d", "c", "param:frozen", "param:w3"),
            operator("e", "d", "a", "param:w3"),
            operator("head", "e", "param:tied", "param:w4"),
            operator("loss", "head", "in:y", "count"),
            operator("right", "head", "in:y", grad=False),
        ),
        loss="loss",
        weight="count",
        metrics=(("right", "right"),),
        batch=4,
    )


GRAPH = graph_of()
N = len(GRAPH.operators)
WANTED = expected(GRAPH, SEED, STEPS, MICROBATCHES, eval_every=2, held_out=HELD_OUT)


def plan_of(rng: random.Random, stages: int) -> Plan:
    """Cut anywhere, 1 to 4 holders of each stage, microbatches on routes of their own."""
    cuts = sorted(rng.sample(range(1, N), stages - 1))
    bounds = [0, *cuts, N]
    names = [PeerId(f"p{i}") for i in range(6)]
    slots = tuple(
        StageSlot(bounds[i], bounds[i + 1], tuple(rng.sample(names, rng.randint(1, 4))))
        for i in range(stages)
    )

    def route() -> tuple[Visit, ...]:
        return tuple(Visit(i, rng.choice(slot.holders)) for i, slot in enumerate(slots))

    return Plan(
        stages=slots,
        routes=tuple(route() for _ in range(MICROBATCHES)),
        microbatch_size=4,
        schedule=rng.choice(["gpipe", "1f1b"]),
        evaluation_routes=tuple(route() for _ in range(HELD_OUT)),
    )


def exchanged(plan: Plan, rng: random.Random) -> Plan:
    """Any collective among the holders of each stage."""
    exchanges = tuple(StageExchange(k, rng.choice(SUMS)) for k in range(len(plan.stages)))
    return replace(plan, exchanges=exchanges).validate(N)


def wide_plan(rng: random.Random, pipelines: int, collective: str) -> Plan:
    """Two stages, each held by as many peers as there are pipelines; microbatches anywhere."""
    cut = rng.randint(2, 8)  # both stages train something
    slots = tuple(
        StageSlot(a, b, tuple(PeerId(f"{name}{i}") for i in range(pipelines)))
        for name, a, b in (("p", 0, cut), ("q", cut, N))
    )
    lines = [rng.randrange(pipelines) for _ in range(MICROBATCHES + HELD_OUT)]
    routes = tuple(tuple(Visit(k, s.holders[i]) for k, s in enumerate(slots)) for i in lines)
    exchanges = tuple(StageExchange(k, collective) for k in range(2))
    plan = Plan(
        slots, routes[HELD_OUT:], 4, evaluation_routes=routes[:HELD_OUT], exchanges=exchanges
    )
    return plan.validate(N)


Meddle = Callable[["Cluster", PeerId, int, Action], bool]
"""Called before an action; True: it was done, wrongly."""


class Cluster:
    """Ghosts without machines or network: actions in an order that works, frames handed over."""

    def __init__(self, plan: Plan) -> None:
        # Operators of our own cannot be tried, and what they take matters to nobody here.
        ghosts = Ghosts(lambda graph: [OperatorCost(Work(), Work(), 0, 0)] * len(graph.operators))
        graph = GRAPH.bind(plan.microbatch_size)
        plan = listed(plan, cut(graph, [(s.start, s.stop) for s in plan.stages]))
        self.plan = plan
        train = Train(steps=STEPS, batch=16, microbatch=4, eval_every=2)
        self.orders = {
            p: BuildOrder(
                run="r",
                term=1,
                peer=p,
                slice=PlanSlice(p, plan, (), (), (), 0),
                graph=GRAPH,
                weights={},
                manifest=cast(Any, None),
                training=cast(Any, SimpleNamespace(seed=SEED, train=train, rounds=None)),
                shard=cast(Any, None),
            )
            for p in plan.peers
        }
        self.shared = ghosts.plan(self.orders[plan.peers[0]])
        self.flow = self.shared.flow
        self.devices: dict[PeerId, GhostDevice] = {p: ghosts() for p in plan.peers}
        for p, device in self.devices.items():
            device.build(self.orders[p])

    def run(self, meddle: Meddle = lambda *_: False) -> Expected:
        found = Expected()
        stages, tied = self.shared.stages, self.shared.tied
        lists = {p: self.flow.actions(p) for p in self.plan.peers}
        training = check(self.plan, stages, tied, lists).order
        lists = {p: self.flow.evaluation_actions(p) for p in self.plan.peers}
        evaluating = check(self.plan, stages, tied, lists).order
        for step in range(STEPS):
            rounds = [training, evaluating] if step % 2 else [training]
            for peer, action in (x for part in rounds for x in part):
                result = None
                if not meddle(self, peer, step, action):
                    result = self.devices[peer].compute(step, action)
                self._after(peer, step, action)
                if result is not None and result.outcome:
                    found.losses.append(result.outcome.loss)
                if result is not None and result.evaluation:
                    found.evaluations.append(result.evaluation.loss)
        found.weights = read_export(d.export() for d in self.devices.values())
        return found

    def key(self, step: int, transfer: Any) -> FrameKey:
        return FrameKey("r", 1, step, *transfer)

    def _after(self, peer: PeerId, step: int, action: Action) -> None:
        for t in self.flow.takes(peer, action):
            self.devices[peer].release(self.key(step, t))
        for t in self.flow.gives(peer, action):
            if not t.is_local:
                key = self.key(step, t)
                payload = self.devices[peer].payload(key)
                size = payload.size_bytes
                assert size == payload.spec.size_bytes, "raw frames weigh what tensors do"
                data, (sent,) = hollow(size), payload.buffers
                data[: size // 2] = sent[: size // 2]
                data[size // 2 : size] = sent[size // 2 : size]
                arrived = Arrived(key, payload.codec, b"", payload.spec, data)
                self.devices[t.destination].accept(arrived)

    def held(self, peer: PeerId, stage: int) -> Any:
        work = self.devices[peer]._work
        assert work is not None
        return work.held[stage]


@settings(max_examples=60, deadline=None)
@given(stages=st.integers(1, N), seed=st.integers(0, 2**32))
def test_any_plan_gives_the_hashes_of_the_plain_loop(stages, seed):
    rng = random.Random(seed)
    found = Cluster(exchanged(plan_of(rng, stages), rng)).run()
    assert found == WANTED
    assert len(set(found.losses)) == STEPS


@settings(max_examples=12, deadline=None)
@given(pipelines=st.integers(9, 17), seed=st.integers(0, 2**32))
def test_many_holders_give_the_hashes_of_the_plain_loop(pipelines, seed):
    rng = random.Random(seed)
    assert Cluster(wide_plan(rng, pipelines, rng.choice(SUMS))).run() == WANTED


@pytest.mark.parametrize(
    ("collective", "text", "port"),
    [
        ("two-level", "+1@grad1", "grad1/0-1"),
        ("two-level", "+2@grad1", "grad1/1-2"),
        ("two-level", "*3@grad1", "grad1/2-3"),
        ("ring", "+4@grad1", "grad1/3-4"),
        ("tree", "+2@grad1", "grad1/1-2"),
    ],
)
def test_a_part_that_is_lost_on_its_way_changes_losses_and_weights(collective, text, port):
    plan = wide_plan(random.Random(1), 10, collective)
    # Who runs no microbatch has nothing to lose, and nobody sees its weights.
    running = {visit.peer for route in plan.routes for visit in route}
    lost_by: list[PeerId] = []

    def lost(cluster: Cluster, peer: PeerId, step: int, action: Action) -> bool:
        if (step, action) == (1, Action.parse(text)) and peer in running and not lost_by:
            there = cluster.devices[peer]._work.store[step]
            for key in [k for k, v in there.items() if k[2] == port and np.any(v)][:1]:
                there[key] = np.zeros_like(there[key])
                lost_by.append(peer)
        return False

    assert Cluster(plan).run() == WANTED
    wrong = Cluster(plan).run(lost)
    assert lost_by
    assert wrong.losses[0] == WANTED.losses[0]
    assert wrong.losses[-1] != WANTED.losses[-1]


def test_the_loop_reads_seed_step_and_microbatch():
    other = expected(GRAPH, SEED + 1, STEPS, MICROBATCHES)
    fewer = expected(GRAPH, SEED, STEPS, MICROBATCHES - 1)
    assert other.losses[0] != WANTED.losses[0] != fewer.losses[0]
    assert WANTED.weights["param:frozen"] == expected(GRAPH, SEED, 1, 1).weights["param:frozen"]
    assert WANTED.weights["buffer:mean"] != expected(GRAPH, SEED, 1, 4).weights["buffer:mean"]


# ---------------------------------------------------------------- mistakes


def fixed_plan() -> Plan:
    """Three stages, two holders of the middle one."""
    names = [PeerId(x) for x in "abcd"]
    slots = (
        StageSlot(0, 4, (names[0],)),
        StageSlot(4, 7, (names[1], names[2])),
        StageSlot(7, N, (names[3],)),
    )
    routes = tuple(
        (Visit(0, names[0]), Visit(1, names[1 + m % 2]), Visit(2, names[3]))
        for m in range(MICROBATCHES)
    )
    return Plan(slots, routes, 4, evaluation_routes=routes[:HELD_OUT])


def at(kind: Kind, peer: str, microbatch: int = 0, stage: int = 1) -> Callable[..., bool]:
    def here(p: PeerId, step: int, action: Action) -> bool:
        return (p, step, action.kind) == (peer, 1, kind) and (
            kind not in (Kind.FORWARD, Kind.BACKWARD)
            or (action.microbatch, action.stage) == (microbatch, stage)
        )

    return here


def applied_twice(cluster: Cluster, peer: PeerId, step: int, action: Action) -> bool:
    if at(Kind.BACKWARD, "b", 2)(peer, step, action):
        held = cluster.held(peer, 1)
        before = held.gradients.copy()
        cluster.devices[peer].compute(step, action)
        held.gradients += held.gradients - before
        return True
    return False


def left_out(cluster: Cluster, peer: PeerId, step: int, action: Action) -> bool:
    if at(Kind.BACKWARD, "b", 2)(peer, step, action):
        held = cluster.held(peer, 1)
        before = held.gradients.copy()
        cluster.devices[peer].compute(step, action)
        held.gradients[:] = before
        return True
    return False


def samples_of_another_step(cluster: Cluster, peer: PeerId, step: int, action: Action) -> bool:
    if at(Kind.FORWARD, "a", 3, 0)(peer, step, action):
        device = cluster.devices[peer]
        device.compute(step - 1, action)
        work = device._work
        work.store[step] |= work.store.pop(step - 1)
        return True
    return False


def swapped_microbatches(cluster: Cluster, peer: PeerId, step: int, action: Action) -> bool:
    if at(Kind.BACKWARD, "b", 0)(peer, step, action):
        live = cluster.held(peer, 1).live
        if 2 in live:
            live[0], live[2] = live[2], live[0]
        else:
            live[0] = live[0] + np.uint64(1)
    return False


def stale_weights(cluster: Cluster, peer: PeerId, step: int, action: Action) -> bool:
    if at(Kind.UPDATE, "c")(peer, step, action):
        held = cluster.held(peer, 1)
        old = held.state.copy()
        cluster.devices[peer].compute(step, action)
        held.state[:] = old
        return True
    return False


def a_step_updated_twice(cluster: Cluster, peer: PeerId, step: int, action: Action) -> bool:
    if at(Kind.UPDATE, "a")(peer, step, action):
        cluster.held(peer, 0).update(cluster.devices[peer]._work.total)
    return False


def a_lost_shard(cluster: Cluster, peer: PeerId, step: int, action: Action) -> bool:
    if at(Kind.REDUCE, "c")(peer, step, action) and action.content is ExchangeContent.GRADIENT:
        there = cluster.devices[peer]._work.store[step]
        key = next(k for k in there if k[2] == "grad1/0-1" and k[3] == "b")
        there[key] = np.zeros_like(there[key])
    return False


@pytest.mark.parametrize(
    "mistake",
    [
        applied_twice,
        left_out,
        samples_of_another_step,
        swapped_microbatches,
        stale_weights,
        a_step_updated_twice,
        a_lost_shard,
    ],
)
def test_a_mistake_changes_losses_and_weights(mistake):
    assert Cluster(fixed_plan()).run() == WANTED
    wrong = Cluster(fixed_plan()).run(mistake)
    assert wrong.losses[0] == WANTED.losses[0]
    assert wrong.losses[-1] != WANTED.losses[-1]
    assert all(
        (wrong.weights[n] == w) == (n in ("param:frozen", "buffer:table"))
        for n, w in WANTED.weights.items()
        if n != "buffer:mean"
    )


# ---------------------------------------------------------------- shards and sizes


@given(st.integers(1, 30), st.integers(2, 40), st.integers(0, 2**32))
def test_shards_put_together_are_the_sum(parameters, holders, seed):
    rng = np.random.default_rng(seed)
    gradients = rng.integers(0, 2**64, (3, parameters), dtype=np.uint64)
    shards = Shards(parameters, holders)
    cut = [shards.cut(g) for g in gradients]
    sums = [sum(part[b] for part in cut[1:]) + cut[0][b] for b in range(holders)]
    assert (shards.join(sums) == gradients.sum(0, dtype=np.uint64)).all()
    assert all(len(part) for part in sums), "no shard is empty"


@given(st.data())
def test_the_size_of_a_record_is_that_of_its_bytes(data):
    number = st.one_of(st.integers(0, 300), st.integers(0, 2**40))
    name = st.text(st.characters(codec="utf-8"), min_size=1, max_size=150)
    key = FrameKey(
        data.draw(name),
        data.draw(number),
        data.draw(number),
        data.draw(st.sampled_from(list(Role))),
        data.draw(st.integers(0, 2**31)),
        data.draw(st.integers(0, 300)),
        *(data.draw(name) for _ in range(3)),
    )
    spec = TensorSpec(tuple(data.draw(st.lists(st.integers(0, 2**20), max_size=5))), "float32")
    absent = data.draw(st.booleans())
    header = FrameHeader(
        data.draw(number), key, data.draw(name), data.draw(st.binary(max_size=200)), spec, 0, absent
    )
    view = memoryview(bytes(data.draw(st.integers(1, 99))))
    piece = Chunk(3, 5, view.nbytes, (view,))
    for message in (
        Announcement(header, None),
        Announcement(header, piece),
        header,
        Ack(data.draw(number)),
        Credit(Role.SYNC, data.draw(number)),
        Partial(data.draw(number), data.draw(number)),
        piece,
    ):
        assert size_of(message) == sum(len(part) for part in encoded(message))


# ---------------------------------------------------------------- in the world

JOB = Job.from_table(
    {
        "version": 1,
        "name": "ghost",
        "model": {
            "factory": "shoal.examples.gpt:gpt",
            "args": {"layers": 2, "width": 16, "heads": 2, "length": 16, "dropout": 0.0},
        },
        "data": {"kind": "text", "length": 16, "holdout": 0.0},
        "train": {"steps": 3, "batch": 8, "microbatch": 2, "lr": 1e-2},
        "recovery": {"ladder": []},  # a ghost's snapshot weighs what its tensors do, no headers
    }
)


def test_a_world_of_ghosts_is_exact_and_takes_the_time_of_real_tensors(laboratory):
    lab = laboratory(JOB)
    worlds = [
        lab.world(2),
        lab.world([PeerSpec(name=f"p{i}") for i in range(2)], device=Ghosts()),
        lab.world([PeerSpec(name=f"q{i}") for i in range(3)], device=Ghosts()),
    ]
    ends = [w.finish(w.submit(lab.spec)) for w in worlds]
    real, ghost, other = ([e.step for e in events if e.HasField("step")] for events in ends)
    wanted = expected(lab.graph.bind(2), JOB.seed, 3, 4)
    for world, events, steps in zip(worlds[1:], ends[1:], (ghost, other), strict=True):
        assert [s.outcome.loss for s in steps] == wanted.losses
        files = [e.weights.files for e in events if e.HasField("weights")][-1]
        assert read_export(world.blobs[f.blob.hash] for f in files) == wanted.weights
    # The same frames of the same sizes: the modelled network carries what tensors would be.
    assert [s.sent_bytes for s in ghost] == [s.sent_bytes for s in real]
    assert [s.seconds for s in ghost] == pytest.approx([s.seconds for s in real])
