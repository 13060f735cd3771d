"""The transport's in-memory twin: many peers in one process, on a clock of the caller's.

It runs the same links as gRPC; only the streams are modelled. A stream is two pipes. A pipe takes
one message at a time from its end, is busy while the message leaves, and delivers it later:

    carry(source, destination, size_bytes) -> (seconds until the next one may leave,
                                               seconds until this one has arrived)

Everything happens in calls of `schedule(delay_s, callback)`, so a queue of a few lines or the
simulated world's virtual clock drives it, in the same order for the same calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ..dag.flow import Role
from .connection import Connection
from .frame import FrameKey, Payload
from .switchboard import MAX_FRAME_BYTES, Switchboard, backoff_s
from .transport import OnEvent

__all__ = ["Carry", "MemoryNetwork", "MemoryTransport", "Tamper", "steady"]

Schedule = Callable[[float, Callable[[], None]], object]
"""Calls back once after that many seconds; calls of equal time in the order they were made."""

Carry = Callable[[str, str, int], tuple[float, float]]
Tamper = Callable[[str, str, bytes], bytes | None]
"""(source, destination, message) -> what arrives instead; None: the stream breaks there."""


def steady(latency_s: float = 0.0, bandwidth_bytes_per_s: float = float("inf")) -> Carry:
    """Every directed pair alike and on its own."""

    def carry(source: str, destination: str, size_bytes: int) -> tuple[float, float]:
        busy_s = size_bytes / bandwidth_bytes_per_s
        return busy_s, busy_s + latency_s

    return carry


class MemoryNetwork:
    """Where memory transports meet. An address is what its transport was given."""

    def __init__(
        self, schedule: Schedule, now: Callable[[], float], carry: Carry | None = None
    ) -> None:
        self.schedule = schedule
        self.now = now
        self.carry = carry or steady()
        self.tamper: Tamper | None = None
        """A fault for tests: sees and may change every message."""
        self._transports: dict[str, MemoryTransport] = {}
        self._streams: list[_Stream] = []
        self._parted: set[frozenset[str]] = set()  # never iterated

    def transport(
        self,
        peer: str,
        boot: str,
        on_event: OnEvent,
        *,
        address: str | None = None,
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> MemoryTransport:
        """A peer's end, reachable at `address` (its own name unless said otherwise). It takes the
        place of one that was there, which must be closed."""
        address = peer if address is None else address
        assert address not in self._transports, f"{address} is in use"
        board = Switchboard(peer, boot, on_event, max_frame_bytes=max_frame_bytes)
        self._transports[address] = transport = MemoryTransport(self, board, address)
        return transport

    def break_link(self, a: str, b: str, why: str = "the connection was cut") -> int:
        """Breaks the open streams between two peers, what is on the way included; they may dial
        again. Returns how many streams broke."""
        broken = [s for s in self._streams if s.joins(a, b)]
        for stream in broken:
            stream.close(why)
        return len(broken)

    def part(self, a: str, b: str) -> None:
        """Breaks their streams, and lets none be opened until `mend`."""
        self._parted.add(frozenset((a, b)))
        self.break_link(a, b, f"{a} and {b} are parted")

    def mend(self, a: str, b: str) -> None:
        self._parted.discard(frozenset((a, b)))

    def open(
        self, dialler: MemoryTransport, address: str, connection: Connection
    ) -> _Stream | None:
        """A stream to whoever is at the address; None when nobody can be reached there."""
        other = self._transports.get(address)
        if other is None or frozenset((dialler.peer, other.peer)) in self._parted:
            return None
        stream = _Stream(self, dialler, connection, other)
        self._streams.append(stream)
        return stream

    def closed(self, stream: _Stream) -> None:
        self._streams.remove(stream)

    def remove(self, transport: MemoryTransport) -> None:
        """The process at this address is gone."""
        del self._transports[transport.address]
        for stream in [s for s in self._streams if s.has(transport)]:
            stream.close(f"{transport.peer} is gone")


class MemoryTransport:
    """One peer's end of all its links; see Transport."""

    def __init__(self, network: MemoryNetwork, board: Switchboard, address: str) -> None:
        self._network = network
        self.board = board
        self.address = address
        self.peer = board.me
        self._dials: dict[str, _Dialler] = {}
        self._closed = False

    def dial(self, peer: str, address: str, generation: int) -> None:
        before = self._dials.get(peer)
        if before is not None:
            if generation <= before.generation:
                return
            before.stop()
        self._dials[peer] = _Dialler(self, self._network, peer, address, generation)

    def expect(self, peer: str) -> None:
        self.board.expect(peer)

    def hang_up(self, peer: str) -> None:
        if dialler := self._dials.pop(peer, None):
            dialler.stop()
        self.board.hang_up(peer)

    def send(self, to: str, key: FrameKey, payload: Payload) -> None:
        self.board.send(to, key, payload)

    def release(self, peer: str, key: FrameKey) -> None:
        self.board.release(peer, key)

    def allow(self, peer: str, role: Role, frames: int) -> None:
        self.board.allow(peer, role, frames)

    def close(self) -> None:
        """As if the process ended: no event comes any more, the other sides see streams break."""
        if self._closed:
            return
        self._closed = True
        for dialler in self._dials.values():
            dialler.stop()
        self.board.silence()
        self._network.remove(self)


class _Dialler:
    """Keeps a link up: dials, and dials again when the connection ended."""

    def __init__(
        self,
        transport: MemoryTransport,
        network: MemoryNetwork,
        peer: str,
        address: str,
        generation: int,
    ) -> None:
        self._transport, self._network = transport, network
        self._peer, self._address = peer, address
        self.generation = generation
        self._failures = 0
        self._stopped = False
        # The link exists at once, so that frames can be queued; the stream is opened in its turn.
        transport.board.link(peer)
        network.schedule(0.0, self._try)

    def stop(self) -> None:
        self._stopped = True

    def _try(self) -> None:
        if self._stopped:
            return
        pipe: list[_Pipe] = []
        connection = self._transport.board.outgoing(
            self._peer, self.generation, lambda: pipe[0].wake() if pipe else None
        )
        stream = self._network.open(self._transport, self._address, connection)
        if stream is None:
            connection.closed(f"nobody can be reached at {self._address}")
            self._again(connection)
            return
        pipe.append(stream.there)
        stream.on_close = lambda: self._again(connection)
        stream.there.wake()

    def _again(self, connection: Connection) -> None:
        if not self._stopped:
            self._failures = 0 if connection.useful else self._failures + 1
            self._network.schedule(backoff_s(self._failures), self._try)


class _Stream:
    """Two pipes between a dialler's connection and the one that it opens at the other side."""

    def __init__(
        self,
        network: MemoryNetwork,
        dialler: MemoryTransport,
        connection: Connection,
        other: MemoryTransport,
    ) -> None:
        self._network = network
        self._ends = (dialler, other)
        self.open = True
        self.on_close: Callable[[], None] | None = None
        incoming = other.board.incoming(lambda: self.back.wake())
        self._connections = (connection, incoming)
        self.there = _Pipe(network, self, connection, incoming, dialler.peer, other.peer)
        self.back = _Pipe(network, self, incoming, connection, other.peer, dialler.peer)

    def has(self, transport: MemoryTransport) -> bool:
        return transport in self._ends

    def joins(self, a: str, b: str) -> bool:
        return {a, b} == {end.peer for end in self._ends}

    def close(self, why: str) -> None:
        """Both ends learn of it; nothing that is still on the way arrives."""
        if not self.open:
            return
        self.open = False
        self._network.closed(self)
        for connection in self._connections:
            connection.closed(why)
        if self.on_close is not None:
            self.on_close()


class _Pipe:
    """One direction of a stream."""

    def __init__(
        self,
        network: MemoryNetwork,
        stream: _Stream,
        source: Connection,
        destination: Connection,
        source_name: str,
        destination_name: str,
    ) -> None:
        self._network, self._stream = network, stream
        self._source, self._destination = source, destination
        self._names = (source_name, destination_name)
        self._busy = False
        self._last_arrival = 0.0
        self._on_the_way: deque[Callable[[], None]] = deque()

    def wake(self) -> None:
        """There may be something to take. Taken in its own turn, so that no call nests."""
        if not self._busy and self._stream.open:
            self._busy = True
            self._network.schedule(0.0, self._next)

    def _next(self) -> None:
        self._busy = False
        if not self._stream.open:
            return
        parts = self._source.pull(self._network.now())
        if parts is None:
            if self._source.over:
                self._after(self._network.carry(*self._names, 0)[1], self._end)
            return
        message = b"".join(parts)
        busy_s, arrives_s = self._network.carry(*self._names, len(message))
        self._busy = True
        self._after(arrives_s, lambda: self._deliver(message))
        self._network.schedule(busy_s, self._next)

    def _after(self, delay_s: float, arrive: Callable[[], None]) -> None:
        """A stream keeps its order, even where the delay varies from one message to the next, or
        rounding lets two calls change places."""
        now = self._network.now()
        self._last_arrival = max(self._last_arrival, now + delay_s)
        self._on_the_way.append(arrive)
        self._network.schedule(self._last_arrival - now, lambda: self._on_the_way.popleft()())

    def _deliver(self, message: bytes) -> None:
        if not self._stream.open:
            return
        if self._network.tamper is not None:
            changed = self._network.tamper(*self._names, message)
            if changed is None:
                self._stream.close("the connection was cut")
                return
            message = changed
        self._destination.receive(message)

    def _end(self) -> None:
        self._stream.close(f"{self._names[0]} closed the connection")
