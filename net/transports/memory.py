"""The transport's in-memory twin: many peers in one process, on a clock of the caller's.

It runs the same links as gRPC; only the streams are modelled (`memory_stream.py`), and what they
run over, with its faults (`medium.py`).

Everything happens in calls of a clock's `after(delay_s, callback)`, so a queue of a few lines or
the simulated world's virtual clock drives it, in the same order for the same calls.
"""

from __future__ import annotations

from collections import deque

from ..links.connection import Connection
from ..links.inbox import Allocate, Allowed
from ..links.outbox import PIECES, Pieces
from ..links.switchboard import MAX_FRAME_BYTES, Switchboard, backoff_s
from ..links.transport import OnEvent, Transport
from .carrier import Carrier, Carry, Timed, steady
from .medium import Clock, Medium
from .memory_stream import SILENT_S, MemoryStream

__all__ = ["HELLO_S", "SILENT_S", "Carry", "MemoryNetwork", "MemoryTransport", "steady"]

HELLO_S = 10.0
"""A dial fails when no answer came for so long (`grpc_transport._HELLO_S`)."""


class MemoryNetwork:
    """Where memory transports meet. An address is what its transport was given. `carry` is a
    carrier, or the function of a `Timed` one."""

    def __init__(self, clock: Clock, carry: Carry | Carrier | None = None) -> None:
        if carry is None or callable(carry):
            carry = Timed(clock.after, carry or steady())
        self.medium = Medium(clock, carry)
        self._transports: dict[str, MemoryTransport] = {}
        self._streams: dict[
            str, dict[MemoryStream, None]
        ] = {}  # open ones, by the peers at their ends

    def transport(
        self,
        peer: str,
        boot: str,
        on_event: OnEvent,
        *,
        address: str | None = None,
        max_frame_bytes: int = MAX_FRAME_BYTES,
        allocate: Allocate | None = None,
        allowed: Allowed = lambda _: None,
        pieces: Pieces = PIECES,
    ) -> MemoryTransport:
        """A peer's end, reachable at `address` (its own name unless said otherwise). It takes the
        place of one that was there, which must be closed. `allocate` makes its receive buffers,
        `allowed` says how large a frame may be; its frames leave in `pieces`."""
        address = peer if address is None else address
        assert address not in self._transports, f"{address} is in use"
        board = Switchboard(
            peer,
            boot,
            on_event,
            allocate=allocate,
            max_frame_bytes=max_frame_bytes,
            allowed=allowed,
            pieces=pieces,
        )
        self._transports[address] = transport = MemoryTransport(self, board, address)
        return transport

    # ------------------------------------------------------------ faults

    def break_link(self, a: str, b: str, why: str = "the connection was cut") -> int:
        """Breaks the open streams between two peers, what is on the way included; they may dial
        again. Returns how many streams broke."""
        broken = self._between(a, b)
        for stream in broken:
            stream.close(why)
        return len(broken)

    def part(self, source: str, destination: str) -> None:
        """Nothing leaves from one to the other until `mend`; the way back stays as it is. Their
        streams break after SILENT_S, and none can be opened."""
        self.medium.carrier.part(source, destination)
        self._watch(source, destination)

    def mend(self, source: str, destination: str) -> None:
        self.medium.carrier.mend(source, destination)
        self._watch(source, destination)

    def freeze(self, peer: str) -> None:
        """The process of a peer stands still until `thaw`: it takes and gives nothing."""
        self.medium.frozen.setdefault(peer, deque())
        self._watch(peer)

    def thaw(self, peer: str) -> None:
        frozen = self.medium.frozen
        held = frozen.pop(peer, None)
        self._watch(peer)
        while held:
            if peer in frozen:  # by what it has just done
                frozen[peer].extendleft(reversed(held))
                return
            held.popleft()()

    def _watch(self, *ends: str) -> None:
        for stream in self._between(*ends):
            stream.watch()

    def _between(self, peer: str, other: str = "") -> list[MemoryStream]:
        """The streams of a peer, or only those with another one."""
        return [s for s in self._streams.get(peer, ()) if not other or s.joins(peer, other)]

    # ------------------------------------------------------------ streams

    def at(self, address: str) -> MemoryTransport | None:
        """The process that listens there."""
        return self._transports.get(address)

    def open(
        self, dialler: MemoryTransport, address: str, connection: Connection
    ) -> MemoryStream | None:
        """A stream to whoever is at the address; None when nobody can be reached there."""
        other = self.at(address)
        if other is None or not self.medium.hear_each_other(dialler.peer, other.peer):
            return None
        stream = MemoryStream(self.medium, dialler, connection, other, self._closed)
        for end in stream.peers:
            self._streams.setdefault(end, {})[stream] = None
        return stream

    def _closed(self, stream: MemoryStream) -> None:
        for end in stream.peers:
            self._streams[end].pop(stream, None)

    def remove(self, transport: MemoryTransport) -> None:
        """The process at this address is gone; the others learn of it as soon as word of it can
        come."""
        del self._transports[transport.address]
        self.medium.frozen.pop(transport.peer, None)
        for stream in [s for s in self._between(transport.peer) if s.ends_at(transport)]:
            stream.abandon(transport)


class MemoryTransport(Transport):
    """Carries links within one process."""

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

    def hang_up(self, peer: str) -> None:
        if dialler := self._dials.pop(peer, None):
            dialler.stop()
        super().hang_up(peer)

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
        network.medium.clock.after(0.0, self._try)

    def stop(self) -> None:
        self._stopped = True

    def _try(self) -> None:
        if self._stopped or self._network.medium.held(self._transport.peer, self._try):
            return
        stream: MemoryStream | None = None
        connection = self._transport.board.outgoing(
            self._peer, self.generation, lambda: stream.there.wake() if stream else None
        )
        stream = self._network.open(self._transport, self._address, connection)
        if stream is None:
            refused = self._network.at(self._address) is None  # else there is just no answer
            after_s = 0.0 if refused else HELLO_S
            self._network.medium.clock.after(after_s, lambda: self._failed(connection))
            return
        stream.on_close = lambda: self._again(connection)
        stream.there.wake()

    def _failed(self, connection: Connection) -> None:
        if not self._stopped:
            connection.closed(f"nobody can be reached at {self._address}")
            self._again(connection)

    def _again(self, connection: Connection) -> None:
        if not self._stopped:
            self._failures = 0 if connection.useful else self._failures + 1
            self._network.medium.clock.after(backoff_s(self._failures), self._try)
