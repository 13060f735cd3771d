"""One port for everything: looks at how a connection begins, and passes it on.

begins with                         goes to
----------------------------------  --------------------------------------------------------
a TLS hello for "door.shoal"        the server that asks for no certificate: joining
a TLS hello for a peer's name       that peer, by the relay
a TLS hello that offers HTTP/1.1,   the page and its metrics (`page/`), if the broker has one
  or names no protocol at all
any other TLS hello                 the server that demands a certificate: everything else
"SHOAL-RELAY TICKET"                who dialled the peer that now comes, by the relay
a libp2p greeting                   the node of the swarm's directory, if the broker has one
"GET /authority.pem"                answered here: the certificate that a token pins, which is
                                    public, with the date, which tells of clocks that differ
another request of HTTP             the page without TLS, for this host's own user; others are told
                                    where it is (`clear.py`)
anything else                       closed; an older TLS is told that it is too old

gRPC's server cannot make a client certificate optional, and speaks to no browser: hence two of
them and the page's behind this, on Unix sockets in a private folder. Nothing is decrypted here; a
connection is passed on byte by byte, and its end is passed on too.

Strangers are kept cheap: a hello must be whole within HELLO_S and HELLO_BYTES, so many connections
may be open, and an address that knocks at the door or the page too often waits.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import time
from collections import Counter
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

from ....net.identity.names import DOOR_NAME, PartyRole
from ....net.knocks import RateLimiter
from ....net.local import is_loopback, listening
from ....net.web.pump import BUFFER_BYTES, Stream, close, join
from .clear import answer, whole_request
from .hello import HelloError, TooOldError, read_hello
from .reach import socket_name
from .relay import Relay

__all__ = ["MultiplexerLimits", "PageSockets", "PortMultiplexer", "RateLimiter", "source_of"]

log = logging.getLogger(__name__)

_TLS_HANDSHAKE = 0x16
_TOO_OLD = bytes.fromhex("15030300020246")
"""A fatal alert, protocol_version (RFC 8446, section 6)."""
_WAITING_CONNECTIONS = 512
_TOLD, _TOLD_PER_S = 3, 0.1
"""Lines of the log about one address that knocks too often: in a row, and then per second."""
_PEERS = f".{PartyRole.PEER.value}.shoal"
_TICKET = b"SHOAL-RELAY "
_LIBP2P = b"\x13/mul"
"""The beginning of b"\\x13/multistream/1.0.0\\n"."""


@dataclass(frozen=True, kw_only=True)
class MultiplexerLimits:
    """What a stranger may cost."""

    hello_s: float = 5.0
    """For the first message to be whole; slow drips end here."""
    hello_bytes: int = 16 * 1024
    """Of the first message; a TLS hello has 300 to 2,000."""
    most_connections: int = 8192
    """Open at once; each takes three descriptors and up to half a MiB while it is held up."""
    of_an_address: int = 512
    """Of these, from one address: a house of GPUs, with its relayed links."""
    knocks: int = 256
    """Joins and relayed dials in a row from one address: a house of GPUs behind one router."""
    knocks_per_s: float = 4.0
    """Afterwards."""
    most_addresses: int = 10_000
    """Whose knocks are counted; the ones longest ago are forgotten."""
    page_connections: int = 256
    """To the page, open at once; each is one request, and a page that is looked at holds one."""
    page_of_an_address: int = 32
    """Of these, from one address: an office."""
    page_knocks: int = 128
    """Requests to the page in a row from one address: opening it takes three."""
    page_knocks_per_s: float = 4.0
    """Afterwards."""
    page_s: float = 3600.0
    """The longest answer of the page; a browser that still looks asks again by itself."""


def source_of(address: str) -> str:
    """What counts as one address: an IPv4 address, or the network of an IPv6 one (its first 64
    bits), of which a host can have any number."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if found.version == 4:
        return address
    return str(ipaddress.ip_network((found, 64), strict=False))


class PageSockets(NamedTuple):
    """Where the page is served behind the front, with TLS and without."""

    tls: Path
    plain: Path


class PortMultiplexer:
    """`async with PortMultiplexer(host, port, main=…, door=…, authority=PEM) as front:` listens at
    `front.port` until the block ends. Raises OSError when the port cannot be had."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        main: Path,
        door: Path,
        authority: bytes,
        relay: Relay,
        swarm: int = 0,
        page: PageSockets | None = None,
        limits: MultiplexerLimits | None = None,
    ) -> None:
        """`swarm`: the loopback port of the directory's node; 0: there is none. `page` None: there
        is none."""
        self._host, self.port = host, port
        self._swarm = swarm
        self._main, self._door, self._authority = main, door, authority
        self._relay = relay
        self.limits = limits or MultiplexerLimits()
        many = self.limits.most_addresses
        self._knocks = RateLimiter(self.limits.knocks, self.limits.knocks_per_s, many)
        self._told = RateLimiter(_TOLD, _TOLD_PER_S, many)
        self._page = page
        self._page_knocks = RateLimiter(
            self.limits.page_knocks, self.limits.page_knocks_per_s, many
        )
        self._open: Counter[str] = Counter()  # by source
        self._open_pages: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        """Connections that were closed without being passed on, by the reason."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._passed = 0  # connections, to the servers behind

    async def __aenter__(self) -> Self:
        open_ = listening(self._host, self.port, _WAITING_CONNECTIONS)
        self.port = int(open_[0].getsockname()[1])
        self._servers = [
            await asyncio.start_server(self._connected, sock=s, limit=BUFFER_BYTES) for s in open_
        ]
        return self

    async def __aexit__(self, *error: object) -> None:
        for server in self._servers:
            server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        source = source_of(str((writer.get_extra_info("peername") or ("?",))[0]))
        self._open[source] += 1
        try:
            few = self._open[source] <= self.limits.of_an_address
            if few and self._open.total() <= self.limits.most_connections:
                _keep_alive(writer)
                await self._pass_on(reader, writer, source)
            else:
                self.refused["connections"] += 1
        except (HelloError, asyncio.LimitOverrunError):
            self.refused["hello"] += 1
        except (FileNotFoundError, ConnectionRefusedError) as error:
            self.refused["inner"] += 1
            if self._told.allowed("inner", time.monotonic()):
                log.error(
                    "sockets_gone why=%s: the servers behind the port cannot be reached any "
                    "more, so that nobody can attach: start the broker again",
                    error,
                )
        except (OSError, asyncio.IncompleteReadError):
            pass  # a stranger, or one that went away: nothing is owed
        except asyncio.CancelledError:
            pass  # the front closes
        finally:
            _less(self._open, source)
            self._tasks.discard(task)
            close((reader, writer))

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, source: str
    ) -> None:
        line, hello, request = b"", b"", None
        try:
            async with asyncio.timeout(self.limits.hello_s):
                first = await reader.readexactly(5)
                if first == _TICKET[:5]:
                    line = first + await reader.readuntil(b"\n")
                elif first[0] == _TLS_HANDSHAKE:
                    hello = await self._whole_hello(first, reader)
                elif first != _LIBP2P or not self._swarm:
                    request = await whole_request(first, reader, self.limits.hello_bytes)
        except TimeoutError:
            self.refused["time"] += 1
            return
        if request is not None:
            host = str((writer.get_extra_info("peername") or ("?",))[0])
            if self._page is not None and not request.is_ours and is_loopback(host):
                await self._look((reader, writer), request.whole, self._page.plain, source)
                return
            writer.write(answer(request, self._authority, page=self._page is not None))
            await writer.drain()
            return
        if line:
            ticket = line.removeprefix(_TICKET).strip().decode("ascii", "replace")
            await self._relay.answered(ticket, (reader, writer))
            return
        if not hello:
            if self._may_knock(source):
                node = asyncio.open_connection("127.0.0.1", self._swarm, limit=BUFFER_BYTES)
                await _join(first, (reader, writer), node)
            return
        try:
            name, http = read_hello(hello)
        except TooOldError:
            writer.write(_TOO_OLD)
            raise
        if http and self._page is not None:
            await self._look((reader, writer), hello, self._page.tls, source)
            return
        door, relayed = name == DOOR_NAME, name.endswith(_PEERS)
        if (door or relayed) and not self._may_knock(source):
            return
        if relayed:
            await self._relay.dialled(name, hello, (reader, writer), source)
            return
        path = self._door if door else self._main
        outer = (reader, writer)
        host = str((writer.get_extra_info("peername") or ("?",))[0])
        self._passed += 1
        await _join(hello, outer, _dial_unix(path, socket_name(self._passed, host)))

    async def _whole_hello(self, first: bytes, reader: asyncio.StreamReader) -> bytes:
        size = int.from_bytes(first[3:5], "big")
        if size > self.limits.hello_bytes:
            raise HelloError(f"a hello of {size} bytes: expected {self.limits.hello_bytes}")
        return first + await reader.readexactly(size)

    async def _look(self, outer: Stream, first: bytes, path: Path, source: str) -> None:
        """One request to the page."""
        pages = self._open_pages
        few = pages[source] < self.limits.page_of_an_address
        if not few or pages.total() >= self.limits.page_connections:
            self.refused["page_connections"] += 1
            return
        if not self._page_knocks.allowed(source, time.monotonic()):
            self.refused["page_knocks"] += 1
            return
        pages[source] += 1
        try:
            async with asyncio.timeout(self.limits.page_s):
                inner = asyncio.open_unix_connection(path, limit=BUFFER_BYTES)
                await _join(first, outer, inner)
        finally:
            _less(pages, source)

    def _may_knock(self, source: str) -> bool:
        now = time.monotonic()
        if self._knocks.allowed(source, now):
            return True
        self.refused["knocks"] += 1
        if self._told.allowed(source, now):
            log.warning("too_many_knocks address=%s: closed; it may knock again soon", source)
        return False

    def __repr__(self) -> str:
        return f"<PortMultiplexer on port {self.port}, {self._open.total()} connections>"


async def _dial_unix(path: Path, name: str) -> Stream:
    """A connection whose near end has a name, beside `path`, which tells the server who is there.
    Raises OSError."""
    own = socket.socket(socket.AF_UNIX)
    near = path.with_name(name)
    try:
        own.setblocking(False)
        own.bind(str(near))
        try:
            await asyncio.get_running_loop().sock_connect(own, str(path))
        finally:
            near.unlink()  # the other end has read it
        return await asyncio.open_unix_connection(sock=own, limit=BUFFER_BYTES)
    except BaseException:
        own.close()
        raise


async def _join(first: bytes, outer: Stream, dialled: Awaitable[Stream]) -> None:
    """Passes on what was read already, and then everything. Raises OSError."""
    inner = await dialled
    try:
        inner[1].write(first)
        await join(outer, inner)
    finally:
        close(inner)


def _less(counts: Counter[str], source: str) -> None:
    counts[source] -= 1
    if not counts[source]:
        del counts[source]


def _keep_alive(writer: asyncio.StreamWriter) -> None:
    """A host that vanished without a word is noticed by the kernel, if by nobody else."""
    if (found := writer.get_extra_info("socket")) is not None:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
