"""Streams of the in-memory transport: two pipes between a dialler's connection and the one that it
opens at the other side. A pipe gives one message at a time to the network's carrier (`carrier.py`)
and hands them on in their order.

What a stream does when one of its ends cannot hear the other (a direction is parted, or a process
stands still) is what gRPC does: nothing for a while, then it breaks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ..links.connection import Connection
from ..links.messages import Said, written
from ..links.switchboard import Switchboard
from .medium import Medium

__all__ = ["SILENT_S", "MemoryStream"]

SILENT_S = 20.0
"""A stream breaks when one end has not heard the other for so long: keepalive time and timeout of
`grpc_transport.CHANNEL_OPTIONS`."""


class End(Protocol):
    """A process at one end."""

    peer: str
    board: Switchboard


class MemoryStream:
    """Two pipes between a dialler's connection and the one that it opens at the other side."""

    def __init__(
        self,
        medium: Medium,
        dialler: End,
        connection: Connection,
        other: End,
        gone: Callable[[MemoryStream], None],
    ) -> None:
        """`gone` is called once, when it is open no more."""
        self._medium, self._gone = medium, gone
        self._ends = (dialler, other)
        self.peers = (dialler.peer, other.peer)
        self.open = True
        self.on_close: Callable[[], None] | None = None
        self._silent_since: float | None = None
        incoming = other.board.incoming(lambda: self.back.wake())
        self._connections = (connection, incoming)
        self.there = _Pipe(medium, self, connection, incoming, dialler.peer, other.peer)
        self.back = _Pipe(medium, self, incoming, connection, other.peer, dialler.peer)

    def ends_at(self, transport: End) -> bool:
        return transport in self._ends

    def joins(self, a: str, b: str) -> bool:
        return set(self.peers) == {a, b}

    def watch(self) -> None:
        """Whether its ends hear each other has changed, perhaps."""
        if self._medium.hear_each_other(*self.peers):
            self._silent_since = None
        elif self._silent_since is None:
            self._silent_since = since = self._medium.clock.now
            self._medium.clock.after(SILENT_S, lambda: self._give_up(since))

    def _give_up(self, since: float) -> None:
        if self._silent_since == since:
            self.close(f"no answer for {SILENT_S:.0f} s")

    def close(self, why: str) -> None:
        """Both ends learn of it; nothing that is still on the way arrives."""
        if self._end():
            for connection in self._connections:
                connection.closed(why)
            self._closed()

    def abandon(self, gone: End) -> None:
        """The process at one end is gone: nothing of it arrives any more but word of its end."""
        if not self._end():
            return
        here = self._ends.index(gone)
        other = self._ends[1 - here].peer
        self._connections[here].closed(f"{gone.peer} is gone")

        def told() -> None:
            if not self._medium.held(other, told):
                self._connections[1 - here].closed(f"{gone.peer} is gone")
                self._closed()

        if self._medium.carrier.parted(gone.peer, other):
            self._medium.clock.after(SILENT_S, told)
        else:
            self._medium.carrier.send(gone.peer, other, 0, _nothing, told)

    def _end(self) -> bool:
        """Whether it was open until now."""
        if not self.open:
            return False
        self.open = False
        self._gone(self)
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
        medium: Medium,
        stream: MemoryStream,
        source: Connection,
        destination: Connection,
        source_name: str,
        destination_name: str,
    ) -> None:
        self._medium, self._stream = medium, stream
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
            busy_s = self._free_s - self._medium.clock.now
            self._medium.clock.after(busy_s if busy_s > 0.0 else 0.0, self._next)

    def answer(self) -> None:
        """As `wake`, where no call nests."""
        if not self._busy and self._stream.open:
            if self._free_s <= self._medium.clock.now:
                self._busy = True  # until it is taken, which a frozen process does later
                self._next()
            else:
                self.wake()

    def _next(self) -> None:
        medium = self._medium
        if not self._stream.open:
            return
        if medium.frozen and medium.held(self._names[0], self._next):
            return
        self._busy = False
        now = medium.clock.now
        said = self._source.give(now)
        if said is None:
            if self._source.over:
                last = _Sent(self, self._taken, None)
                self._taken += 1
                medium.carrier.send(*self._names, 0, _nothing, last.arrived)
            return
        message, size_bytes = said
        sent = _Sent(self, self._taken, message)
        self._taken += 1
        source, destination = self._names
        busy_s = medium.carrier.send(source, destination, size_bytes, sent.left, sent.arrived)
        if busy_s is None:
            self._busy = True
            return
        self._free_s = sent.left_s = now + busy_s
        if self._source.ready:
            self.wake()

    def left(self, sent: _Sent) -> None:
        """The last byte of a message has left just now, where that was not known before."""
        sent.left_s = self._medium.clock.now
        self._next()

    def deliver(self, sent: _Sent) -> None:
        """What nobody tampers with is handed over as it is: neither written nor read."""
        medium, said = self._medium, sent.said
        if not self._stream.open:
            return
        if said is None:
            self._stream.close(f"{self._names[0]} closed the connection")
            return
        if medium.frozen and medium.held(self._names[1], lambda: self.deliver(sent)):
            return
        medium.left_s = sent.left_s
        if medium.tampers(*self._names):
            message = said if isinstance(said, bytes) else written(said)
            changed = medium.changed(*self._names, message)
            if changed is None:
                self._stream.close("the connection was cut")
                return
            if changed != message:
                said = changed
        if self._destination.hear(said, medium.clock.now):
            stream = self._stream
            (stream.back if stream.there is self else stream.there).answer()


def _nothing() -> None:
    pass
