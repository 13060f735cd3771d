"""The wire: the gRPC transport against a bare TCP socket and a memcpy, between two processes.

Everything of the real transport is measured: frames, checksums, credits, acknowledgements. Each
round takes every way in turn, so that a slow minute of the machine hits all of them; a ratio is the
median over the rounds of the ratio within a round. Receive buffers are warm on both ways.

Copies of a tensor on its way (the checksum reads it once more on each side):
memcpy  tensor -> buffer                                                                   1
tcp     tensor -> kernel -> buffer                                                         2
grpc    tensor -> message -> gRPC's slice -> kernel -> gRPC's slices -> message -> buffer  6
"""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import statistics
import time
from multiprocessing.connection import Connection as Pipe

import grpc
import numpy as np
from table import Figure, arguments, report

from shoal.dag.flow import Role
from shoal.dag.graph import TensorSpec
from shoal.net.frame import FrameKey, Payload
from shoal.net.grpc_transport import CHANNEL_OPTIONS, GrpcTransport
from shoal.net.transport import FrameAcknowledged, FrameArrived, TransportEvent

SIZES = {"64KiB": 1 << 16, "1MiB": 1 << 20, "16MiB": 1 << 24, "256MiB": 1 << 28}
RUN_BYTES = 256 << 20
"""Bytes of one measured transfer; at least one tensor."""
SLOTS = 4
"""Frames that may be under way at once; for TCP the kernel's buffers decide."""
ROUND_TRIPS = 50


class Node:
    """A peer that measures (near) or gives back what it is asked for (far)."""

    def __init__(self, me: str, other: str) -> None:
        self.me, self.other = me, other
        self.transport = GrpcTransport(me, "boot", self._on_event)
        self.count = 0
        self._acknowledged = 0
        self._arrived = 0
        self._event = asyncio.Event()

    def _on_event(self, event: TransportEvent) -> None:
        match event:
            case FrameAcknowledged():
                self._acknowledged += 1
            case FrameArrived(arrived):
                self._arrived += 1
                self.transport.release(self.other, arrived.key)
                if arrived.key.role == Role.PROBE and self.me == "far":
                    echo = Payload("raw/1", b"", arrived.spec, (arrived.data,))
                    self.send(echo, Role.PROBE)
        self._event.set()

    def send(self, payload: Payload, role: Role) -> None:
        self.count += 1
        key = FrameKey("bench", 1, self.count, role, 0, 0, "x", self.me, self.other)
        self.transport.send(self.other, key, payload)

    async def acknowledged(self, count: int) -> None:
        while self._acknowledged < count:
            self._event.clear()
            await self._event.wait()

    async def arrived(self, count: int) -> None:
        while self._arrived < count:
            self._event.clear()
            await self._event.wait()

    def expect(self) -> None:
        self.transport.expect(self.other)
        for role in Role:
            self.transport.allow(self.other, role, SLOTS)


def payload_of(tensor: np.ndarray) -> Payload:
    return Payload("raw/1", b"", TensorSpec((tensor.nbytes,), "uint8"), (tensor.data,))


def far(pipe: Pipe) -> None:
    """The other process: the gRPC transport until told to stop, a TCP socket in between."""
    asyncio.run(_far(pipe))


async def _far(pipe: Pipe) -> None:
    node = Node("far", "near")
    server = grpc.aio.server(options=CHANNEL_OPTIONS)
    node.transport.attach(server)
    port = server.add_insecure_port("127.0.0.1:0")
    listener = socket.create_server(("127.0.0.1", 0))
    loop = asyncio.get_running_loop()
    async with node.transport:
        await server.start()
        node.expect()
        pipe.send((port, listener.getsockname()[1]))
        connection, _ = await loop.run_in_executor(None, listener.accept)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await loop.run_in_executor(None, _tcp_far, connection)
        await server.stop(None)


def _tcp_far(connection: socket.socket) -> None:
    """Takes (size, count, echo) and then that; answers one byte, or the bytes themselves."""
    buffers: dict[int, memoryview] = {}
    order = memoryview(bytearray(24))
    while _receive(connection, order):
        size, count, echo = np.frombuffer(order, np.int64).tolist()
        buffer = buffers.setdefault(size, memoryview(np.zeros(size, np.uint8)))
        for _ in range(count):
            _receive(connection, buffer)
            if echo:
                connection.sendall(buffer)
        if not echo:
            connection.sendall(b"!")


def _receive(connection: socket.socket, buffer: memoryview) -> bool:
    have = 0
    while have < buffer.nbytes:
        got = connection.recv_into(buffer[have:])
        if not got:
            return False
        have += got
    return True


class Near:
    """The process that measures; every method gives seconds."""

    def __init__(self, node: Node, connection: socket.socket) -> None:
        self.node, self.connection = node, connection

    def memcpy(self, tensor: np.ndarray, buffer: np.ndarray, count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            np.copyto(buffer, tensor)
        return time.perf_counter() - start

    def tcp(self, tensor: np.ndarray, count: int) -> float:
        start = time.perf_counter()
        self._order(tensor.nbytes, count, echo=False)
        for _ in range(count):
            self.connection.sendall(tensor.data)
        self.connection.recv(1)
        return time.perf_counter() - start

    async def grpc(self, tensor: np.ndarray, count: int) -> float:
        payload, before = payload_of(tensor), self.node._acknowledged
        start = time.perf_counter()
        for _ in range(count):
            self.node.send(payload, Role.ACTIVATION)
        await self.node.acknowledged(before + count)
        return time.perf_counter() - start

    def tcp_round_trip(self, tensor: np.ndarray, buffer: np.ndarray) -> float:
        times = []
        self._order(tensor.nbytes, ROUND_TRIPS, echo=True)
        for _ in range(ROUND_TRIPS):
            start = time.perf_counter()
            self.connection.sendall(tensor.data)
            _receive(self.connection, buffer.data)
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    async def grpc_round_trip(self, tensor: np.ndarray) -> float:
        times = []
        for _ in range(ROUND_TRIPS):
            before, start = self.node._arrived, time.perf_counter()
            self.node.send(payload_of(tensor), Role.PROBE)
            await self.node.arrived(before + 1)
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    def _order(self, size: int, count: int, echo: bool) -> None:
        self.connection.sendall(np.array([size, count, echo], np.int64).tobytes())


async def measure(near: Near, rounds: int, sizes: dict[str, int]) -> list[Figure]:
    figures = []
    for name, size in sizes.items():
        tensor = np.random.default_rng(0).integers(0, 256, size, np.uint8)
        buffer = np.zeros(size, np.uint8)
        count = max(1, RUN_BYTES // size)
        await near.grpc(tensor, min(count, 2 * SLOTS))  # warms buffers and windows
        near.tcp(tensor, 1)
        rows = []
        for _ in range(rounds):
            rows.append(
                (
                    near.memcpy(tensor, buffer, count),
                    near.tcp(tensor, count),
                    await near.grpc(tensor, count),
                )
            )
        rates = [[size * count / seconds / 1e6 for seconds in row] for row in rows]
        for i, way in enumerate(("memcpy", "tcp", "grpc")):
            rate = statistics.median(row[i] for row in rates)
            figures.append(Figure(f"{way}_MBps_{name}", rate, "MB/s", "higher"))
        ratio = statistics.median(row[2] / row[1] for row in rates)
        figures.append(Figure(f"grpc_over_tcp_{name}", ratio, "ratio", "higher"))
    small = np.zeros(1 << 16, np.uint8)
    trips = [
        (near.tcp_round_trip(small, small.copy()), await near.grpc_round_trip(small))
        for _ in range(rounds)
    ]
    tcp_s, grpc_s = (statistics.median(column) for column in zip(*trips, strict=True))
    figures.append(Figure("tcp_rtt_ms_64KiB", tcp_s * 1e3, "ms", "lower"))
    figures.append(Figure("rtt_ms_64KiB", grpc_s * 1e3, "ms", "lower"))
    return figures


async def run(rounds: int, sizes: dict[str, int]) -> list[Figure]:
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=far, args=(theirs,))
    process.start()
    try:
        grpc_port, tcp_port = pipe.recv()
        node = Node("near", "far")
        with socket.create_connection(("127.0.0.1", tcp_port)) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            async with node.transport:
                node.transport.dial("far", f"127.0.0.1:{grpc_port}", 1)
                for role in Role:
                    node.transport.allow("far", role, SLOTS)
                return await measure(Near(node, connection), rounds, sizes)
    finally:
        process.join(10)
        process.kill()


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds of each size")
    parser.add_argument("--only", choices=SIZES, help="one size instead of all")
    options = parser.parse_args()
    chosen = {k: v for k, v in SIZES.items() if options.only in (None, k)}
    found = asyncio.run(run(options.rounds, chosen))
    report("transport", found, options.json)
