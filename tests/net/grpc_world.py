"""Peers on real streams on loopback, over cables that can be cut."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from datetime import UTC, datetime, timedelta

import grpc

from shoal.net.identity.authority import Authority
from shoal.net.identity.credential import Credential, server_credentials
from shoal.net.identity.enroll import channel_options
from shoal.net.identity.names import Party, PartyRole, dns_name
from shoal.net.links.messages import decode
from shoal.net.transports.grpc_transport import CHANNEL_OPTIONS, SERVER_OPTIONS, GrpcTransport

from .worlds import Outsider, Peer, World


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
        peer.transport.board.silence()
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
