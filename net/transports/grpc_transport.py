"""The transport over gRPC: `Peer.Frames`, one bidirectional stream for each connection.

Each dial has its own channel, so a stream that is held up by its reader (HTTP/2 flow control) holds
up nobody else. Messages are raw bytes with identity serialisers; a large tensor is never a protobuf
field. A connection is two tasks: one writes what the link hands out, and asks for the next message
only when gRPC has taken the last; one gives the link what comes. Both end when the connection is
over, the stream breaks, or the transport closes.

The copies of a tensor, each way through the kernel and back:
sender    tensor -> message (joined with its prefix) -> gRPC's slice -> kernel
receiver  kernel -> gRPC's slices -> message -> the frame's buffer, which the tensor then is
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any, Self

import grpc
import grpc.aio

from ..cap import Cap
from ..grpc_quirks import take_first
from ..identity.credential import Credential, shown_end
from ..identity.enroll import channel_to
from ..identity.names import Party, PartyRole, dns_name, party_of
from ..links.buffers import keep_heap_warm
from ..links.connection import Connection
from ..links.inbox import Allowed
from ..links.messages import MAX_CHUNK_BYTES, MAX_MESSAGE_BYTES
from ..links.switchboard import MAX_FRAME_BYTES, Switchboard, backoff_s
from ..links.transport import OnEvent, Transport

__all__ = ["CHANNEL_OPTIONS", "SERVER_OPTIONS", "GrpcTransport"]

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # HTTP/2's 16 KiB frames cost a twentieth of the throughput (measured, 16 MiB tensors).
    ("grpc.http2.max_frame_size", MAX_CHUNK_BYTES),
    # Windows grow to what a path holds: one of 100 Mbit/s and 3 s there and back is filled.
    ("grpc.http2.bdp_probe", 1),
    # Else channels to one address share a connection, and with it its flow control and backoff.
    ("grpc.use_local_subchannel_pool", 1),
    # An address that swallows what comes is given up after so long, and not after 20 s.
    ("grpc.min_reconnect_backoff_ms", 3_000),
    # A broker that was away for long is found again soon.
    ("grpc.max_reconnect_backoff_ms", 5_000),
    # A peer that vanished without a word is noticed within 20 s: whatever comes counts as life. A
    # ping that was on its way already has 30 s, for on a slow uplink that many links share its
    # answer waits behind half a megabyte in the kernel's buffers. gRPC's own limit is a minute.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 30_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)
"""For channels."""

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *CHANNEL_OPTIONS,
    # Strangers can come as far as a handshake. They get ten seconds for it (gRPC's own limit is two
    # minutes), and so many connections are open at a port in all; who comes when strangers have
    # taken these is closed at once, and comes by the relay, which has a way of its own in.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_allowed_incoming_connections", 1024),
    ("grpc.max_concurrent_streams", 128),
    # A member that ended its handshake may have no need of this peer: partners have a stream open.
    ("grpc.max_connection_idle_ms", 60_000),
    # Else a second process on the same port would get every other connection.
    ("grpc.so_reuseport", 0),
)
"""For the server that carries the service."""

_Caps = tuple["Cap | None", "Cap | None"]
_METHOD = "Frames"
_SERVICE = "shoal.v1.Peer"
_HELLO_S = 10.0
"""A stream on which no hello came for so long is closed."""
_FAREWELL_S = 2.0
"""A stream that we end is given so long to deliver what was said last."""
_STREAMS = 4096
"""Open incoming streams; more are turned away."""
_STREAMS_OF_ONE = 8
"""Of these, of one peer: the one that counts, and those that it replaces."""
_BROKEN = (
    grpc.RpcError,
    grpc.aio.InternalError,
    grpc.aio.UsageError,
    asyncio.InvalidStateError,
)
"""What gRPC raises when a stream breaks, depending on which side notices where."""


class GrpcTransport(Transport):
    """Carries links over gRPC. Used as `async with`, in one event loop.

    `attach(server)` adds the service to a server before that starts; without it the peer can only
    dial. `credential` gives the newest one, to show and to check others by; None: plain text, and
    nobody is checked. `resolve` gives the address to dial for one that was named, anew at each
    dial. `allowed` says how large a frame may be before its bytes come. `up` and
    `down`: the owner's caps, which all connections share; links are held up as by a slow network.
    `clock`: seconds since 1970, by which certificates end.
    """

    def __init__(
        self,
        peer: str,
        boot: str,
        on_event: OnEvent,
        *,
        credential: Callable[[], Credential] | None = None,
        resolve: Callable[[str], str] = lambda address: address,
        up: Cap | None = None,
        down: Cap | None = None,
        max_frame_bytes: int = MAX_FRAME_BYTES,
        allowed: Allowed = lambda _: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self.board = Switchboard(
            peer, boot, on_event, max_frame_bytes=max_frame_bytes, allowed=allowed
        )
        self._credential = credential
        self._resolve = resolve
        self._caps = up, down
        self._dials: dict[str, tuple[int, asyncio.Task[None]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # dials that end
        self._serving: Counter[str] = Counter()  # incoming streams, by who opened them
        self._incoming: dict[str, list[Connection]] = {}  # these streams, by where they come from

    async def __aenter__(self) -> Self:
        keep_heap_warm()
        return self

    async def __aexit__(self, *error: object) -> None:
        """Ends every connection and waits for the tasks; no event comes any more."""
        self.board.silence()
        for peer in list(self._dials):
            self.hang_up(peer)
        self.board.close("the transport closes")
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def attach(self, server: grpc.aio.Server) -> None:
        """Adds `Peer.Frames` to a server that was not started and was made with
        SERVER_OPTIONS."""
        method = grpc.stream_stream_rpc_method_handler(self._serve)
        handler = grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: method})
        server.add_generic_rpc_handlers((handler,))

    # The transport's interface.

    def dial(self, peer: str, address: str, generation: int, otherwise: str = "") -> None:
        """`otherwise`: where the peer may be reached as well; each failure changes to the other."""
        if peer in self._dials:
            before, task = self._dials[peer]
            if generation <= before:
                return
            self._stop(task)
        self.board.link(peer)
        task = asyncio.get_running_loop().create_task(
            self._keep_dialling(peer, (address, otherwise or address), generation),
            name=f"dial {peer}",
        )
        task.add_done_callback(_report)
        self._dials[peer] = (generation, task)

    def hang_up(self, peer: str) -> None:
        if peer in self._dials:
            self._stop(self._dials.pop(peer)[1])
        super().hang_up(peer)

    def carries(self, where: str) -> bool:
        """Whether a link uses a connection from `where`, as gRPC calls the other end's socket."""
        return any(c.greeted and not c.over for c in self._incoming.get(where, ()))

    def _stop(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.cancel()

    # Connections.

    async def _keep_dialling(self, peer: str, addresses: tuple[str, str], generation: int) -> None:
        failures = 0
        address, other = addresses
        while True:
            useful = await self._dial_once(peer, address, generation)
            failures = 0 if useful else failures + 1
            if not useful:
                address, other = other, address
            await asyncio.sleep(backoff_s(failures))

    async def _dial_once(self, peer: str, address: str, generation: int) -> bool:
        """One connection from dial to end; whether it moved a frame."""
        address = self._resolve(address)
        credential = None if self._credential is None else self._credential()
        # Whoever answers there must prove to be this very peer.
        name = dns_name(PartyRole.PEER, peer)
        channel = channel_to(address, credential, CHANNEL_OPTIONS, name)
        wake = asyncio.Event()
        async with channel:
            connection = self.board.outgoing(peer, generation, wake.set)
            try:
                call = channel.stream_stream(f"/{_SERVICE}/{_METHOD}")()
                await _carry(connection, call, wake, f"{peer} at {address}", self._caps)
                if not call.done():
                    # What we said last is read before the stream ends; a refusal, for instance.
                    await call.done_writing()
                    async with asyncio.timeout(_FAREWELL_S):
                        while await call.read() is not grpc.aio.EOF:
                            pass
            except (TimeoutError, *_BROKEN):
                pass  # it is over either way, and why was said
            finally:
                connection.closed("the dial was given up")
        return connection.useful

    async def _serve(
        self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """One incoming connection; gRPC cancels this when the stream breaks."""
        party = None if self._credential is None else party_of(context.auth_context())
        who, serving = str(party or ""), self._serving
        most = _STREAMS if self._credential is None else _STREAMS_OF_ONE
        if serving[who] >= most or serving.total() >= _STREAMS:
            why = f"{serving[who]} streams of {who or 'others'} are open, {serving.total()} in all"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, why)
        serving[who] += 1
        try:
            await self._serve_known(party, context)
        finally:
            serving[who] -= 1
            if not serving[who]:
                del serving[who]

    async def _serve_known(
        self, party: Party | None, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        proven = party.subject if party and party.role is PartyRole.PEER else None
        if self._credential is not None and proven is None:
            await take_first(context, _HELLO_S)
            why = f"{party or 'nobody'} is no peer: only peers exchange frames"
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, why)
        wake = asyncio.Event()
        connection = self.board.incoming(wake.set, proven)
        beside = self._incoming.setdefault(where := context.peer(), [])
        beside.append(connection)
        ends = self._ends_with_certificate(connection, context)
        try:
            await _carry(connection, context, wake, "the dialler", self._caps)
        finally:
            beside.remove(connection)
            if not beside:
                self._incoming.pop(where, None)
            if ends is not None:
                ends.cancel()
            connection.closed(f"{connection.peer} closed the connection")

    def _ends_with_certificate(
        self, connection: Connection, context: grpc.aio.ServicerContext[Any, Any]
    ) -> asyncio.TimerHandle | None:
        """A connection lasts no longer than the certificate of who opened it: a peer that was
        given a new one in time dials again with that, and the link goes on where it was."""
        if self._credential is None:
            return None
        left_s = shown_end(context.auth_context()) - self._clock()
        why = f"the certificate of {connection.proven} has ended: dial with a newer one"
        loop = asyncio.get_running_loop()
        return loop.call_later(max(0.0, left_s), connection.refuse, "certificate", why)


async def _carry(
    connection: Connection, stream: Any, wake: asyncio.Event, who: str, caps: _Caps
) -> None:
    """Writes and reads until the connection is over and has said its last words. A stream that
    breaks ends the connection; only what the owner's callback raised comes out of this."""
    up, down = caps
    reader = asyncio.get_running_loop().create_task(_read(connection, stream, who, down))
    reader.add_done_callback(lambda _: wake.set())
    try:
        while True:
            wake.clear()
            while (parts := connection.pull(time.monotonic())) is not None:
                message = b"".join(parts)
                if up is not None:
                    await up.take(len(message))
                await stream.write(message)
            if connection.over or reader.done():
                return
            await wake.wait()
    except _BROKEN as e:
        connection.closed(f"{who}: {_why(e)}")
    finally:
        if not reader.done():
            reader.cancel()
        await asyncio.wait([reader])
        if not reader.cancelled() and (error := reader.exception()) is not None:
            raise error


async def _read(connection: Connection, stream: Any, who: str, down: Cap | None) -> None:
    """Gives the connection what comes; ends it when nothing can come any more."""
    try:
        async with asyncio.timeout(_HELLO_S):
            message = await stream.read()
        while message is not grpc.aio.EOF and not connection.over:
            if down is not None:
                await down.take(len(message))
            connection.receive(message, time.monotonic())
            message = await stream.read()
        connection.closed(f"{who} closed the connection")
    except TimeoutError:
        connection.refuse("silent", f"no hello of {who} in {_HELLO_S:.0f} s")
    except _BROKEN as e:
        connection.closed(f"{who}: {_why(e)}")


def _report(task: asyncio.Task[None]) -> None:
    """A dial never ends by itself: what ended it is the owner's bug, and must be seen."""
    if not task.cancelled() and (error := task.exception()) is not None:
        task.get_loop().call_exception_handler(
            {"message": f"{task.get_name()} failed", "exception": error, "task": task}
        )


def _why(error: BaseException) -> str:
    """gRPC's own words, without its record of everything."""
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.details() or 'no details'} ({error.code().name})"
    return str(error) or type(error).__name__
