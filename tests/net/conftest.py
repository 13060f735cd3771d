"""Small worlds of peers that only have a transport: on the in-memory twin, on gRPC, and on gRPC
with mutual TLS.

`world` runs a test on all three. A test says what happens, `await world.until(...)` waits for it;
no test sleeps: the memory world runs its queue, the gRPC worlds wait for the next event.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import ChainMap
from collections.abc import AsyncIterator, Callable, MutableMapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import grpc
import pytest
import torch

from shoal.compression.codec import RAW
from shoal.dag.ir.graph import TensorSpec
from shoal.dag.schedule.flow import Role
from shoal.net.identity.authority import Authority
from shoal.net.identity.credential import Credential, server_credentials
from shoal.net.identity.enroll import channel_options
from shoal.net.identity.names import Party, PartyRole, dns_name
from shoal.net.links.frame import Arrived, FrameKey, Payload
from shoal.net.links.messages import Message, decode, written
from shoal.net.links.transport import (
    FrameAcknowledged,
    FrameArrived,
    LinkDown,
    LinkRefused,
    LinkUp,
    Transport,
    TransportEvent,
)
from shoal.net.transports.grpc_transport import CHANNEL_OPTIONS, SERVER_OPTIONS, GrpcTransport
from shoal.net.transports.memory import MemoryNetwork, steady


@dataclass
class Peer:
    """One peer of a world: its transport and what it was told."""

    name: str
    transport: Transport = field(init=False)
    events: list[TransportEvent] = field(default_factory=list)
    encodes: int = 0
    on_event: Callable[[TransportEvent], None] = lambda event: None

    def key(self, to: str, role: Role, microbatch: int, port: str = "x") -> FrameKey:
        return FrameKey("run", 1, 0, role, microbatch, 1, port, self.name, to)

    def send(self, to: str, tensor: torch.Tensor | int, role=Role.ACTIVATION, microbatch=0):
        """Encodes (an int: that many bytes) and sends; returns the key."""
        if isinstance(tensor, int):
            tensor = torch.arange(tensor, dtype=torch.int64).to(torch.uint8)
        self.encodes += 1
        encoded = RAW.encode(tensor)
        spec = TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        key = self.key(to, role, microbatch)
        self.transport.send(to, key, Payload("raw/1", encoded.header, spec, encoded.buffers))
        return key

    @property
    def arrived(self) -> list[Arrived]:
        return [e.arrived for e in self.events if isinstance(e, FrameArrived)]

    @property
    def arrived_keys(self) -> list[FrameKey]:
        return [a.key for a in self.arrived]

    @property
    def acknowledged(self) -> list[FrameKey]:
        return [e.key for e in self.events if isinstance(e, FrameAcknowledged)]

    @property
    def refusals(self) -> list[str]:
        return [e.why for e in self.events if isinstance(e, LinkRefused)]

    def ups(self, peer: str) -> int:
        return sum(isinstance(e, LinkUp) and e.peer == peer for e in self.events)

    def downs(self, peer: str) -> int:
        return sum(isinstance(e, LinkDown) and e.peer == peer for e in self.events)


class Outsider:
    """A hand-made dialler: says any bytes, keeps what it hears."""

    def __init__(self) -> None:
        self.heard: list[Message] = []
        self.ended = False

    def say(self, *messages: bytes) -> None:
        raise NotImplementedError

    def hang_up(self) -> None:
        raise NotImplementedError


class World:
    """What all worlds share."""

    def __init__(self) -> None:
        self.peers: dict[str, Peer] = {}

    async def join(self, name: str, boot: str = "1", max_frame_bytes: int = 1 << 30) -> Peer:
        raise NotImplementedError

    async def dial(self, a: Peer, b: Peer, generation: int = 1) -> None:
        raise NotImplementedError

    async def pair(self, slots: int = 100) -> tuple[Peer, Peer]:
        """Peers a and b; a has dialled b, every role has slots both ways, the link is up."""
        a, b = await self.join("a"), await self.join("b")
        await self.connect(a, b, slots)
        return a, b

    async def connect(self, a: Peer, b: Peer, slots: int = 100) -> None:
        b.transport.expect(a.name)
        await self.dial(a, b)
        for role in Role:
            a.transport.allow(b.name, role, slots)
            b.transport.allow(a.name, role, slots)
        await self.until(lambda: a.ups(b.name) > 0 and b.ups(a.name) > 0)

    async def until(self, condition: Callable[[], bool]) -> None:
        raise NotImplementedError

    async def settle(self, a: Peer, b: Peer) -> None:
        """Returns when all that could go on the link has arrived both ways, but for snapshots: a
        probe, which goes last, went each way and was acknowledged. Needs two slots for probes."""
        for _ in range(2):
            for x, y in ((a, b), (b, a)):
                self._probes = getattr(self, "_probes", 0) + 1
                key = x.send(y.name, 1, Role.PROBE, self._probes)
                await self.until(lambda x=x, key=key: key in x.acknowledged)
                y.transport.release(x.name, key)

    def cut(self, a: Peer, b: Peer) -> None:
        """Breaks the connection; it may be dialled again."""
        raise NotImplementedError

    async def outsider(self, to: Peer, name: str = "out") -> Outsider:
        """`name`: whom its certificate names, where there are certificates."""
        raise NotImplementedError

    async def crash(self, peer: Peer) -> None:
        """The process of this peer ends; its name may join again with another boot id."""
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError

    def _peer(self, name: str) -> Peer:
        self.peers[name] = peer = Peer(name)
        return peer


class MemoryWorld(World):
    """A queue of calls on a clock of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self.network = MemoryNetwork(self, steady(0.01, 100e6))

    def after(self, delay_s: float, callback: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + delay_s, next(self._count), callback))

    async def join(self, name, boot="1", max_frame_bytes=1 << 30):
        peer = self._peer(name)

        def on_event(event):
            peer.events.append(event)
            peer.on_event(event)

        peer.transport = self.network.transport(
            name, boot, on_event, max_frame_bytes=max_frame_bytes
        )
        return peer

    async def dial(self, a, b, generation=1):
        a.transport.dial(b.name, b.name, generation)

    async def until(self, condition):
        limit = self.now + 1000
        while not condition():
            assert self._queue, "nothing more will happen"
            self.now, _, callback = heapq.heappop(self._queue)
            assert self.now < limit, "1000 virtual seconds passed"
            callback()

    def cut(self, a, b):
        assert self.network.break_link(a.name, b.name) > 0

    async def outsider(self, to, name="out"):
        return MemoryOutsider(self, to)

    async def crash(self, peer):
        peer.transport.close()

    async def close(self):
        for peer in self.peers.values():
            peer.transport.close()


class MemoryOutsider(Outsider):
    """Stands where a Connection stands."""

    def __init__(self, world: MemoryWorld, to: Peer) -> None:
        super().__init__()
        self.peer, self.over, self._out = "outsider", False, []
        self._stream = world.network.open(self, to.name, self)

    @property
    def ready(self):
        return bool(self._out)

    def give(self, now):
        return (self._out[0], len(self._out.pop(0))) if self._out else None

    def hear(self, said, now):
        self.heard += decode(said if isinstance(said, bytes) else written(said))

    def closed(self, why):
        self.ended = True

    def say(self, *messages):
        self._out.extend(messages)
        self._stream.there.wake()

    def hang_up(self):
        self._stream.close("the outsider hung up")


class Signed(dict[str, Credential]):
    """The certificates of one authority for peers, by their ids; each is made when first asked for,
    as keys are not free."""

    def __init__(self) -> None:
        super().__init__()
        self.authority = Authority.new(datetime.now(UTC))

    def __missing__(self, peer: str) -> Credential:
        self[peer] = self.credential(peer)
        return self[peer]

    def credential(
        self,
        subject: str,
        role: PartyRole = PartyRole.PEER,
        *,
        days_ago: float = 0,
    ) -> Credential:
        """A new one, as if made so long ago; it lasts for a day."""
        made = datetime.now(UTC) - timedelta(days=days_ago)
        return self.authority.credential(Party(role, subject), made, timedelta(days=1))


@pytest.fixture(scope="session")
def signed() -> Signed:
    return Signed()


class GrpcWorld(World):
    """Real streams on loopback; each dial goes through a cable of its own, which can be cut.

    `credentials`: the newest one of each peer, which a test may change; None: plain text.
    """

    def __init__(self, credentials: MutableMapping[str, Credential] | None = None) -> None:
        super().__init__()
        self.credentials = credentials
        self._happened = asyncio.Event()
        self._servers: dict[str, grpc.aio.Server] = {}
        self._ports: dict[str, int] = {}
        self.cables: dict[frozenset[str], Cable] = {}
        self._outsiders: list[GrpcOutsider] = []

    async def join(self, name, boot="1", max_frame_bytes=1 << 30, allowed=lambda key: None):
        peer = self._peer(name)

        def on_event(event):
            peer.events.append(event)
            peer.on_event(event)
            self._happened.set()

        newest = None if self.credentials is None else lambda: self.credentials[name]
        peer.transport = GrpcTransport(
            name,
            boot,
            on_event,
            credential=newest,
            max_frame_bytes=max_frame_bytes,
            allowed=allowed,
        )
        server = grpc.aio.server(options=SERVER_OPTIONS)
        peer.transport.attach(server)
        address = f"127.0.0.1:{self._ports.get(name, 0)}"
        if newest is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, server_credentials(newest))
        assert port
        await server.start()
        self._servers[name], self._ports[name] = server, port
        return peer

    def address(self, peer: Peer) -> str:
        return f"127.0.0.1:{self._ports[peer.name]}"

    async def dial(self, a, b, generation=1):
        pair = frozenset((a.name, b.name))
        if pair not in self.cables:
            self.cables[pair] = Cable(self._ports[b.name])
            await self.cables[pair].open()
        a.transport.dial(b.name, f"127.0.0.1:{self.cables[pair].port}", generation)

    async def until(self, condition):
        async with asyncio.timeout(20):
            while not condition():
                self._happened.clear()
                await self._happened.wait()

    def cut(self, a, b):
        assert self.cables[frozenset((a.name, b.name))].cut() > 0

    async def outsider(self, to, name="out"):
        if self.credentials is None:
            return self.outsider_showing(to, None)
        return self.outsider_showing(to, self.credentials[name].for_channel())

    def outsider_showing(
        self, to: Peer, credentials: grpc.ChannelCredentials | None
    ) -> GrpcOutsider:
        """One with these credentials; None: in plain text."""
        address = self.address(to)
        if credentials is None:
            channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        else:
            name = dns_name(PartyRole.PEER, to.name)
            options = (*CHANNEL_OPTIONS, *channel_options(address, name))
            channel = grpc.aio.secure_channel(address, credentials, options=options)
        outsider = GrpcOutsider(channel, self._happened)
        self._outsiders.append(outsider)
        return outsider

    async def crash(self, peer):
        peer.transport._board.silence()
        await self._servers.pop(peer.name).stop(None)
        await peer.transport.__aexit__(None, None, None)

    async def close(self):
        for outsider in self._outsiders:
            await outsider.close()
        for name, server in self._servers.items():
            await self.peers[name].transport.__aexit__(None, None, None)
            await server.stop(None)
        for cable in self.cables.values():
            await cable.close()


class GrpcOutsider(Outsider):
    def __init__(self, channel: grpc.aio.Channel, happened: asyncio.Event) -> None:
        super().__init__()
        self.why = ""
        """What gRPC says of a stream that broke."""
        self._channel = channel
        self._call = self._channel.stream_stream("/shoal.v1.Peer/Frames")()
        self._out: asyncio.Queue[bytes] = asyncio.Queue()
        self._happened = happened
        self._tasks = [asyncio.create_task(self._write()), asyncio.create_task(self._read())]

    def say(self, *messages):
        for message in messages:
            self._out.put_nowait(message)

    def hang_up(self):
        self._call.cancel()

    async def _write(self):
        while True:
            message = await self._out.get()
            try:
                await self._call.write(message)
            except (grpc.RpcError, asyncio.InvalidStateError):
                return

    async def _read(self):
        try:
            while (message := await self._call.read()) is not grpc.aio.EOF:
                self.heard += decode(message)
                self._happened.set()
        except grpc.aio.AioRpcError as error:
            self.why = f"{error.details()} ({error.code().name})"
        except asyncio.CancelledError:
            if not self._call.cancelled():
                raise
        self.ended = True
        self._happened.set()

    async def close(self):
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close()


class Cable:
    """A TCP connection in two halves, with a hand on it."""

    def __init__(self, to_port: int) -> None:
        self._to_port = to_port
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._plug, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def cut(self) -> int:
        for writer in self._writers:
            writer.transport.abort()
        return len(self._writers)

    def stall(self) -> None:
        """Nothing is read from either side until `flow`."""
        self._flowing.clear()

    def flow(self) -> None:
        self._flowing.set()

    async def _plug(self, reader, writer) -> None:
        task = asyncio.current_task()
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._to_port)
        except OSError:
            writer.close()
            return
        ends = {writer, far_writer}
        self._writers |= ends
        try:
            await asyncio.gather(self._copy(reader, far_writer), self._copy(far_reader, writer))
        except OSError:
            pass
        finally:
            self._writers -= ends
            for end in ends:
                end.close()

    async def _copy(self, reader, writer) -> None:
        while data := await reader.read(1 << 16):
            await self._flowing.wait()
            writer.write(data)
            await writer.drain()
        writer.close()

    async def close(self) -> None:
        self.flow()
        self.cut()
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


WORLDS: dict[str, Callable[[Signed], World]] = {
    "memory": lambda signed: MemoryWorld(),
    "grpc": lambda signed: GrpcWorld(),
    "mtls": lambda signed: GrpcWorld(ChainMap({}, signed)),
}


@pytest.fixture(params=WORLDS)
async def world(request: pytest.FixtureRequest, signed: Signed) -> AsyncIterator[World]:
    world = WORLDS[request.param](signed)
    yield world
    await world.close()


@pytest.fixture(params=["grpc", "mtls"])
async def grpc_world(request: pytest.FixtureRequest, signed: Signed) -> AsyncIterator[GrpcWorld]:
    world = WORLDS[request.param](signed)
    yield world
    await world.close()


@pytest.fixture
async def mtls_world(signed: Signed) -> AsyncIterator[GrpcWorld]:
    world = WORLDS["mtls"](signed)
    yield world
    await world.close()


@pytest.fixture
async def memory_world() -> AsyncIterator[MemoryWorld]:
    world = MemoryWorld()
    yield world
    await world.close()
