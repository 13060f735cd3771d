"""The limits of the processes that plan, as they keep them, and whose turn it is: who asks for much
waits, and whoever brought a process to its end comes behind everybody else."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shoal.broker.events import MakePlan, PlanFailed, RunId, Started
from shoal.broker.machine import MOST_INTERRUPTED
from shoal.dag.plan.plan import PeerId
from shoal.planner.base.interface import PeerOffer
from shoal.planner.service.children import Children, DroppedError, EndedError, _Child, _readable
from shoal.planner.service.planner import Planner, PlannerBusyError, PlannerLimits
from shoal.planner.service.process import FAILED as FAILED_STATUS
from shoal.planner.service.process import MOST_ANSWER_BYTES, OVER_ANSWER, OVER_MEMORY
from shoal.proto.broker_pb2 import FAILED
from shoal.tests.broker.conftest import World, make_spec, make_world
from shoal.tests.planner.service.sharing import SHARING

from .test_planner_child import long_graph

__all__ = ["make_world"]


@pytest.fixture(scope="module", autouse=True)
def warm_planner(one_warm_planner: None) -> None:
    """Scripted peers send no heartbeats: none waits out its lease while torch is imported."""
    SHARING.get().wait(lambda: False)


@pytest.fixture
def children() -> Iterator[Children]:
    made = Children(PlannerLimits(cpu_s=1, wall_s=60.0))
    yield made
    made.stop()
    made.close()


def test_cpu_seconds_end_a_process_that_nobody_looks_at(children: Children) -> None:
    from shoal.planner.service.wire import ask_to_bytes

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


@pytest.mark.parametrize("ends", ["late", "dropped"])
def test_an_answer_that_comes_byte_by_byte_buys_no_time(children: Children, ends: str) -> None:
    """A process that a graph has taken over says a little whenever it is looked at."""
    children._limits = PlannerLimits(cpu_s=1, wall_s=0.3 if ends == "late" else 60.0)
    pid = children._child("g").pid
    ours, theirs = socket.socketpair()
    children._children["g"].socket.close()
    children._children["g"] = _Child(pid, ours)
    theirs.sendall((2000).to_bytes(4))
    looked, told = 0, threading.Event()

    def trickles() -> None:
        with theirs, contextlib.suppress(OSError):
            while not told.wait(0.002):
                theirs.send(b"x")

    def dropped() -> bool:
        nonlocal looked
        looked += 1
        return ends == "dropped" and looked > 20

    talks = threading.Thread(target=trickles)
    talks.start()
    try:
        with pytest.raises(EndedError if ends == "late" else DroppedError) as found:
            children.ask("g", b"", dropped)
        assert ends == "dropped" or "stopped after 0.3 s on the clock" in str(found.value)
    finally:
        told.set()
        talks.join()
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
        *[PlannerBusyError] * 2,
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
    out = world.handle(PlanFailed(first.replica, first.version, "it crashed", "planner"))
    assert world.machine.runs[world.only(out, MakePlan).replica].owner == "honest"
