"""The wire: the gRPC transport, in plain text and with mutual TLS, against a bare TCP socket and a
memcpy, between two processes.

Everything of the real transport is measured: frames, checksums, credits, acknowledgements. Each
round takes every way in turn, so that a slow minute of the machine hits all of them; a ratio is the
median over the rounds of the ratio within a round. Receive buffers are warm on all ways. CPU
seconds are those of both ends together: what a byte costs, also where others use the cores.

Copies of a tensor on its way (the checksum reads it once more on each side):
memcpy  tensor -> buffer                                                                   1
tcp     tensor -> kernel -> buffer                                                         2
grpc    tensor -> message -> gRPC's slice -> kernel -> gRPC's slices -> message -> buffer  6
mtls    the same, and within gRPC into TLS records and out of them, on both sides
relay   mtls by the broker's port: twice as much kernel, and a process that passes bytes on
"""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import statistics
import time
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from multiprocessing.connection import Connection as Pipe

import grpc
import numpy as np

from shoal.benchmarks.links.transport_relay import answer_dials, relaying
from shoal.benchmarks.table import Figure, arguments, report
from shoal.dag.ir.graph import TensorSpec
from shoal.dag.schedule.flow import Role
from shoal.net.identity.authority import Authority
from shoal.net.identity.credential import Credential, server_credentials
from shoal.net.identity.names import Party, PartyRole
from shoal.net.links.frame import FrameKey, Payload
from shoal.net.links.transport import FrameAcknowledged, FrameArrived, TransportEvent
from shoal.net.transports.grpc_transport import SERVER_OPTIONS, GrpcTransport

SIZES = {"64KiB": 1 << 16, "1MiB": 1 << 20, "16MiB": 1 << 24, "256MiB": 1 << 28}
RUN_BYTES = 256 << 20
"""Bytes of one measured transfer; at least one tensor."""
SLOTS = 4
"""Frames that may be under way at once; for TCP the kernel's buffers decide."""
ROUND_TRIPS = 50
RATIOS = (
    ("grpc_over_tcp", "grpc", "tcp"),
    ("mtls_over_tcp", "mtls", "tcp"),
    ("mtls_over_plain", "mtls", "grpc"),
    ("relay_over_direct", "relay", "mtls"),
)
"""Of throughputs: (name, of which way, over which)."""


class Node:
    """A peer that measures (near) or gives back what it is asked for (far). `credential` None:
    plain text."""

    def __init__(self, me: str, other: str, credential: Credential | None) -> None:
        self.me, self.other = me, other
        newest = None if credential is None else lambda: credential
        self.transport = GrpcTransport(me, "boot", self._on_event, credential=newest)
        self._newest = newest
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

    def serve(self) -> tuple[grpc.aio.Server, int]:
        """A server that was not started, and its port."""
        server = grpc.aio.server(options=SERVER_OPTIONS)
        self.transport.attach(server)
        if self._newest is None:
            return server, server.add_insecure_port("127.0.0.1:0")
        return server, server.add_secure_port("127.0.0.1:0", server_credentials(self._newest))

    def expect(self) -> None:
        self.transport.expect(self.other)
        self._allow()

    def dial(self, port: int) -> None:
        self.transport.dial(self.other, f"127.0.0.1:{port}", 1)
        self._allow()

    def _allow(self) -> None:
        for role in Role:
            self.transport.allow(self.other, role, SLOTS)


def payload_of(tensor: np.ndarray) -> Payload:
    return Payload("raw/1", b"", TensorSpec((tensor.nbytes,), "uint8"), (tensor.data,))


def far(pipe: Pipe, from_relay: Pipe, credential: Credential) -> None:
    """The other process: all transports until told to stop, a TCP socket in between."""
    asyncio.run(_far(pipe, from_relay, credential))


async def _far(pipe: Pipe, from_relay: Pipe, credential: Credential) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    loop = asyncio.get_running_loop()
    ports = [listener.getsockname()[1]]
    async with AsyncExitStack() as stack:
        for known in (None, credential, credential):  # plain, direct, by relay
            node = Node("far", "near", known)
            server, port = node.serve()
            await stack.enter_async_context(node.transport)
            await server.start()
            stack.push_async_callback(server.stop, None)
            node.expect()
            ports.append(port)
        relayed: set[asyncio.Task[None]] = set()
        answer_dials(from_relay, ports[-1], relayed)
        pipe.send(ports)
        connection, _ = await loop.run_in_executor(None, listener.accept)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await loop.run_in_executor(None, _tcp_far, connection)


def _tcp_far(connection: socket.socket) -> None:
    """Takes (size, count, echo) and then that; answers one byte, or the bytes themselves."""
    buffers: dict[int, memoryview] = {}
    order = memoryview(bytearray(24))
    while _receive(connection, order):
        size, count, echo = np.frombuffer(order, np.int64).tolist()
        buffer = buffers.setdefault(size, np.zeros(size, np.uint8).data)
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

    def __init__(self, connection: socket.socket, far_pid: int) -> None:
        self.connection = connection
        self._far_clock = (~far_pid << 3) | 2  # as clock_getcpuclockid(3) of Linux makes it

    def cpu(self) -> float:
        """What both processes have computed so far."""
        return time.process_time() + time.clock_gettime(self._far_clock)

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

    async def grpc(self, node: Node, tensor: np.ndarray, count: int) -> float:
        payload, before = payload_of(tensor), node._acknowledged
        start = time.perf_counter()
        for _ in range(count):
            node.send(payload, Role.ACTIVATION)
        await node.acknowledged(before + count)
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

    async def grpc_round_trip(self, node: Node, tensor: np.ndarray) -> float:
        times = []
        for _ in range(ROUND_TRIPS):
            before, start = node._arrived, time.perf_counter()
            node.send(payload_of(tensor), Role.PROBE)
            await node.arrived(before + 1)
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    def _order(self, size: int, count: int, echo: bool) -> None:
        self.connection.sendall(np.array([size, count, echo], np.int64).tobytes())


async def measure(
    near: Near, nodes: dict[str, Node], rounds: int, sizes: dict[str, int]
) -> list[Figure]:
    figures = []
    for name, size in sizes.items():
        tensor = np.random.default_rng(0).integers(0, 256, size, np.uint8)
        buffer = np.zeros(size, np.uint8)
        count = max(1, RUN_BYTES // size)
        for node in nodes.values():
            await near.grpc(node, tensor, min(count, 2 * SLOTS))  # warms buffers and windows
        near.tcp(tensor, 1)
        rows = []
        for _ in range(rounds):
            row = {"memcpy": near.memcpy(tensor, buffer, count), "tcp": near.tcp(tensor, count)}
            for way, node in nodes.items():
                before = near.cpu()
                row[way] = await near.grpc(node, tensor, count)
                row[f"{way}_cpu"] = near.cpu() - before
            rows.append(row)
        gigabytes = size * count / 1e9
        for way in ("memcpy", "tcp", *nodes):
            seconds = statistics.median(row[way] for row in rows)
            figures.append(
                Figure(f"{way}_MBps_{name}", 1e3 * gigabytes / seconds, "MB/s", "higher")
            )
        for ratio, way, base in RATIOS:
            value = statistics.median(row[base] / row[way] for row in rows)
            figures.append(Figure(f"{ratio}_{name}", value, "ratio", "higher"))
        for way in nodes:
            cpu = statistics.median(row[f"{way}_cpu"] for row in rows) / gigabytes
            figures.append(Figure(f"{way}_cpu_s_per_GB_{name}", cpu, "s/GB", "lower"))
    small = np.zeros(1 << 16, np.uint8)
    trips = [
        (
            near.tcp_round_trip(small, small.copy()),
            *[await near.grpc_round_trip(node, small) for node in nodes.values()],
        )
        for _ in range(rounds)
    ]
    ways = ("tcp_rtt", "rtt", "mtls_rtt", "relay_rtt")
    for name, column in zip(ways, zip(*trips, strict=True), strict=True):
        figures.append(Figure(f"{name}_ms_64KiB", statistics.median(column) * 1e3, "ms", "lower"))
    return figures


def credentials() -> tuple[Credential, Credential]:
    """For near and far, of one authority."""
    now = datetime.now(UTC)
    authority = Authority.new(now)
    near, far = (
        authority.credential(Party(PartyRole.PEER, name), now, timedelta(days=1))
        for name in ("near", "far")
    )
    return near, far


async def run(rounds: int, sizes: dict[str, int]) -> list[Figure]:
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    ours, others = credentials()
    relay_here, relay_there = context.Pipe()
    relay_far, far_relay = context.Pipe()
    relay = context.Process(target=relaying, args=(relay_there, relay_far, "far"))
    process = context.Process(target=far, args=(theirs, far_relay, others))
    relay.start()
    process.start()
    try:
        tcp_port, plain_port, mtls_port, _ = pipe.recv()
        plain, mtls, relayed = (Node("near", "far", known) for known in (None, ours, ours))
        with socket.create_connection(("127.0.0.1", tcp_port)) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            async with plain.transport, mtls.transport, relayed.transport:
                plain.dial(plain_port)
                mtls.dial(mtls_port)
                relayed.dial(relay_here.recv())
                assert process.pid is not None, "it has started"
                near = Near(connection, process.pid)
                nodes = {"grpc": plain, "mtls": mtls, "relay": relayed}
                return await measure(near, nodes, rounds, sizes)
    finally:
        relay_here.send("end")
        relay.join(10)
        relay.kill()
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
