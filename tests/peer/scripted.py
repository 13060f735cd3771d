"""Facts for one machine, and what it wants done, in scripts: see
tests/peer/core/test_machine.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from shoal.dag.ir.graph import Graph, Operator, Output, Parameter, Ref, TensorSpec
from shoal.dag.plan.cut import cut, tied_groups
from shoal.dag.plan.plan import PeerId, Plan, StageSlot, Visit
from shoal.dag.schedule.flow import Flow, Role
from shoal.dag.schedule.schedule import listed
from shoal.net.links.frame import FrameKey
from shoal.peer.core import events as e
from shoal.peer.core.machine import PeerMachine
from shoal.peer.core.options import PeerOptions
from shoal.proto import broker_pb2

ME, OTHER = PeerId("me"), PeerId("other")


def said(**kind: Any) -> e.BrokerSaid:
    return e.BrokerSaid(broker_pb2.BrokerMessage(**kind))


def told(instructions: Iterable[e.Instruction], kind: str) -> list[Any]:
    """The messages of one kind among what is told to the broker."""
    tells = [i.message for i in instructions if isinstance(i, e.Tell)]
    return [getattr(m, kind) for m in tells if m.WhichOneof("kind") == kind]


def of(instructions: Iterable[e.Instruction], kind: type) -> list[Any]:
    return [i for i in instructions if isinstance(i, kind)]


NOBODY = said(handover=broker_pb2.HandoverReply(run="r", term=1))
"""Nobody takes the part of a peer that leaves."""
WELCOME = said(welcome=broker_pb2.Welcome(broker="b", lease_s=9, heartbeat_s=3))


def resumed(step: int) -> e.BrokerSaid:
    """The Welcome of a broker that was started again and goes on with the run."""
    holding = broker_pb2.Holding(run="r", term=1, step=step)
    return said(welcome=broker_pb2.Welcome(broker="b", lease_s=9, heartbeat_s=3, resumed=holding))


def two_stage_flow() -> Flow:
    """`me` holds stage 0, `other` stage 1; two microbatches. `other` is the hub."""
    spec, scalar = TensorSpec((2, 3), "float32"), TensorSpec((), "float32")
    graph = Graph(
        inputs=(),
        parameters=(Parameter("w0", spec), Parameter("w1", spec)),
        buffers=(),
        operators=(
            Operator("h", "aten.neg.default", (Ref("param:w0"),), (), (Output(spec, True),)),
            Operator(
                "loss", "aten.x.default", (Ref("h"), Ref("param:w1")), (), (Output(scalar, True),)
            ),
        ),
        loss="loss",
        batch=2,
    )
    route = (Visit(0, ME), Visit(1, OTHER))
    plan = Plan((StageSlot(0, 1, (ME,)), StageSlot(1, 2, (OTHER,))), (route, route), 2)
    stages = cut(graph, [(0, 1), (1, 2)])
    return Flow(listed(plan, stages), stages, tied_groups(graph, stages))


FLOW = two_stage_flow()
"""List of `me`: F0@0 F1@0 B0@0 B1@0 >@norm <2@norm U (or another order of F and B)."""


def assign(run: str = "r", term: int = 1, **fields: Any) -> e.BrokerSaid:
    stages = [
        broker_pb2.StageSlot(start=0, stop=1, holders=[ME]),
        broker_pb2.StageSlot(start=1, stop=2, holders=[OTHER]),
    ]
    plan = fields.pop("plan", broker_pb2.Plan(stages=stages))
    return said(assign=broker_pb2.Assign(run=run, term=term, slice={"plan": plan}, **fields))


def built(run: str = "r", term: int = 1, **fields: Any) -> e.Built:
    defaults: dict[str, Any] = {"slots": (), "device_bytes": 10, "steps": 2, "exports": (0,)}
    return e.Built(run, term, FLOW, **(defaults | fields))


def frame(port: str = "h<1", step: int = 0, term: int = 1, microbatch: int = 0) -> FrameKey:
    role = Role.ACTIVATION_GRAD if "<" in port else Role.SYNC
    return FrameKey("r", term, step, role, microbatch, 0, port, OTHER, ME)


Make = Callable[..., PeerMachine]


def finish_step(one: PeerMachine, now: float = 1.0) -> list[e.Instruction]:
    """Lets the step that `me` is in run to its end, data of the next one included."""
    part = one.assignment
    assert part is not None
    assert part.steps is not None
    step, out = part.step, []
    out += one.handle(e.DataReady("r", 1, step + 1), now)
    for port, m in (("h<1", 0), ("h<1", 1), ("norm/1-2", 0)):
        out += one.handle(e.FrameArrived(frame(port, step, microbatch=m)), now)
    while one.assignment and part.steps.in_flight and part.step == step:
        action = part.steps.program.actions[part.steps.position]
        out += one.handle(e.Computed("r", 1, step, action, e.Result(0.1)), now)
    return out


@pytest.fixture
def machine() -> Iterator[Make]:
    """Makes machines; validates the invariants of each when the test is over."""
    made: list[PeerMachine] = []

    def make(memory: int = 1000, **options: Any) -> PeerMachine:
        profile = broker_pb2.Profile(name="me", device_memory_bytes=memory)
        made.append(PeerMachine(ME, "boot", profile, counter=4, options=PeerOptions(**options)))
        return made[-1]

    yield make
    for one in made:
        one.validate()


@pytest.fixture
def member(machine: Make) -> Make:
    """Makes machines that are in the pool, at time 0."""

    def make(**options: Any) -> PeerMachine:
        one = machine(**options)
        for event in (e.Started(), e.Attached(), WELCOME):
            one.handle(event, 0.0)
        return one

    return make


@pytest.fixture
def running(member: Make) -> Make:
    """Makes machines that compute their first action, at time 0."""

    def make(steps: int = 2, **options: Any) -> PeerMachine:
        one = member(**options)
        one.handle(assign(), 0.0)
        one.handle(built(steps=steps), 0.0)
        one.handle(e.LinkUp(OTHER), 0.0)
        one.handle(e.DataReady("r", 1, 0), 0.0)
        out = one.handle(said(start=broker_pb2.Start(run="r", term=1)), 0.0)
        assert of(out, e.Compute)
        return one

    return make
