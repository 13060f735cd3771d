"""What a stranger's graph does to the process that plans it ends that run and nothing else: not the
broker, not the runs beside it, and not the next start."""

from __future__ import annotations

import asyncio
import faulthandler
import fcntl
import os
import resource
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from shoal.broker.events import MakePlan, PlanFailed, RunId, Started
from shoal.broker.machine import MOST_INTERRUPTED
from shoal.broker.planner import CrowdedError, Planner, PlannerLimits
from shoal.broker.planning import answer
from shoal.broker.planning_children import (
    SHARING,
    Children,
    DroppedError,
    EndedError,
    _Child,
    _readable,
)
from shoal.broker.planning_process import FAILED as FAILED_STATUS
from shoal.broker.planning_process import MOST_ANSWER_BYTES, OVER_ANSWER, OVER_MEMORY
from shoal.broker.scheduler.interface import PeerOffer
from shoal.broker.server import Broker
from shoal.dag.convert import graph_from_bytes, graph_to_bytes
from shoal.dag.cost import cost
from shoal.dag.count import Counter
from shoal.dag.graph import (
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
from shoal.dag.plan import PeerId
from shoal.dag.rules import RULES
from shoal.proto.broker_pb2 import FAILED, PreviewAnswer, RunState, WatchRequest
from shoal.proto.broker_pb2_grpc import RunsStub
from shoal.tests.broker.conftest import World, make_spec, make_world
from shoal.tests.broker.test_server import Peer, running, stored_spec, submit, tiny_graph, until

__all__ = ["make_world"]

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
        monkeypatch.setattr("shoal.dag.cost._TRIALS", {})  # what was tried before would serve
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

    monkeypatch.setattr("shoal.dag.infer.resolve", lambda _: refuse)
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


# ---------------------------------------------------------------- limits, as processes keep them


@pytest.fixture
def children() -> Iterator[Children]:
    made = Children(PlannerLimits(cpu_s=1, wall_s=60.0))
    yield made
    made.stop()
    made.close()


def test_cpu_seconds_end_a_process_that_nobody_looks_at(children: Children) -> None:
    from shoal.broker.planning_wire import ask_to_bytes

    offer = PeerOffer(PeerId("a"), "a", device_memory_bytes=2**30)
    ask = MakePlan(RunId("r"), 1, make_spec(), (offer,))
    with pytest.raises(EndedError, match="stopped after 1 s of CPU"):
        children.ask("g", ask_to_bytes(ask, long_graph(20_000)), lambda: False)


@pytest.mark.parametrize("said", [MOST_ANSWER_BYTES + 1, 2**32 - 1])
def test_an_answer_of_any_length_is_not_taken(children: Children, said: int) -> None:
    """A process that a graph has taken over says how long its answer is, and sends on."""
    pid = children._child("g").pid
    ours, theirs = socket.socketpair()
    children._children["g"].socket.close()
    children._children["g"] = _Child(pid, ours)
    with theirs:
        theirs.sendall(said.to_bytes(4) + bytes(100))
        with pytest.raises(EndedError, match="its plan takes more than 16 MiB"):
            children.ask("g", b"", lambda: False)
    assert not children.pids


def test_a_broker_with_thousands_of_open_connections_can_plan() -> None:
    """Whoever opens them would have every run of others fail else."""
    ours, theirs = socket.socketpair()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    try:
        with ours, theirs, socket.socket(fileno=fcntl.fcntl(ours, fcntl.F_DUPFD, 2000)) as high:
            assert not _readable(high, 0.0)
            theirs.sendall(b"x")
            assert _readable(high, 1.0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_warm_process_that_lost_step_is_replaced(children: Children) -> None:
    """An answer that comes late is not taken for the answer to another order."""
    warm = SHARING.get()
    os.kill(warm._process.pid, signal.SIGSTOP)
    warm._control.settimeout(0.05)
    assert warm.ended(1, 0.0) is None
    assert not warm.alive
    children.warm_up()
    assert children._warm is not warm


def test_an_exit_status_is_told_as_what_it_means(children: Children) -> None:
    assert "more than 2 GiB" in str(children._why(OVER_MEMORY << 8))
    assert "more than 16 MiB" in str(children._why(OVER_ANSWER << 8))
    assert "a bug of shoal" in str(children._why(FAILED_STATUS << 8))
    assert "signal 6 (SIGABRT)" in str(children._why(signal.SIGABRT))
    assert not children._why(signal.SIGKILL).blame
    assert not children._why(None).blame


async def test_who_asks_for_much_waits_behind_those_who_ask_for_little() -> None:
    planner, order = Planner(PlannerLimits()), list[str]()

    def asked(name: str) -> bytes:
        order.append(name)
        raise EndedError(name)  # never gets to a process

    async def ask(subject: str, name: str) -> None:
        with pytest.raises(EndedError):
            await planner.ask(subject, "g", lambda: asked(name))

    try:
        many = [ask("hostile", f"h{i}") for i in range(5)]
        await asyncio.gather(*many, ask("a", "a"), ask("b", "b"))
    finally:
        planner.close()
    assert order == ["h0", "a", "b", "h1", "h2", "h3", "h4"]


async def test_whose_planning_had_to_be_ended_gives_way_to_everybody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Previews have no run that fails: the same endless graph is asked about again and again."""
    planner, order, begun = Planner(PlannerLimits()), list[str](), threading.Event()

    def ask(graph: str, data: bytes, dropped: Callable[[], bool]) -> bytes:
        order.append(graph)
        if order == ["endless"]:
            raise EndedError("it had all its time")
        while graph == "endless":
            begun.set()
            if dropped():
                raise DroppedError
        return b"a plan"

    monkeypatch.setattr(planner._children, "ask", ask)
    try:
        with pytest.raises(EndedError):
            await planner.ask("hostile", "endless", bytes)
        again = asyncio.ensure_future(planner.ask("hostile", "endless", bytes))
        await asyncio.to_thread(begun.wait)
        for _ in range(2):
            assert await planner.ask("honest", "short", bytes) == b"a plan"
            begun.clear()
            await asyncio.to_thread(begun.wait)
        assert not again.done()
        again.cancel()
    finally:
        planner.close()
    assert order == ["endless", "endless", "short", "endless", "short", "endless"]


async def test_one_subject_has_only_so_many_requests_that_wait() -> None:
    planner, order = Planner(PlannerLimits(waiting=2)), list[str]()

    def asked(name: str) -> bytes:
        order.append(name)
        raise EndedError(name)  # never gets to a process

    def ask(subject: str, name: str) -> Any:
        return planner.ask(subject, "g", lambda: asked(name))

    try:
        many = [ask("hostile", f"h{i}") for i in range(4)]
        ends = await asyncio.gather(*many, ask("a", "a"), return_exceptions=True)
    finally:
        planner.close()
    assert [type(end) for end in ends] == [
        *[EndedError] * 2,
        *[CrowdedError] * 2,
        EndedError,
    ]
    assert order == ["h0", "a", "h1"]


# ---------------------------------------------------------------- the machine


def test_a_run_that_the_broker_died_of_twice_is_not_planned_a_third_time(make_world: Any) -> None:
    world: World = make_world()
    world.handle(Started())
    world.join("a")
    run, out = world.submit()
    world.only(out, MakePlan)
    for _ in range(MOST_INTERRUPTED - 1):
        world.restart()
        world.join("a")
        world.only(world.wait(world.machine.options.lease_s), MakePlan)
    world.restart()
    state = world.state(run)
    assert (state.phase, state.reason.code) == (FAILED, "planner")
    assert f"ended {MOST_INTERRUPTED} times while it planned this run" in state.reason.text


def test_whose_planning_had_to_be_ended_comes_behind_everybody_else(make_world: Any) -> None:
    from shoal.broker.events import RunSubmitted

    world: World = make_world()
    world.join("a")
    spec = world.spec(priority=9)
    out = world.handle(RunSubmitted(world.request(), spec, "hostile"))
    first = world.only(out, MakePlan)
    world.handle(RunSubmitted(world.request(), spec, "hostile"))
    world.handle(RunSubmitted(world.request(), world.spec(), "honest"))
    out = world.handle(PlanFailed(first.run, first.version, "it crashed", "planner"))
    assert world.machine.runs[world.only(out, MakePlan).run].owner == "honest"
