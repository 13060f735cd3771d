"""Connections as pipes: bytes are taken from a sender when they may leave, kept while they are
under way, and given to the receiver when they arrive.

What the line of a pipe holds is what the path holds, a bandwidth-delay product; a receiver that
does not read stops its sender through it. Sockets are non-blocking; who polls them tells `event`,
and then calls `take` and `deliver`.
"""

from __future__ import annotations

import heapq
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from .pacing import Pacer
from .shaping import Flow, Shaping

__all__ = ["EVENTS", "Pipe", "Pipes", "abort"]

EVENTS = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET
"""What to poll a connection's sockets for: changes only, as what is ready may have to wait."""
_IN = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
_MOST_LINE = 64 * 1024 * 1024
"""Bytes of a line without a limit to its rate."""
_LINE_S, _LINE_BYTES = 0.1, 64 * 1024
"""A line has place for more than the path holds: pieces are taken early, and may be given late."""
_LATE_S = 0.005
_PAYLOAD_BYTES = 1024
"""A piece of so many bytes is data in the middle, whatever protocol begins and ends it."""
_ABORT = struct.pack("ii", 1, 0)
_END, _RESET = b"", None
"""In a line: the sender has nothing more to say; the sender broke off."""


@dataclass(eq=False, slots=True)
class Pipe:
    """One direction of a connection."""

    flow: Flow
    source: socket.socket
    sink: socket.socket
    latency_s: float
    most_bytes: int
    """That the line may hold."""
    not_before: float
    """The connection does not exist earlier at its sender."""
    line: deque[tuple[float, bytes | None]] = field(default_factory=deque)
    """(when it arrives, bytes)."""
    held: int = 0
    """Bytes in the line."""
    readable: bool = False
    writable: bool = False
    queued: bool = False
    """It is in its flow's queue."""
    ended: bool = False
    """Nothing more is read."""
    done: bool = False
    """The end of the line was delivered."""
    expected: bool = False
    """It stands among the arrivals."""
    back: Pipe = field(init=False)
    """The other direction."""

    @property
    def wants(self) -> bool:
        """Whether there may be something to take, and a place for it."""
        room = self.held < self.most_bytes and (self.writable or not self.line)
        return self.readable and not self.ended and room


class Pipes:
    """The pipes between the ends of a Shaping. `closed` is called with the descriptor of a socket
    before that closes."""

    def __init__(self, shaping: Shaping, closed: Callable[[int], None]) -> None:
        self.shaping = shaping
        self.pacer = Pacer(shaping)
        self.corrupt: set[Flow] = set()
        """Flows of which the next piece of data is to be changed."""
        self.carried: dict[Flow, int] = {}
        """Bytes that were delivered."""
        self.pieces = self.late = 0
        self.latest_s = 0.0
        """Three counters of deliveries: how many, how many came over 5 ms late, and how late the
        worst."""
        self._closed = closed
        self._queues: dict[Flow, deque[Pipe]] = {}  # where something waits; no empty ones
        self._parted: set[Flow] = set()
        self._arrivals: list[tuple[float, int, Pipe]] = []
        self._count = 0

    # ------------------------------------------------------------ connections

    def join(self, flow: Flow, near: socket.socket, far: socket.socket) -> tuple[Pipe, Pipe]:
        """A connection that the end near dials, with an own socket to each end: its two pipes."""
        a, b = flow
        now, there = time.monotonic(), self.shaping.latency_s[a][b]
        # The first word of the dialler leaves when the path was travelled once and back.
        forth = self._pipe(flow, near, far, now + there + self.shaping.latency_s[b][a])
        back = self._pipe((b, a), far, near, now + there)
        forth.back, back.back = back, forth
        return forth, back

    def _pipe(
        self, flow: Flow, source: socket.socket, sink: socket.socket, not_before: float
    ) -> Pipe:
        (a, b), net = flow, self.shaping
        latency_s, rate = net.latency_s[a][b], net.alone(flow)
        longest_s = latency_s + _LINE_S + (net.jitter_s[a][b] if net.jitter_s else 0.0)
        if net.loss and net.loss[a][b]:
            longest_s += 4 * (latency_s + net.latency_s[b][a])
        burst = int(net.burst[a][b]) if net.burst else 0
        most = burst + int(rate * longest_s) + _LINE_BYTES if rate < float("inf") else _MOST_LINE
        return Pipe(flow, source, sink, latency_s, most, not_before)

    def parted(self, a: int, b: int) -> bool:
        """Whether either direction is."""
        return (a, b) in self._parted or (b, a) in self._parted

    def part(self, flow: Flow) -> None:
        self._parted.add(flow)
        self.pacer.rest(flow)

    def mend(self, flow: Flow) -> None:
        self._parted.discard(flow)
        if flow in self._queues:
            self.pacer.wait(flow, time.monotonic())

    def patience_s(self) -> float:
        """Until something is to be done without an event; -1: nothing is."""
        times = [self.pacer.due(flow) for flow in self._queues if flow not in self._parted]
        if self._arrivals:
            times.append(self._arrivals[0][0])
        return max(0.0, min(times) - time.monotonic()) if times else -1

    # ------------------------------------------------------------ bytes

    def event(self, pipe: Pipe, event: int) -> None:
        """Handles an epoll event of the socket that is the pipe's source and the sink of the way
        back."""
        if event & select.EPOLLOUT and not pipe.back.writable:
            if pipe.source.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self._abort(pipe)  # the connection to the target came to nothing
                return
            pipe.back.writable = True
            self._flush(pipe.back, time.monotonic())
            self._queue(pipe.back)
        if event & _IN and pipe.source.fileno() >= 0:
            pipe.readable = True
            self._queue(pipe)

    def _queue(self, pipe: Pipe) -> None:
        if pipe.wants and not pipe.queued:
            pipe.queued = True
            self._queues.setdefault(pipe.flow, deque()).append(pipe)
            if pipe.flow not in self._parted:
                self.pacer.wait(pipe.flow, time.monotonic())

    def take(self) -> None:
        """Takes from the senders what may leave by now; pipes of a flow in turn."""
        now = time.monotonic()
        for flow in [f for f in self._queues if f not in self._parted]:
            queue = self._queues[flow]
            while queue and self.pacer.due(flow) <= now:
                pipe = queue[0]
                if not pipe.wants or not self._read(pipe, now):
                    queue.popleft()
                    pipe.queued = False
                else:
                    queue.rotate(-1)
            if not queue:
                del self._queues[flow]
                self.pacer.rest(flow)

    def _read(self, pipe: Pipe, now: float) -> bool:
        """Whether there may be more."""
        try:
            data: bytes | None = pipe.source.recv(self.pacer.piece_bytes(pipe.flow, now))
        except BlockingIOError:
            pipe.readable = False
            return False
        except OSError:
            data = _RESET
        if data and pipe.flow in self.corrupt and len(data) >= _PAYLOAD_BYTES:
            self.corrupt.remove(pipe.flow)
            middle = len(data) // 2
            data = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        if data:
            left = self.pacer.leave(pipe.flow, len(data), now)
            self._put(pipe, left + self.pacer.delay_s(pipe.flow, len(data)), data)
        else:
            pipe.ended = True
            self._put(pipe, now + pipe.latency_s, data)
        return bool(data)

    def _put(self, pipe: Pipe, due: float, data: bytes | None) -> None:
        due = max(due, pipe.not_before + pipe.latency_s)
        if pipe.line:
            due = max(due, pipe.line[-1][0])
        pipe.line.append((due, data))
        pipe.held += len(data or b"")
        if len(pipe.line) == 1:
            self._expect(pipe)

    def _expect(self, pipe: Pipe) -> None:
        if not pipe.expected:
            pipe.expected = True
            self._count += 1
            heapq.heappush(self._arrivals, (pipe.line[0][0], self._count, pipe))

    def deliver(self) -> None:
        now = time.monotonic()
        while self._arrivals and self._arrivals[0][0] <= now:
            due, _, pipe = heapq.heappop(self._arrivals)
            pipe.expected = False
            self.pieces += 1
            self.latest_s = max(self.latest_s, now - due)
            self.late += now - due > _LATE_S
            if pipe.line and pipe.writable:
                self._flush(pipe, now)
                self._queue(pipe)

    def _flush(self, pipe: Pipe, now: float) -> None:
        """Gives the receiver what has arrived, as far as it takes it."""
        line = pipe.line
        while line and line[0][0] <= now:
            due, data = line[0]
            if not data:
                line.popleft()
                self._finish(pipe, data)
                return
            try:
                sent = pipe.sink.send(data)
            except BlockingIOError:
                pipe.writable = False
                return
            except OSError:
                # The receiver is gone; that is told to the sender at the way back's pace.
                line.clear()
                pipe.held, pipe.ended, pipe.done = 0, True, True
                if pipe.back.done:
                    self._abort(pipe)
                elif not pipe.back.ended:
                    pipe.back.ended = True
                    self._put(pipe.back, now + pipe.back.latency_s, _RESET)
                return
            pipe.held -= sent
            self.carried[pipe.flow] = self.carried.get(pipe.flow, 0) + sent
            if sent < len(data):
                line[0] = due, data[sent:]
                pipe.writable = False
                return
            line.popleft()
        if line:
            self._expect(pipe)

    # ------------------------------------------------------------ ends

    def _finish(self, pipe: Pipe, end: bytes | None) -> None:
        """The end of what the sender said has arrived."""
        pipe.done = True
        if end is _RESET:
            self._abort(pipe)
            return
        try:
            pipe.sink.shutdown(socket.SHUT_WR)
        except OSError:
            self._abort(pipe)
            return
        if pipe.back.done:
            self._close(pipe)

    def _abort(self, pipe: Pipe) -> None:
        """Breaks both ends off."""
        for end in (pipe.source, pipe.sink):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
        self._close(pipe)

    def _close(self, pipe: Pipe) -> None:
        for way in (pipe, pipe.back):
            way.line.clear()
            way.held, way.ended, way.done = 0, True, True
            if (fd := way.source.fileno()) >= 0:
                self._closed(fd)
                way.source.close()


def abort(end: socket.socket) -> None:
    """Closes a socket so that the other side sees that it was broken off."""
    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
    end.close()
