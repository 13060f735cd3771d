"""The transport's in-memory twin: many peers in one process, on a clock of the caller's.

It runs the same links as gRPC; only the streams are modelled. A stream is two pipes. A pipe gives
one message at a time to the network's carrier (`carrier.py`) and hands them on in their order.

What a stream does when one of its ends cannot hear the other (a direction is parted, or a process
stands still) is what gRPC does: nothing for a while, then it breaks.

Everything happens in calls of a clock's `after(delay_s, callback)`, so a queue of a few lines or
the simulated world's virtual clock drives it, in the same order for the same calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from ...dag.schedule.flow import Role
from ..links.connection import Connection
from ..links.frame import FrameKey, Payload
from ..links.inbox import Allocate, Allowed
from ..links.messages import Said, written
from ..links.outbox import PIECES, Pieces
from ..links.switchboard import MAX_FRAME_BYTES, Switchboard, backoff_s
from ..links.transport import OnEvent
from .carrier import Carrier, Carry, Timed, steady

__all__ = ["HELLO_S", "SILENT_S", "Carry", "MemoryNetwork", "MemoryTransport", "Tamper", "steady"]

Tamper = Callable[[str, str, bytes], bytes | None]
"""(source, destination, message) -> what arrives instead; None: the stream breaks there."""

HELLO_S = 10.0
"""A dial fails when no answer came for so long (`grpc_transport._HELLO_S`)."""
SILENT_S = 20.0
"""A stream breaks when one end has not heard the other for so long: keepalive time and timeout of
`grpc_transport.CHANNEL_OPTIONS`."""


class Clock(Protocol):
    """Calls back once after some seconds; calls of equal time in the order they were made."""

    now: float

    def after(self, delay_s: float, callback: Callable[[], object]) -> None: ...


class MemoryNetwork:
    """Where memory transports meet. An address is what its transport was given. `carry` is a
    carrier, or the function of a `Timed` one."""

    def __init__(self, clock: Clock, carry: Carry | Carrier | None = None) -> None:
        self.clock = clock
        self.carrier: Carrier = (
            Timed(clock.after, carry or steady()) if carry is None or callable(carry) else carry
        )
        self.tamper: Tamper | None = None
        """A fault for tests: sees and may change every message."""
        self.left_s = 0.0
        """When the last byte left of the message that is being received now."""
        self._transports: dict[str, MemoryTransport] = {}
        self._streams: dict[str, dict[_Stream, None]] = {}  # open ones, by the peers at their ends
        self._corrupt: dict[tuple[str, str], deque[float]] = {}
        self.frozen: dict[str, deque[Callable[[], None]]] = {}
        """Peers whose process stands still, and what waits for it to go on."""

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
        self.carrier.part(source, destination)
        self._watch(source, destination)

    def mend(self, source: str, destination: str) -> None:
        self.carrier.mend(source, destination)
        self._watch(source, destination)

    def corrupt(self, source: str, destination: str, where: float) -> None:
        """The next message from one to the other that has bytes arrives with one changed: that at
        `where`, in [0, 1), of its length."""
        self._corrupt.setdefault((source, destination), deque()).append(where)

    def corrupts(self, source: str, destination: str) -> bool:
        """Whether a message is still to be changed: none has come since."""
        return bool(self._corrupt.get((source, destination)))

    def changed(self, source: str, destination: str, message: bytes) -> bytes | None:
        """What arrives in the place of a message; None: the stream breaks there."""
        if message and (places := self._corrupt.get((source, destination))):
            at = int(places.popleft() * len(message))
            message = message[:at] + bytes([message[at] ^ 0x55]) + message[at + 1 :]
        return message if self.tamper is None else self.tamper(source, destination, message)

    def tampers(self, source: str, destination: str) -> bool:
        """Whether `changed` could change a message."""
        if self.tamper is None and not self._corrupt:
            return False
        return self.tamper is not None or self.corrupts(source, destination)

    def freeze(self, peer: str) -> None:
        """The process of a peer stands still until `thaw`: it takes and gives nothing."""
        self.frozen.setdefault(peer, deque())
        self._watch(peer)

    def thaw(self, peer: str) -> None:
        held = self.frozen.pop(peer, None)
        self._watch(peer)
        while held:
            if peer in self.frozen:  # by what it has just done
                self.frozen[peer].extendleft(reversed(held))
                return
            held.popleft()()

    def held(self, peer: str, what: Callable[[], None]) -> bool:
        """Whether the peer stands still; `what` is then done when it goes on."""
        if peer not in self.frozen:
            return False
        self.frozen[peer].append(what)
        return True

    def _watch(self, *ends: str) -> None:
        for stream in self._between(*ends):
            stream.watch()

    def _between(self, peer: str, other: str = "") -> list[_Stream]:
        """The streams of a peer, or only those with another one."""
        return [s for s in self._streams.get(peer, ()) if not other or s.joins(peer, other)]

    def hear_each_other(self, a: str, b: str) -> bool:
        parted = self.carrier.parted(a, b) or self.carrier.parted(b, a)
        return not parted and a not in self.frozen and b not in self.frozen

    # ------------------------------------------------------------ streams

    def at(self, address: str) -> MemoryTransport | None:
        """The process that listens there."""
        return self._transports.get(address)

    def open(
        self, dialler: MemoryTransport, address: str, connection: Connection
    ) -> _Stream | None:
        """A stream to whoever is at the address; None when nobody can be reached there."""
        other = self.at(address)
        if other is None or not self.hear_each_other(dialler.peer, other.peer):
            return None
        stream = _Stream(self, dialler, connection, other)
        for end in stream.peers:
            self._streams.setdefault(end, {})[stream] = None
        return stream

    def closed(self, stream: _Stream) -> None:
        for end in stream.peers:
            self._streams[end].pop(stream, None)

    def remove(self, transport: MemoryTransport) -> None:
        """The process at this address is gone; the others learn of it as soon as word of it can
        come."""
        del self._transports[transport.address]
        self.frozen.pop(transport.peer, None)
        for stream in [s for s in self._between(transport.peer) if s.ends_at(transport)]:
            stream.abandon(transport)


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
        network.clock.after(0.0, self._try)

    def stop(self) -> None:
        self._stopped = True

    def _try(self) -> None:
        if self._stopped or self._network.held(self._transport.peer, self._try):
            return
        pipe: list[_Pipe] = []
        connection = self._transport.board.outgoing(
            self._peer, self.generation, lambda: pipe[0].wake() if pipe else None
        )
        stream = self._network.open(self._transport, self._address, connection)
        if stream is None:
            refused = self._network.at(self._address) is None  # else there is just no answer
            self._network.clock.after(0.0 if refused else HELLO_S, lambda: self._failed(connection))
            return
        pipe.append(stream.there)
        stream.on_close = lambda: self._again(connection)
        stream.there.wake()

    def _failed(self, connection: Connection) -> None:
        if not self._stopped:
            connection.closed(f"nobody can be reached at {self._address}")
            self._again(connection)

    def _again(self, connection: Connection) -> None:
        if not self._stopped:
            self._failures = 0 if connection.useful else self._failures + 1
            self._network.clock.after(backoff_s(self._failures), self._try)


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
        self.peers = (dialler.peer, other.peer)
        self.open = True
        self.on_close: Callable[[], None] | None = None
        self._silent_since: float | None = None
        incoming = other.board.incoming(lambda: self.back.wake())
        self._connections = (connection, incoming)
        self.there = _Pipe(network, self, connection, incoming, dialler.peer, other.peer)
        self.back = _Pipe(network, self, incoming, connection, other.peer, dialler.peer)

    def ends_at(self, transport: MemoryTransport) -> bool:
        return transport in self._ends

    def joins(self, a: str, b: str) -> bool:
        return set(self.peers) == {a, b}

    def watch(self) -> None:
        """Whether its ends hear each other has changed, perhaps."""
        if self._network.hear_each_other(*self.peers):
            self._silent_since = None
        elif self._silent_since is None:
            self._silent_since = since = self._network.clock.now
            self._network.clock.after(SILENT_S, lambda: self._give_up(since))

    def _give_up(self, since: float) -> None:
        if self._silent_since == since:
            self.close(f"no answer for {SILENT_S:.0f} s")

    def close(self, why: str) -> None:
        """Both ends learn of it; nothing that is still on the way arrives."""
        if self._end():
            for connection in self._connections:
                connection.closed(why)
            self._closed()

    def abandon(self, gone: MemoryTransport) -> None:
        """The process at one end is gone: nothing of it arrives any more but word of its end."""
        if not self._end():
            return
        here = self._ends.index(gone)
        other = self._ends[1 - here].peer
        self._connections[here].closed(f"{gone.peer} is gone")

        def told() -> None:
            if not self._network.held(other, told):
                self._connections[1 - here].closed(f"{gone.peer} is gone")
                self._closed()

        if self._network.carrier.parted(gone.peer, other):
            self._network.clock.after(SILENT_S, told)
        else:
            self._network.carrier.send(gone.peer, other, 0, _nothing, told)

    def _end(self) -> bool:
        """Whether it was open until now."""
        if not self.open:
            return False
        self.open = False
        self._network.closed(self)
        return True

    def _closed(self) -> None:
        if self.on_close is not None:
            self.on_close()


class _Sent:
    """A message on its way, which number it has in its pipe, and when its last byte left. There are
    millions: no closures. None: what is said is that this was the last."""

    __slots__ = ("left_s", "number", "pipe", "said")

    def __init__(self, pipe: _Pipe, number: int, said: Said | None) -> None:
        self.pipe, self.number, self.said, self.left_s = pipe, number, said, 0.0

    def left(self) -> None:
        self.pipe.left(self)

    def arrived(self) -> None:
        """What arrives before something that was sent earlier waits for it."""
        pipe = self.pipe
        if self.number != pipe.arriving:
            pipe.early[self.number] = self
            return
        pipe.arriving += 1
        pipe.deliver(self)
        while pipe.early and (first := pipe.early.pop(pipe.arriving, None)) is not None:
            pipe.arriving += 1
            pipe.deliver(first)


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
        self._free_s = 0.0  # when the last message has left, where that is known
        self._taken = 0  # messages so far
        self.arriving = 0
        """The number of the first message that was not delivered."""
        self.early: dict[int, _Sent] = {}

    def wake(self) -> None:
        """There may be something to take. Taken in its own turn, so that no call nests."""
        if not self._busy and self._stream.open:
            self._busy = True
            busy_s = self._free_s - self._network.clock.now
            self._network.clock.after(busy_s if busy_s > 0.0 else 0.0, self._next)

    def answer(self) -> None:
        """As `wake`, where no call nests."""
        if not self._busy and self._stream.open:
            if self._free_s <= self._network.clock.now:
                self._busy = True  # until it is taken, which a frozen process does later
                self._next()
            else:
                self.wake()

    def _next(self) -> None:
        network = self._network
        if not self._stream.open:
            return
        if network.frozen and network.held(self._names[0], self._next):
            return
        self._busy = False
        now = network.clock.now
        said = self._source.give(now)
        if said is None:
            if self._source.over:
                last = _Sent(self, self._taken, None)
                self._taken += 1
                network.carrier.send(*self._names, 0, _nothing, last.arrived)
            return
        message, size_bytes = said
        sent = _Sent(self, self._taken, message)
        self._taken += 1
        source, destination = self._names
        busy_s = network.carrier.send(source, destination, size_bytes, sent.left, sent.arrived)
        if busy_s is None:
            self._busy = True
            return
        self._free_s = sent.left_s = now + busy_s
        if self._source.ready:
            self.wake()

    def left(self, sent: _Sent) -> None:
        """The last byte of a message has left just now, where that was not known before."""
        sent.left_s = self._network.clock.now
        self._next()

    def deliver(self, sent: _Sent) -> None:
        """What nobody tampers with is handed over as it is: neither written nor read."""
        network, said = self._network, sent.said
        if not self._stream.open:
            return
        if said is None:
            self._stream.close(f"{self._names[0]} closed the connection")
            return
        if network.frozen and network.held(self._names[1], lambda: self.deliver(sent)):
            return
        network.left_s = sent.left_s
        if network.tampers(*self._names):
            message = said if isinstance(said, bytes) else written(said)
            changed = network.changed(*self._names, message)
            if changed is None:
                self._stream.close("the connection was cut")
                return
            if changed != message:
                said = changed
        if self._destination.hear(said, network.clock.now):
            stream = self._stream
            (stream.back if stream.there is self else stream.there).answer()


def _nothing() -> None:
    pass
