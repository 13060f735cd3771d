"""A worker is made of what was opened before: by itself it opens nothing."""

from __future__ import annotations

import builtins
import io
import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any, Never

import grpc.aio
import pytest

from shoal.dag.plan.plan import PeerId
from shoal.net.cap import Cap
from shoal.net.local import split
from shoal.peer.compute.device import TorchDevice
from shoal.peer.core.snapshots import SnapshotStore
from shoal.peer.host.config import PeerConfig
from shoal.peer.host.identity import Identity, Incarnation
from shoal.peer.host.own_data import Catalogue
from shoal.peer.shell.daemon import Opened, Worker
from shoal.peer.shell.opening import look, open_worker
from shoal.peer.shell.spans import Spans
from shoal.proto import broker_pb2

NOWHERE = Path("/nowhere/at/all")


def in_memory() -> Opened:
    """What a worker needs, none of it on a disk or on the network."""
    return Opened(
        server=grpc.aio.server(),
        listens="192.0.2.1:7",
        within="192.0.2.1:7",
        credentials=None,
        up=Cap(None),
        down=Cap(None),
        owner=None,
        device=TorchDevice("cpu"),
        snapshots=SnapshotStore(),
        kept=(),
        own_data=Catalogue(NOWHERE, {}, b""),
        spans=Spans("", "p-1", "p"),
    )


def refused(*arguments: Any, **named: Any) -> Never:
    raise AssertionError(f"it asks the machine for {arguments}")


CALLS = [(builtins, "open"), (io, "open"), (socket, "socket"), (socket, "getaddrinfo")]
CALLS += [(os, name) for name in ("open", "mkdir", "stat", "scandir", "listdir", "unlink")]


async def test_making_a_worker_opens_no_file_and_binds_no_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = PeerConfig(
        broker="192.0.2.1:7077", state=NOWHERE, host_state=NOWHERE, name="p", trace="/nowhere/t"
    )
    me = Incarnation(PeerId("p-1"), "boot", 1, NOWHERE / "scratch")
    opened, profile = in_memory(), broker_pb2.Profile(name="p")
    held = os.listdir("/proc/self/fd")
    with monkeypatch.context() as closed:
        for where, name in CALLS:
            closed.setattr(where, name, refused)
        worker = Worker(config, me, profile, opened)
    assert {*os.listdir("/proc/self/fd")} <= {*held}  # what others held may have been closed
    assert worker.machine.exit is None
    worker.stop(now=True)  # it decides without the machine, too
    assert worker.machine.exit is not None


async def test_opening_one_takes_the_port_and_finds_what_lies_on_the_disk(tmp_path: Path) -> None:
    with Identity(tmp_path, "p") as me:
        lost = me.snapshots / "half-a-snapshot"
        lost.mkdir(parents=True)
        config = PeerConfig(broker="127.0.0.1:9", state=tmp_path, name="p", insecure=True)
        worker = open_worker(config, me, look(config))
        assert not lost.exists(), "nobody could go on from it"
        with pytest.raises(ValueError, match="cannot be had"):
            open_worker(replace(config, port=split(worker.listens)[1]), me, look(config))
