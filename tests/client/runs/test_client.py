"""The client against a broker: its errors, and its watch that survives breaks."""

from __future__ import annotations

import json
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

import shoal
from shoal.client import BrokerUnreachable, Client, Refused, RunFailed
from shoal.client.access import find_address
from shoal.client.files.records import Recorder
from shoal.client.runs import broker_calls
from shoal.client.runs import session as client_module
from shoal.client.show.progress import follow
from shoal.net.address import AddressError
from shoal.proto import broker_pb2 as pb

from .scripted_broker import Script, serving, state, step


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def client(script: Script) -> Iterator[Client]:
    with serving(script) as address, shoal.connect(address) as client:
        yield client


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


# ---------------------------------------------------------------- addresses and errors


def test_a_broker_that_is_not_there_is_unreachable() -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(BrokerUnreachable, match=rf"{address} does not answer \(nobody listens"):
        shoal.connect(address)


def test_the_address_comes_from_argument_environment_or_login(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("SHOAL_BROKER", raising=False)
    assert find_address() == "127.0.0.1:7077"  # where `shoal broker` listens by itself
    client_module.login("there:1")
    assert find_address() == "there:1"
    monkeypatch.setenv("SHOAL_BROKER", "env:2")
    assert find_address() == "env:2"
    assert find_address("here:3") == "here:3"


@pytest.mark.parametrize(
    "address", ["ho st", "host:", ":7", "host:0", "host:99999", "a b:7", 'a":7']
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(AddressError, match="expected"):
        find_address(address)


def test_an_unknown_run_is_refused(client: Client) -> None:
    with pytest.raises(Refused, match='knows no run "r-9"'):
        client.run("r-9")
    with pytest.raises(Refused, match="no such run"):
        client.run("r-1").cancel()


# ---------------------------------------------------------------- watching


def test_watch_gives_every_event_once_over_breaks(client: Client, script: Script) -> None:
    script.streams = [
        [state(0, pb.RUNNING), step(1, 0), grpc.StatusCode.UNAVAILABLE],
        [step(2, 1)],  # ends although the run goes on
        [grpc.StatusCode.UNAVAILABLE],
        [step(3, 2), state(4, pb.DONE)],
    ]
    events = list(client.run("r-1").watch())
    assert [e.number for e in events] == [0, 1, 2, 3, 4]
    assert script.asked == [0, 2, 3, 3]


def test_watch_gives_up_on_a_broker_that_stays_away(
    client: Client, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_calls, "PATIENCE_S", 0.0)
    script.streams = [[grpc.StatusCode.UNAVAILABLE]] * 3
    with pytest.raises(BrokerUnreachable):
        list(client.run("r-1").watch())


def test_wait_records_every_step_once(client: Client, script: Script, tmp_path: Path) -> None:
    ends = [state(0, pb.RUNNING), step(1, 0), step(2, 1), state(3, pb.DONE)]
    script.streams = [ends, ends]
    run = client.run("r-1", tmp_path)
    assert run.wait().phase == "done"
    run.wait()  # a second watcher adds nothing
    rows = [json.loads(x) for x in (tmp_path / "r-1" / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows] == [0, 1]
    assert {"loss", "lr", "grad_norm", "seconds"} <= set(rows[0])
    assert list((tmp_path / "r-1").glob("events.out.*"))


def test_a_failed_run_says_why(client: Client, script: Script, tmp_path: Path) -> None:
    script.streams = [[state(0, pb.FAILED, "peer home-1 was lost")]]
    with pytest.raises(RunFailed, match="failed after 3 of 3 steps: peer home-1 was lost"):
        client.run("r-1", tmp_path).wait()


@pytest.mark.timeout(30)
@pytest.mark.parametrize("how", ["followed", "waited for"])
def test_an_interrupt_while_a_library_takes_a_lock_ends_the_watching(
    script: Script, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C comes as TensorBoard's queue has its lock: closing it would wait for that for ever."""
    script.streams = [[step(0, 0), step(1, 1), state(2, pb.DONE)]]
    add, enter = Recorder.add, threading.Condition.__enter__
    armed: list[bool] = []

    def added(self: Recorder, done: pb.StepDone) -> None:
        armed.extend([True] * (done.step == 1))  # when everything is loaded
        add(self, done)

    def entered(self: threading.Condition) -> bool:
        taken = enter(self)
        if armed and threading.current_thread() is threading.main_thread():
            armed.clear()
            signal.raise_signal(signal.SIGINT)
        return taken

    monkeypatch.setattr(Recorder, "add", added)
    monkeypatch.setattr(threading.Condition, "__enter__", entered)
    with serving(script) as address, shoal.connect(address) as client:
        run = client.run("r-1", tmp_path)
        with pytest.raises(KeyboardInterrupt):
            follow(run, json=True) if how == "followed" else run.wait()
    assert not armed
    assert len((tmp_path / "r-1" / "metrics.jsonl").read_text().splitlines()) == 2


def test_the_stream_of_events_is_read_in_another_thread(
    script: Script, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC takes locks for each; see net/interrupts.py."""
    script.streams = [[step(i, i) for i in range(3)]]
    read = []
    following = grpc._channel._MultiThreadedRendezvous._next

    def noted(self: Any) -> Any:
        read.append(threading.current_thread())
        return following(self)

    monkeypatch.setattr(grpc._channel._MultiThreadedRendezvous, "_next", noted)
    assert [e.number for e in client.watch("r-1", 0)] == [0, 1, 2]
    assert len(read) == 4
    assert threading.main_thread() not in read
