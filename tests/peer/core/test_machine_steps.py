"""Whole steps of several machines over ghost devices, for random plans and orders of arrival."""

from __future__ import annotations

import hashlib
import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.dag.ir.graph import (
    Buffer,
    BufferUpdate,
    Graph,
    Operator,
    Output,
    Parameter,
    Ref,
    TensorSpec,
)
from shoal.dag.plan.cut import cut, tied_groups
from shoal.dag.plan.plan import PeerId, Plan, Route, StageSlot, Visit
from shoal.dag.schedule.flow import Flow, Transfer
from shoal.dag.schedule.replay import slots
from shoal.dag.schedule.schedule import Kind, listed
from shoal.net.links.frame import FrameKey
from shoal.peer.core import events as e
from shoal.peer.core.machine import PeerMachine
from shoal.proto import broker_pb2, common_pb2

RUN = "r-1"


def small_graph(rng: random.Random, operators: int = 8) -> Graph:
    """A random DAG of additions with skip edges, one tied parameter and one running buffer."""
    spec = TensorSpec((2, 3), "float32")
    made: list[Operator] = []
    for i in range(operators):
        earlier = [f"op{j}" for j in range(i)]
        reads = sorted(rng.sample(earlier, min(len(earlier), rng.choice((1, 1, 2)))))
        name = "tied" if i % 4 == 1 else f"w{i}"
        args = (*(Ref(v) for v in reads), Ref(f"param:{name}"))
        made.append(
            Operator(f"op{i}", "aten.add.Tensor", args, (), (Output(spec, True),), module=f"m{i}")
        )
    tail = tuple(Ref(f"op{j}") for j in range(operators))
    scalar = TensorSpec((), "float32")
    made.append(Operator("loss", "aten.mean.default", tail, (), (Output(scalar, True),)))
    names = dict.fromkeys("tied" if i % 4 == 1 else f"w{i}" for i in range(operators))
    return Graph(
        inputs=(),
        parameters=tuple(Parameter(n, spec) for n in names),
        buffers=(Buffer("mean", spec, update=BufferUpdate("ema", "op2", 0.1)),),
        operators=tuple(made),
        loss="loss",
        batch=2,
    )


def random_plan(
    rng: random.Random, operators: int, peers: int, microbatches: int, held_out: int = 0
) -> Plan:
    """Random cuts, holders (several per stage, several stages per peer) and routes."""
    stages = rng.randint(1, min(4, operators))
    cuts = [0, *sorted(rng.sample(range(1, operators), stages - 1)), operators]
    names = [PeerId(f"p{i}") for i in range(peers)]
    holders = [tuple(rng.sample(names, rng.randint(1, peers))) for _ in range(stages)]

    def route() -> Route:
        return tuple(Visit(i, rng.choice(h)) for i, h in enumerate(holders))

    return Plan(
        stages=tuple(StageSlot(cuts[i], cuts[i + 1], holders[i]) for i in range(stages)),
        routes=tuple(route() for _ in range(microbatches)),
        microbatch_size=2,
        schedule=rng.choice(("gpipe", "1f1b", "interleaved")),
        evaluation_routes=tuple(route() for _ in range(held_out)),
    ).validate(operators)


def flow_of(graph: Graph, plan: Plan) -> Flow:
    stages = cut(graph, [(s.start, s.stop) for s in plan.stages])
    return Flow(listed(plan, stages), stages, tied_groups(graph, stages))


def assign_of(plan: Plan, term: int = 1, run: str = RUN, me: str = "") -> broker_pb2.Assign:
    """What the broker sends to `me`: of each pair, the one named first in the plan dials."""
    order = list(plan.peers)
    later = order[order.index(PeerId(me)) + 1 :] if me in order else []
    return broker_pb2.Assign(
        run=run,
        term=term,
        slice={
            "plan": {
                "stages": [
                    broker_pb2.StageSlot(start=s.start, stop=s.stop, holders=s.holders)
                    for s in plan.stages
                ]
            }
        },
        dials=[broker_pb2.DialOrder(peer=p, address=f"{p}:1", generation=1) for p in later],
    )


def said(**kind: object) -> e.BrokerSaid:
    """A message of the broker, e.g. said(start=Start(...))."""
    return e.BrokerSaid(broker_pb2.BrokerMessage(**kind))  # type: ignore[arg-type]


def member(peer: PeerId) -> PeerMachine:
    """A machine in the pool, at time 0."""
    made = PeerMachine(peer, "boot", broker_pb2.Profile(device_memory_bytes=1000))
    made.handle(e.Started(), 0.0)
    made.handle(e.Attached(), 0.0)
    made.handle(said(welcome=broker_pb2.Welcome(broker="b", lease_s=9, heartbeat_s=3)), 0.0)
    return made


@dataclass
class GhostDevice:
    """Computes hashes in place of tensors: a value is the hash of what made it. It refuses to run
    an action whose inputs are not there, and to hold anything that nobody consumes."""

    flow: Flow
    peer: PeerId
    store: dict[FrameKey, str] = field(default_factory=dict)
    log: list[tuple[int, str]] = field(default_factory=list)

    def compute(self, order: e.Compute) -> e.Result:
        def key(t: Transfer) -> FrameKey:
            where = (t.role, t.microbatch, t.hop, t.port, t.source, t.destination)
            return FrameKey(order.run, order.term, order.step, *where)

        values = [self.store[key(t)] for t in self.flow.takes(self.peer, order.action)]
        for transfer in self.flow.gives(self.peer, order.action):
            # Not the peer: the value depends on what is computed, not on who does it.
            text = f"{order.step} {order.action} {transfer.port} {values}"
            assert key(transfer) not in self.store
            self.store[key(transfer)] = hashlib.sha256(text.encode()).hexdigest()
        self.log.append((order.step, str(order.action)))
        outcome = evaluation = None
        if str(order.action) == "<2@norm" and self.peer == self.flow.hub:
            digest = hashlib.sha256(repr(values).encode()).digest()
            loss = int.from_bytes(digest[:6], "big") / 2**48
            outcome = broker_pb2.Outcome(loss=loss, weight=len(values))
        if str(order.action) == "<2@eval":
            evaluation = broker_pb2.Evaluation(loss=0.5, weight=len(values))
        seconds = {Kind.FORWARD: 0.5, Kind.BACKWARD: 1.0, Kind.UPDATE: 2.0}
        took = seconds.get(order.action.kind, 0.25)
        return e.Result(seconds=took, outcome=outcome, evaluation=evaluation)


class World:
    """N machines with ghost devices and a broker of a few lines. `run` delivers what is on its way
    in a random order; only messages of one (sender, receiver, role) and results of one device keep
    their order, as the real shells promise."""

    def __init__(
        self, graph: Graph, plan: Plan, rng: random.Random, steps: int = 2, eval_every: int = 0
    ) -> None:
        self.flow = flow_of(graph, plan)
        self.plan = plan = self.flow.plan
        self.rng, self.steps, self.eval_every = rng, steps, eval_every
        self.now = 0.0
        self.machines = {p: member(p) for p in plan.peers}
        self.devices = {p: GhostDevice(self.flow, p) for p in plan.peers}
        self.reports: list[tuple[PeerId, broker_pb2.StepReport]] = []
        self.faults: list[broker_pb2.Fault] = []
        self.exported: dict[PeerId, int] = {}
        self.ready: list[PeerId] = []
        self.drained: list[PeerId] = []
        self.sent: dict[FrameKey, int] = {}
        self.slots = slots(plan, self.flow.stages, self.flow.tied)
        self.held = dict.fromkeys(self.slots, 0)
        self.lanes: dict[tuple[str, ...], deque[tuple[PeerId, e.Event]]] = {}
        for peer in plan.peers:
            self.post(("broker", peer), peer, said(assign=assign_of(plan, me=peer)))

    def post(self, lane: tuple[str, ...], peer: PeerId, event: e.Event) -> None:
        self.lanes.setdefault(lane, deque()).append((peer, event))

    def run(self) -> None:
        while True:
            lanes = [name for name, queue in self.lanes.items() if queue]
            if not lanes:
                return
            peer, event = self.lanes[self.rng.choice(lanes)].popleft()
            self.now += 0.01
            if isinstance(event, e.FrameArrived):  # the shell's part: into the device's store
                key = event.key
                self.devices[peer].store[key] = self.devices[PeerId(key.source)].store.pop(key)
            for instruction in self.machines[peer].handle(event, self.now):
                self.carry_out(peer, instruction)
            self.machines[peer].validate()

    def carry_out(self, peer: PeerId, instruction: e.Instruction) -> None:
        device = self.devices[peer]
        match instruction:
            case e.Dial(other):
                self.post(("link", peer, other), peer, e.LinkUp(other))
                self.post(("link", peer, other), other, e.LinkUp(peer))
            case e.Build(run, term):
                exports = tuple(i for i, s in enumerate(self.plan.stages) if s.holders[0] == peer)
                built = e.Built(run, term, self.flow, (), 10, self.steps, self.eval_every, exports)
                self.post(("device", peer), peer, built)
            case e.Prefetch(run, term, step):
                self.post(("data", peer), peer, e.DataReady(run, term, step))
            case e.Compute(run, term, step, action):
                result = device.compute(instruction)
                self.post(("device", peer), peer, e.Computed(run, term, step, action, result))
            case e.SendFrame(key):
                assert key in device.store
                self.sent[key] = self.sent.get(key, 0) + 1
                self.post(("device", peer), peer, e.FrameQueued(key, 100))
                link = PeerId(key.source), PeerId(key.destination), key.role
                self.held[link] += 1
                assert self.held[link] <= self.slots[link], f"{key} finds no receive slot"
                lane = ("frames", key.source, key.destination, key.role)
                self.post(lane, PeerId(key.destination), e.FrameArrived(key))
            case e.Release(key):
                device.store.pop(key, None)
                if key.source != key.destination:
                    self.held[PeerId(key.source), PeerId(key.destination), key.role] -= 1
            case e.UploadWeights(run, term, step):
                ref = common_pb2.BlobRef(hash=f"{step:064x}", size_bytes=1)
                self.post(("device", peer), peer, e.ExportedWeights(run, term, step, ref))
            case e.Tell(message):
                self.hear(peer, message)

    def hear(self, peer: PeerId, message: broker_pb2.PeerMessage) -> None:
        """The broker: all ready, then start; all exported, then leave."""
        kind = message.WhichOneof("kind")
        if kind == "fault":
            self.faults.append(message.fault)
        elif kind == "step":
            self.reports.append((peer, message.step))
        elif kind == "ready":
            self.ready.append(peer)
            if len(self.ready) == len(self.machines):
                for p in self.machines:
                    self.post(("broker", p), p, said(start=broker_pb2.Start(run=RUN, term=1)))
        elif kind == "drained":
            self.drained.append(peer)
        elif kind == "exported":
            self.exported[peer] = message.exported.step
        firsts = dict.fromkeys(s.holders[0] for s in self.plan.stages)
        everyone = len(self.reports) == self.steps * len(self.machines)
        if kind in ("exported", "step") and everyone and all(p in self.exported for p in firsts):
            for p in self.machines:
                self.post(("broker", p), p, said(leave=broker_pb2.Leave(run=RUN, term=1)))


def build(seed: int, **run: int) -> World:
    """A random world: graph, plan with 1 to 4 peers, 1 to 5 microbatches, 0 or 3 held out."""
    rng = random.Random(seed)
    graph = small_graph(rng)
    held_out = 3 * (run.get("eval_every", 0) > 0)
    sizes = rng.randint(1, 4), rng.randint(1, 5)
    return World(graph, random_plan(rng, len(graph.operators), *sizes, held_out), rng, **run)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), eval_every=st.sampled_from((0, 1, 2)))
def test_any_plan_runs_to_its_end_whatever_the_order_of_arrival(seed: int, eval_every: int) -> None:
    world = build(seed, steps=3, eval_every=eval_every)
    world.run()
    assert not world.faults, world.faults[0].reason.text
    for peer, device in world.devices.items():
        # Every holder reports every step, in order, and all are back in the pool.
        assert [r.step for p, r in world.reports if p == peer] == [0, 1, 2], world.machines
        assert world.machines[peer].assignment is None
        assert world.machines[peer].late_frames == 0
        assert device.store == {}, f"{peer} still holds {next(iter(device.store))}"
        # Actions ran in list order, step after step.
        expected = []
        for step in range(3):
            expected += [(step, str(a)) for a in world.flow.actions(peer)]
            if eval_every and ((step + 1) % eval_every == 0 or step == 2):
                expected += [(step, str(a)) for a in world.flow.evaluation_actions(peer)]
        assert device.log == expected
    assert set(world.sent.values()) <= {1}, "a frame was sent twice"
    assert sorted(world.drained) == sorted(world.machines)


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32))
def test_results_do_not_depend_on_the_order_of_arrival(seed: int) -> None:
    logs = []
    for order in (1, 2):
        world = build(seed, steps=2, eval_every=2)
        world.rng = random.Random(order)
        world.run()
        # The loss is a hash of all that the norm took, and so of all that any action took.
        logs.append(sorted((p, r.step, r.outcome.loss) for p, r in world.reports))
    assert logs[0] == logs[1]


def test_only_the_hub_reports_what_the_step_came_to() -> None:
    world = build(7, steps=2, eval_every=2)
    world.run()
    for peer, report in world.reports:
        hub = peer == world.flow.hub
        assert report.HasField("outcome") == hub
        assert report.HasField("evaluation") == (hub and report.step == 1)
        assert report.seconds > 0
        assert report.compute_s > 0


@pytest.mark.parametrize("seed", range(5))
def test_a_report_says_what_each_stage_took(seed: int) -> None:
    world = build(seed, steps=2, eval_every=1)
    world.run()
    for peer, report in world.reports:
        assert [t.stage for t in report.stages] == list(world.plan.stages_of(peer))
        for found in report.stages:
            ran = sum(route[found.stage].peer == peer for route in world.plan.routes)
            backward = ran * world.flow.stages[found.stage].has_backward
            assert (found.visits, found.forward_s, found.backward_s) == (ran, ran / 2, backward)
        assert report.update_s == 2.0
        assert report.compute_s > 2.0 + sum(t.forward_s + t.backward_s for t in report.stages)


def test_a_report_counts_the_bytes_that_its_step_sent() -> None:
    world = build(11, steps=2)
    world.run()
    total = sum(report.sent_bytes for _, report in world.reports)
    assert total == 100 * len(world.sent)


@pytest.mark.parametrize("seed", range(5))
def test_first_holders_upload_the_weights_of_the_last_step(seed: int) -> None:
    world = build(seed, steps=2)
    world.run()
    firsts = {s.holders[0] for s in world.plan.stages}
    assert world.exported == dict.fromkeys(world.exported, 2)
    assert set(world.exported) == firsts
