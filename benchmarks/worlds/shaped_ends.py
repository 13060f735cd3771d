"""Two processes with a shaped path between them, who measure what goes through it: by bare sockets,
and by the real transport with its frames, checksums, credits and acknowledgements.

The one that measures dials; the other one takes what comes, and says what arrived and when.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe

import grpc
import numpy as np

from shoal.dag.ir.graph import TensorSpec
from shoal.dag.schedule.flow import Role
from shoal.net.links.frame import FrameKey, Payload
from shoal.net.links.transport import FrameAcknowledged, FrameArrived, TransportEvent
from shoal.net.transports.grpc_transport import SERVER_OPTIONS, GrpcTransport
from shoal.sim.shaped.forwarder import Forwarder
from shoal.sim.shaped.shaping import Shaping

__all__ = ["Beside", "Path", "Stretch", "beside_snapshots", "grpc_path", "socket_path", "two_ends"]

NEAR, FAR = "near", "far"
PINGS = 11
PING_BYTES = 64
FRAME_BYTES = 16 << 20
SLOTS = 8
"""Frames of 16 MiB that may be under way: 128 MiB, more than any path here holds."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Bytes that had arrived at times, seconds since the first byte was sent."""

    seconds: tuple[float, ...]
    bytes: tuple[int, ...]

    def rate(self, start_s: float) -> float:
        """Bytes/s from the first arrival after `start_s` to the last one."""
        i = next(i for i, s in enumerate(self.seconds) if s >= start_s)
        return (self.bytes[-1] - self.bytes[i]) / (self.seconds[-1] - self.seconds[i])


@dataclass(frozen=True, slots=True)
class Path:
    """What was found of a path: seconds of a round trip, bytes/s, and how many of a hundred pieces
    the forwarding process delivered late for want of a core."""

    round_trip_s: float
    rate: float
    late: float


@dataclass(frozen=True, slots=True)
class Beside:
    """Seconds from sending a frame to its acknowledgement, alone and while snapshots go the same
    way; the share of the rate that these had; pieces that were late for want of a core, of all."""

    alone_s: float
    beside_s: float
    share: float
    late: float


def two_ends(rate: float, latency_s: float) -> Shaping:
    """A path with so many bytes/s and so much latency, both ways alike."""
    free = float("inf")
    return Shaping(
        names=(NEAR, FAR),
        latency_s=((0.0, latency_s), (latency_s, 0.0)),
        bandwidth=((free, rate), (rate, free)),
        up=(free, free),
        down=(free, free),
    )


# ---------------------------------------------------------------- the far end


def _far_socket(pipe: Pipe, port: int) -> None:
    """Sends pings back, then takes bytes until the stream ends, and says when they came."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen()
    pipe.send("ready")
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for _ in range(PINGS):
        connection.sendall(connection.recv(PING_BYTES, socket.MSG_WAITALL))
    buffer, came, seen = bytearray(1 << 20), 0, [(time.monotonic(), 0)]
    while got := connection.recv_into(buffer):
        came += got
        if (now := time.monotonic()) > seen[-1][0] + 0.02:
            seen.append((now, came))
    seen.append((time.monotonic(), came))
    pipe.send(seen)


def _far_grpc(pipe: Pipe, port: int) -> None:
    asyncio.run(_serve(pipe, port))


async def _serve(pipe: Pipe, port: int) -> None:
    """Sends probes back, and says of every other frame when it was whole."""
    node: Node | None = None
    seen: list[tuple[float, int]] = []

    def arrived(event: TransportEvent) -> None:
        assert node is not None
        if isinstance(event, FrameArrived):
            node.transport.release(NEAR, event.arrived.key)
            if event.arrived.key.role is Role.PROBE:
                node.send(bytes(event.arrived.data), Role.PROBE)
            else:
                before = seen[-1][1] if seen else 0
                seen.append((time.monotonic(), before + event.arrived.data.nbytes))

    node = Node(FAR, NEAR, arrived)
    server = grpc.aio.server(options=SERVER_OPTIONS)
    node.transport.attach(server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    async with node.transport:
        await server.start()
        node.transport.expect(NEAR)
        node.allow()
        pipe.send("ready")
        await asyncio.to_thread(pipe.recv)
        await server.stop(None)
    pipe.send(seen)


class Node:
    """One end of the real transport."""

    def __init__(self, me: str, other: str, on_event: Callable[[TransportEvent], None]) -> None:
        self.me, self.other = me, other
        self.transport = GrpcTransport(me, "boot", on_event)
        self.count = 0

    def allow(self) -> None:
        for role in Role:
            self.transport.allow(self.other, role, SLOTS)

    def send(self, data: bytes | np.ndarray, role: Role) -> None:
        self.count += 1
        view = (data.data if isinstance(data, np.ndarray) else memoryview(data)).cast("B")
        key = FrameKey("paths", 1, self.count, role, 0, 0, "x", self.me, self.other)
        spec = TensorSpec((view.nbytes,), "uint8")
        self.transport.send(self.other, key, Payload("raw/1", b"", spec, (view,)))


@contextmanager
def _far(end: Callable[[Pipe, int], None], port: int) -> Iterator[Pipe]:
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=end, args=(theirs, port), daemon=True)
    process.start()
    theirs.close()
    try:
        pipe.recv()
        yield pipe
    finally:
        process.join(5)
        process.kill()
        process.join()


# ---------------------------------------------------------------- measuring


def socket_path(rate: float, latency_s: float, seconds: float) -> tuple[Path, Stretch]:
    """A path as two bare sockets find it: pings, then a stream for so many seconds."""
    with (
        Forwarder(two_ends(rate, latency_s)) as paths,
        _far(_far_socket, paths.port(FAR)) as pipe,
    ):
        host, _, port = paths.address_for(NEAR, FAR).rpartition(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            trips: list[float] = []
            for _ in range(PINGS):
                began = time.monotonic()
                connection.sendall(b"p" * PING_BYTES)
                connection.recv(PING_BYTES, socket.MSG_WAITALL)
                trips.append(time.monotonic() - began)
            began, block = time.monotonic(), bytes(min(1 << 20, max(1 << 12, int(rate * 0.01))))
            while time.monotonic() < began + seconds:
                connection.sendall(block)
            connection.shutdown(socket.SHUT_WR)
            stream = _stretch(pipe.recv(), began)
        carried = paths.carried()
    # The first ping also waits for the connection to be there.
    found = Path(
        statistics.median(trips[1:]),
        stream.rate(latency_s + 0.25 * seconds),
        carried.late / max(1, carried.pieces),
    )
    return found, stream


def grpc_path(
    rate: float, latency_s: float, seconds: float, most_bytes: int
) -> tuple[Path, Stretch]:
    """The same by the real transport, in frames of at most 16 MiB: until so many bytes or seconds
    are over, whatever comes first; the rate is that of the second half."""
    return asyncio.run(_grpc_path(rate, latency_s, seconds, most_bytes))


async def _grpc_path(
    rate: float, latency_s: float, seconds: float, most_bytes: int
) -> tuple[Path, Stretch]:
    acknowledged, probes, woken = 0, 0, asyncio.Event()

    def on_event(event: TransportEvent) -> None:
        nonlocal acknowledged, probes
        if isinstance(event, FrameArrived):
            node.transport.release(FAR, event.arrived.key)
            probes += 1
        elif isinstance(event, FrameAcknowledged):
            acknowledged += 1
        woken.set()

    async def until(count: Callable[[], int], least: int) -> None:
        while count() < least:
            woken.clear()
            await woken.wait()

    node = Node(NEAR, FAR, on_event)
    with (
        Forwarder(two_ends(rate, latency_s)) as paths,
        _far(_far_grpc, paths.port(FAR)) as pipe,
    ):
        async with node.transport:
            node.transport.dial(FAR, paths.address_for(NEAR, FAR), 1)
            node.allow()
            trips: list[float] = []
            for _ in range(PINGS):
                began = time.monotonic()
                node.send(b"p" * PING_BYTES, Role.PROBE)
                await until(lambda: probes, len(trips) + 1)
                trips.append(time.monotonic() - began)
            # Frames of a twentieth of the time, so that there are some to count.
            size = int(min(FRAME_BYTES, max(1 << 16, rate * seconds / 40)))
            tensor = np.random.default_rng(0).integers(0, 256, size, np.uint8)
            began, sent, before = time.monotonic(), 0, acknowledged
            while time.monotonic() < began + seconds and sent * size < most_bytes:
                node.send(tensor, Role.ACTIVATION)
                sent += 1
                await until(lambda: acknowledged, before + sent - 2 * SLOTS + 1)
            await until(lambda: acknowledged, before + sent)
            pipe.send("stop")
            stream = _stretch(await asyncio.to_thread(pipe.recv), began)
        carried = paths.carried()
    found = Path(
        statistics.median(trips[1:]),
        stream.rate(stream.seconds[-1] / 2),
        carried.late / max(1, carried.pieces),
    )
    return found, stream


def beside_snapshots(rate: float, latency_s: float, seconds: float) -> Beside:
    """Frames of the training, 20 ms of the rate each, that meet snapshots on their link: one every
    quarter of a second, for so many seconds."""
    return asyncio.run(_beside_snapshots(rate, latency_s, seconds))


async def _beside_snapshots(rate: float, latency_s: float, seconds: float) -> Beside:
    done: dict[Role, int] = dict.fromkeys(Role, 0)
    woken = asyncio.Event()

    def on_event(event: TransportEvent) -> None:
        if isinstance(event, FrameAcknowledged):
            done[event.key.role] += 1
            woken.set()

    async def until(role: Role, least: int) -> None:
        while done[role] < least:
            woken.clear()
            await woken.wait()

    frame = np.zeros(int(rate * 0.02), np.uint8)
    snapshot = np.zeros(int(min(FRAME_BYTES, rate * 0.25)), np.uint8)

    async def trip_s() -> float:
        began = time.monotonic()
        node.send(frame, Role.ACTIVATION)
        await until(Role.ACTIVATION, done[Role.ACTIVATION] + 1)
        return time.monotonic() - began

    async def feed() -> None:
        sent = 0
        while measuring:
            node.send(snapshot, Role.SNAPSHOT)
            sent += 1
            await until(Role.SNAPSHOT, sent - SLOTS + 1)
        await until(Role.SNAPSHOT, sent)

    node, measuring = Node(NEAR, FAR, on_event), True
    with (
        Forwarder(two_ends(rate, latency_s)) as paths,
        _far(_far_grpc, paths.port(FAR)) as pipe,
    ):
        async with node.transport:
            node.transport.dial(FAR, paths.address_for(NEAR, FAR), 1)
            node.allow()
            alone = [await trip_s() for _ in range(PINGS)][1:]
            feeding = asyncio.create_task(feed())
            await asyncio.sleep(3.0 + 20 * latency_s)
            began, before, trips = time.monotonic(), done[Role.SNAPSHOT], []
            while time.monotonic() < began + seconds:
                trips.append(await trip_s())
                await asyncio.sleep(0.25)
            carried = (done[Role.SNAPSHOT] - before) * snapshot.nbytes
            share = carried / rate / (time.monotonic() - began)
            measuring = False
            await feeding
            pipe.send("stop")
            await asyncio.to_thread(pipe.recv)
        count = paths.carried()
    late = count.late / max(1, count.pieces)
    return Beside(statistics.median(alone), statistics.median(trips), share, late)


def _stretch(seen: list[tuple[float, int]], began: float) -> Stretch:
    """Both processes read the same clock: that of the machine."""
    return Stretch(tuple(t - began for t, _ in seen), tuple(n for _, n in seen))
