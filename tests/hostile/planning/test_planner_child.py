"""What a stranger's graph does to the process that plans it ends that run and nothing else: not the
broker, not the runs beside it, and not the next start."""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from shoal.broker.events import MakePlan, PlanFailed, RunId
from shoal.broker.service.server import Broker
from shoal.dag.cost.cost import cost
from shoal.dag.cost.count import Counter
from shoal.dag.ir.convert import graph_from_bytes, graph_to_bytes
from shoal.dag.ir.graph import (
    Graph,
    GraphError,
    Input,
    Operator,
    Output,
    Parameter,
    Ref,
    Size,
    TensorSpec,
)
from shoal.dag.ir.rules.rules import RULES
from shoal.dag.plan.plan import PeerId
from shoal.planner.answers.planning import answer
from shoal.planner.base.interface import PeerOffer
from shoal.planner.service.planner import PlannerLimits
from shoal.proto.broker_pb2 import FAILED, PreviewAnswer, RunState, WatchRequest
from shoal.proto.broker_pb2_grpc import RunsStub
from shoal.tests.broker.conftest import make_spec
from shoal.tests.broker.service.loopback import (
    Peer,
    running,
    stored_spec,
    submit,
    tiny_graph,
    until,
)
from shoal.tests.planner.service.sharing import SHARING

SURVIVED, BROKEN = 0, 3
QUICK = PlannerLimits(wall_s=60.0, cpu_s=60, memory_bytes=1 << 30, waiting=4)


@pytest.fixture(scope="module", autouse=True)
def warm_planner(one_warm_planner: None) -> None:
    """Scripted peers send no heartbeats: none waits out its lease while torch is imported."""
    SHARING.get().wait(lambda: False)


def output(*shape: Any) -> Output:
    return Output(TensorSpec(shape, "float32"), True)


def graph(operators: tuple[Operator, ...], *parameters: Parameter, **inputs: TensorSpec) -> bytes:
    found = tuple(Input(name, spec) for name, spec in inputs.items())
    return graph_to_bytes(Graph(found, parameters, (), operators, loss="loss"))


@cache
def long_graph(operators: int) -> bytes:
    """Costs seconds to read and plan, as many kinds of operators as it has."""
    row = (output(Size(1), 3),)
    reads = (Ref("in:x"), Ref("param:w"))
    made = [Operator("o0", "aten.linear.default", reads, (), row)]
    for i in range(1, operators):
        args = (Ref(f"o{i - 1}"), float(i))
        made.append(Operator(f"o{i}", "aten.mul.Scalar", args, (), row))
    made.append(Operator("loss", "aten.sum.default", (Ref(made[-1].name),), (), (output(),)))
    weight = Parameter("w", TensorSpec((3, 3), "float32"))
    return graph(tuple(made), weight, x=TensorSpec((Size(1), 3), "float32"))


def small_gru(*sizes: tuple[int, ...]) -> bytes:
    """A recurrent layer of weights of these sizes. In those that stand for none there is a row in
    place of three gates: torch cuts each in three, gets one, and reads behind the end of what it
    got. Whoever calls it dies of signal 11, with shapes alone too."""
    names = ("a", "b", "c", "d")
    sizes = sizes or ((1, 8), (1, 8), (1,), (1,))
    weights = tuple(
        Parameter(n, TensorSpec(s, "float32")) for n, s in zip(names, sizes, strict=True)
    )
    read = tuple(Ref(f"param:{n}") for n in names)
    args = (Ref("in:x"), Ref("in:h"), read, True, 1, 0.0, False, False, True)
    made = (output(Size(1), 4, 8), output(1, Size(1), 8))
    return graph(
        (
            Operator("g", "aten.gru.input", args, (), made, True),
            Operator("loss", "aten.sum.default", (Ref("g.0"),), (), (output(),)),
        ),
        *weights,
        x=TensorSpec((Size(1), 4, 8), "float32"),
        h=TensorSpec((1, Size(1), 8), "float32"),
    )


async def planned(broker: Broker) -> int:
    """The process that plans now."""
    children = broker.shell._planner._children
    await until(lambda: bool(children.pids))
    return children.pids[-1]


async def end_of(channel: grpc.aio.Channel, run: str) -> RunState:
    events = [e async for e in RunsStub(channel).Watch(WatchRequest(run=run))]
    return events[-1].state


@asynccontextmanager
async def beside(peer: Peer, channel: grpc.aio.Channel) -> AsyncIterator[None]:
    """Whatever happens inside, an honest run is planned and given to its peer afterwards."""
    yield
    run = await submit(channel, await stored_spec(channel, tiny_graph()))
    while not (message := await peer.read()).HasField("assign"):
        assert message is not None
    assert message.assign.run == run


# ---------------------------------------------------------------- over real connections


async def test_a_graph_that_crashes_its_planner_fails_its_run_and_no_other(tmp_path: Path) -> None:
    async with running(state=tmp_path, planner=QUICK) as (broker, channel):
        peer = Peer(channel, "a")
        await peer.join()
        async with beside(peer, channel):
            run = await submit(channel, await stored_spec(channel, long_graph(2000)))
            os.kill(await planned(broker), signal.SIGSEGV)
            state = await end_of(channel, run)
            assert (state.phase, state.reason.code) == (FAILED, "planner")
            assert "signal 11 (SIGSEGV)" in state.reason.text
            assert "more than 1 GiB of memory" in state.reason.text  # a signal does not tell which
            assert "is not planned again" in state.reason.text
    async with running(state=tmp_path, planner=QUICK) as (broker, channel):
        assert (await end_of(channel, run)).reason.code == "planner"  # and nobody plans it
        assert not broker.shell._planner._children.pids


async def test_a_recurrent_layer_with_small_weights_does_not_reach_the_broker() -> None:
    async with running(planner=QUICK) as (_, channel):
        peer = Peer(channel, "a")
        await peer.join()
        async with beside(peer, channel):
            run = await submit(channel, await stored_spec(channel, small_gru()))
            state = await end_of(channel, run)
            assert (state.phase, state.reason.code) == (FAILED, "graph")
            assert "operator g (aten.gru.input)" in state.reason.text


def test_without_its_rule_that_layer_ends_whoever_looks_at_its_cost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So there is a reason for the rule, and for planning in a process of its own."""
    made = graph_from_bytes(small_gru()).bind(2)
    with pytest.raises(GraphError, match=r"operator g \(aten.gru.input\)"):
        cost(made)
    cost(graph_from_bytes(long_graph(2)).bind(2))  # what a trial imports is there
    monkeypatch.delitem(RULES, "aten.gru.input")
    child = os.fork()
    if not child:
        status = SURVIVED
        try:
            faulthandler.disable()
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_CPU, (3, 3))
            cost(made)
        except BaseException:
            status = BROKEN
        finally:
            os._exit(status)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    # What lies behind the end decides: mostly no memory at all, sometimes torch's own state, or
    # the interpreter's, which was seen to go on without end.
    ends = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGXCPU, signal.SIGKILL)
    assert ended == BROKEN or -ended in ends


def test_an_operator_whose_backward_does_not_run_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes of its results are well: only the trial of what it costs goes backward."""
    monkeypatch.delitem(RULES, "aten.gru.input")
    made = small_gru((24, 8), (1, 8), (24,), (24,))
    spec = make_spec()
    offer = PeerOffer(PeerId("a"), "a", device_memory_bytes=2**30)
    failed = answer(MakePlan(RunId("r"), 1, spec, (offer,)), made)
    assert isinstance(failed, PlanFailed)
    assert failed.code == "graph"
    assert "operator g (aten.gru.input) does not run forward and backward on" in failed.reason


def test_a_bug_in_counting_an_operator_is_no_fault_of_the_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch calls the counting and passes its errors on, like its own about the operator."""

    def ask() -> PlanFailed:
        monkeypatch.setattr("shoal.dag.cost.cost._TRIALS", {})  # what was tried before would serve
        graph_from_bytes.cache_clear()
        offer = PeerOffer(PeerId("a"), "a", device_memory_bytes=2**30)
        failed = answer(MakePlan(RunId("r"), 1, make_spec(), (offer,)), long_graph(2))
        assert isinstance(failed, PlanFailed)
        return failed

    with monkeypatch.context() as broken:
        broken.setattr(Counter, "_moved", lambda *_: 1 // 0)
        failed = ask()
    assert failed.code == "internal"
    assert "planning crashed: ZeroDivisionError" in failed.reason

    def refuse(*_: Any) -> None:
        raise ZeroDivisionError("a shape function of torch")

    monkeypatch.setattr("shoal.dag.ir.infer.resolve", lambda _: refuse)
    failed = ask()
    assert failed.code == "graph"
    assert "operator o0 (aten.linear.default) does not take" in failed.reason
    assert "ZeroDivisionError: a shape function of torch" in failed.reason


async def test_planning_that_takes_too_long_is_stopped_and_says_how_long_it_had() -> None:
    limits = PlannerLimits(wall_s=0.5, cpu_s=60)
    async with running(planner=limits) as (broker, channel):
        peer = Peer(channel, "a")
        await peer.join()
        spec = await stored_spec(channel, long_graph(20_000))
        run = await submit(channel, spec)
        state = await end_of(channel, run)
        assert (state.phase, state.reason.code) == (FAILED, "planner")
        assert "stopped after 0.5 s on the clock" in state.reason.text
        answer: PreviewAnswer = await RunsStub(channel).Preview(spec)
        assert answer.reason.code == "planner"
        assert "planning this was stopped after 0.5 s" in answer.reason.text
        assert not broker.shell._planner._children.pids


async def test_planning_that_takes_too_much_memory_is_stopped_and_says_how_much_it_had() -> None:
    async with running(planner=PlannerLimits(memory_bytes=4 << 20)) as (_, channel):
        peer = Peer(channel, "a")
        await peer.join()
        run = await submit(channel, await stored_spec(channel, long_graph(2000)))
        state = await end_of(channel, run)
        assert (state.phase, state.reason.code) == (FAILED, "planner")
        assert "more than 4 MiB of memory" in state.reason.text


async def test_a_planner_that_somebody_else_ended_is_asked_once_more() -> None:
    """As the kernel does where the machine's memory is short: the run is not to blame."""
    async with running(planner=QUICK) as (broker, channel):
        peer = Peer(channel, "a")
        await peer.join()
        run = await submit(channel, await stored_spec(channel, long_graph(200)))
        os.kill(await planned(broker), signal.SIGKILL)
        message = await peer.read()
        assert message is not None
        assert message.assign.run == run
