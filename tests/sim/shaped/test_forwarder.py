"""The forwarding process with real sockets and little data: what goes in comes out, and how
connections begin, end, hang and break."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.peer.host.addresses import read_addresses
from shoal.sim.processes import ClusterError
from shoal.sim.shaped.forwarder import Forwarder
from shoal.sim.shaped.shaping import Shaping

pytestmark = pytest.mark.process
INF = float("inf")
NAMES = ("a", "b", "c", "broker")


def shaping(bandwidth: float = 5e7) -> Shaping:
    n = len(NAMES)
    return Shaping(
        names=NAMES,
        latency_s=((0.002,) * n,) * n,
        bandwidth=((bandwidth,) * n,) * n,
        up=(INF,) * n,
        down=(INF,) * n,
    )


@pytest.fixture(scope="module")
def paths() -> Iterator[Forwarder]:
    with Forwarder(shaping()) as paths:
        yield paths


@pytest.fixture
def ends(paths: Forwarder) -> Iterator[Ends]:
    """Listeners where each end should listen, for one test."""
    with contextlib.ExitStack() as stack:
        yield Ends(paths, stack)


class Ends:
    def __init__(self, paths: Forwarder, stack: contextlib.ExitStack) -> None:
        self.paths, self.stack = paths, stack
        self.listeners: dict[str, socket.socket] = {}

    def listener(self, name: str) -> socket.socket:
        if name not in self.listeners:
            listener = self.stack.enter_context(socket.socket())
            listener.settimeout(30)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", self.paths.port(name)))
            listener.listen()
            self.listeners[name] = listener
        return self.listeners[name]

    def dial(self, a: str, b: str) -> socket.socket:
        host, _, port = self.paths.address_for(a, b).rpartition(":")
        return self.stack.enter_context(socket.create_connection((host, int(port)), timeout=30))

    def joined(self, a: str, b: str) -> tuple[socket.socket, socket.socket]:
        """Both ends of a connection that a dialled."""
        listener = self.listener(b)
        near = self.dial(a, b)
        far, _ = listener.accept()
        far.settimeout(30)
        self.stack.enter_context(far)
        return near, far

    def turns(self, pair: tuple[socket.socket, socket.socket], count: int = 20) -> None:
        """So many round trips on another connection: time for anything to have come."""
        for end in (*pair, *pair) * (count // 4):
            other = pair[1] if end is pair[0] else pair[0]
            end.sendall(b"t")
            assert other.recv(1) == b"t"


def data(size: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(size)


def everything(end: socket.socket) -> bytes:
    got = bytearray()
    while piece := end.recv(65536):
        got += piece
    return bytes(got)


def silent(end: socket.socket) -> bool:
    return not select.select([end], [], [], 0)[0]


# ---------------------------------------------------------------- bytes


def test_bytes_arrive_unchanged_and_in_order_on_many_connections_at_once(ends: Ends) -> None:
    directions = [("a", "b"), ("b", "a"), ("a", "broker"), ("c", "a")] * 3
    pairs = [ends.joined(*d) for d in directions]
    sent = {(i, way): data(300_000 + 7 * i, seed=2 * i + way) for i in range(12) for way in (0, 1)}
    got: dict[tuple[int, int], bytes] = {}

    def talk(i: int, way: int) -> None:
        pairs[i][way].sendall(sent[i, way])
        pairs[i][way].shutdown(socket.SHUT_WR)

    def listen(i: int, way: int) -> None:
        got[i, way] = everything(pairs[i][1 - way])

    before = ends.paths.carried().bytes
    threads = [threading.Thread(target=f, args=key) for key in sent for f in (talk, listen)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert {k: hashlib.sha256(v).digest() for k, v in got.items()} == {
        k: hashlib.sha256(v).digest() for k, v in sent.items()
    }
    after = ends.paths.carried().bytes
    moved = {pair: after[pair] - before.get(pair, 0) for pair in after}
    assert moved["c", "a"] == sum(len(sent[i, 0]) for i in (3, 7, 11))
    assert moved["a", "c"] == sum(len(sent[i, 1]) for i in (3, 7, 11))


def test_one_side_may_end_and_the_other_go_on(ends: Ends) -> None:
    near, far = ends.joined("a", "b")
    near.sendall(b"question")
    near.shutdown(socket.SHUT_WR)
    assert everything(far) == b"question"
    far.sendall(b"a long answer" * 1000)
    far.close()
    assert everything(near) == b"a long answer" * 1000


def test_who_breaks_off_is_seen_to_break_off(ends: Ends) -> None:
    near, far = ends.joined("a", "b")
    ends.turns((near, far))
    far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    far.close()
    with pytest.raises(ConnectionResetError):
        near.recv(1)


def test_nobody_at_the_target_is_a_broken_connection(ends: Ends) -> None:
    with contextlib.suppress(ConnectionResetError):
        # c's port is reserved, and c does not listen.
        assert ends.dial("a", "c").recv(1) == b""


def test_a_receiver_that_does_not_read_stops_its_sender_and_loses_nothing(ends: Ends) -> None:
    near, far = ends.joined("a", "b")
    near.setblocking(False)
    block, sent = data(1 << 20, seed=5), 0
    while select.select([], [near], [], 1.0)[1]:
        sent += near.send(block[sent % len(block) :])
        assert sent < 200 << 20, "nothing holds the sender back"
    near.setblocking(True)
    near.shutdown(socket.SHUT_WR)
    want, got, at = hashlib.sha256(), hashlib.sha256(), 0
    while at < sent:
        piece = block[: sent - at]
        want.update(piece)
        at += len(piece)
    while piece := far.recv(1 << 20):
        got.update(piece)
    assert got.digest() == want.digest()


# ---------------------------------------------------------------- faults


def test_a_parted_direction_hangs_and_goes_on_when_it_is_mended(ends: Ends) -> None:
    near, far = ends.joined("a", "b")
    other = ends.joined("a", "c")
    ends.turns((near, far))
    ends.paths.part("a", "b")
    try:
        near.sendall(b"held")
        far.sendall(b"half open")  # the other direction is as it was
        assert near.recv(100) == b"half open"
        ends.turns(other)
        assert silent(far)
        near.close()
        ends.turns(other)
        assert silent(far)  # nor does the end get through
    finally:
        ends.paths.mend("a", "b")
    assert everything(far) == b"held"


@pytest.mark.parametrize("direction", [("a", "b"), ("b", "a")])
def test_parted_ends_cannot_be_connected_in_either_direction(
    ends: Ends, direction: tuple[str, str]
) -> None:
    ends.listener("b")
    ends.paths.part(*direction)
    try:
        with contextlib.suppress(ConnectionResetError):
            assert ends.dial("a", "b").recv(1) == b""
        ends.turns(ends.joined("a", "c"))
    finally:
        ends.paths.mend(*direction)
    ends.turns(ends.joined("a", "b"))


def test_a_slowed_path_carries_the_same_bytes(ends: Ends) -> None:
    near, far = ends.joined("a", "b")
    ends.paths.slow("a", "b", 20.0)
    try:
        near.sendall(data(20_000, seed=1))
        near.shutdown(socket.SHUT_WR)
        assert everything(far) == data(20_000, seed=1)
    finally:
        ends.paths.slow("a", "b", 1.0)


def test_one_bit_of_the_next_large_piece_changes(ends: Ends) -> None:
    near, far = ends.joined("a", "b")
    ends.paths.corrupt("a", "b")
    ends.turns((near, far))  # small ones pass
    assert ends.paths.carried().spared == {("a", "b")}
    sent = data(50_000, seed=3)
    near.sendall(sent)
    near.sendall(sent)
    near.shutdown(socket.SHUT_WR)
    got = everything(far)
    assert len(got) == 2 * len(sent)
    apart = [x ^ y for x, y in zip(got, sent + sent, strict=True) if x != y]
    assert len(apart) == 1
    assert not ends.paths.carried().spared
    assert apart[0].bit_count() == 1


def test_wrong_names_and_numbers_are_refused_here(paths: Forwarder) -> None:
    with pytest.raises(ValueError, match='no end is called "d"'):
        paths.part("a", "d")
    with pytest.raises(ValueError, match='"a" has no path to itself'):
        paths.part("a", "a")
    with pytest.raises(ValueError, match="factor is 0"):
        paths.slow("a", "b", 0)
    with pytest.raises(ValueError, match='no end is called "x"'):
        Forwarder(shaping(), {"x": "127.0.0.1:1"})
    with pytest.raises(ValueError, match="HOST:PORT"):
        Forwarder(shaping(), {"a": "127.0.0.1"})


# ---------------------------------------------------------------- addresses, beginning and end


def test_the_map_of_an_end_names_every_other_end(paths: Forwarder, tmp_path: Path) -> None:
    via = read_addresses(paths.write_via("a", tmp_path / "via.json"))
    assert via == {
        f"127.0.0.1:{paths.port(other)}": paths.address_for("a", other) for other in NAMES[1:]
    }
    everybodys = [paths.address_for(a, b) for a in NAMES for b in NAMES if a != b]
    assert len(set(everybodys)) == 12


def test_an_end_that_listens_already_is_reached_where_it_is() -> None:
    with socket.create_server(("127.0.0.1", 0)) as broker:
        broker.settimeout(30)
        address = f"127.0.0.1:{broker.getsockname()[1]}"
        with Forwarder(shaping(), {"broker": address}) as paths:
            assert paths.port("broker") == broker.getsockname()[1]
            host, _, port = paths.via("b")[address].rpartition(":")
            with socket.create_connection((host, int(port)), timeout=30) as near:
                near.sendall(b"hello")
                far, _ = broker.accept()
                with far:
                    assert far.recv(5) == b"hello"


def test_it_ends_with_the_process_that_started_it() -> None:
    code = (
        "from shoal.sim.shaped.forwarder import Forwarder\n"
        "from shoal.sim.shaped.shaping import Shaping\n"
        f"paths = Forwarder(Shaping.from_json({shaping().to_json()!r})).__enter__()\n"
        "print(paths._process.pid, flush=True)\n"
        "input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        descriptor = os.pidfd_open(int(parent.stdout.readline()))
        try:
            parent.send_signal(signal.SIGKILL)
            assert select.select([descriptor], [], [], 30)[0], "the forwarding process lives on"
        finally:
            os.close(descriptor)


def test_commands_after_its_end_say_so() -> None:
    paths = Forwarder(shaping())
    with paths:
        assert paths.carried().bytes == {}
        assert paths._process is not None
        paths._process.kill()
        paths._process.wait()
        with pytest.raises(ClusterError, match="not running"):
            paths.part("a", "b")
    with pytest.raises(ClusterError):
        paths.check()


def test_a_burst_comes_at_once_and_what_is_behind_it_at_the_rate() -> None:
    burst, rest, rate = 300_000, 100_000, 2e5
    n = len(NAMES)
    bucket = replace(shaping(rate), burst=((burst,) * n,) * n)
    with Forwarder(bucket) as paths, contextlib.ExitStack() as stack:
        near, far = Ends(paths, stack).joined("a", "b")
        sent = data(burst + rest, seed=5)
        talking = threading.Thread(target=near.sendall, args=(sent,))
        began, got, first_s = time.monotonic(), bytearray(), 0.0
        talking.start()
        while len(got) < len(sent):
            got += far.recv(65536)
            if not first_s and len(got) >= burst:
                first_s = time.monotonic() - began
        all_s = time.monotonic() - began
        talking.join()
    assert bytes(got) == sent
    assert first_s < 0.5 * burst / rate, "as on a path without a bucket"
    assert all_s > 0.9 * rest / rate, "as on a path without a rate"
