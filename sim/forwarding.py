"""The forwarding process: carries connections between processes as if they were far apart.

    python -m shoal.sim.forwarding          started by forwarder.py, which see

One thread, one epoll. Each ordered pair (a, b) has a port on which a reaches b. A connection is two
pipes, one for each direction; a pipe takes bytes from its sender when the pacer lets them go, keeps
them for the latency, and gives them to its receiver. What a line holds is what the path holds, a
bandwidth-delay product; a receiver that does not read stops its sender through it.

Standard input is the rope: a line with the shaping and the addresses, then one command per line,
each answered by a line. When the rope ends, so does the process.
"""

from __future__ import annotations

import heapq
import json
import os
import select
import socket
import struct
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from ..net.buffers import keep_heap_warm
from .pacing import Pacer
from .shaping import Flow, Shaping

__all__ = ["main"]

_IN = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
_EVENTS = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET
_HELD_S = 0.03
"""What a sender's kernel may hold for us, in seconds of the path: enough to stay busy while another
process has the core, and little that waits where no model sees it."""
_LEAST_HELD, _MOST_HELD = 64 * 1024, 4 * 1024 * 1024
_MOST_LINE = 64 * 1024 * 1024
"""Bytes of a line without a limit to its rate."""
_LATE_S = 0.005
_ABORT = struct.pack("ii", 1, 0)
_PAYLOAD_BYTES = 1024
"""A piece of so many bytes is data in the middle, whatever protocol begins and ends it."""
_END, _RESET = b"", None
"""In a line: the sender has nothing more to say; the sender broke off."""


@dataclass(eq=False, slots=True)
class _Pipe:
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
    back: _Pipe = field(init=False)
    """The other direction."""

    @property
    def wants(self) -> bool:
        """Whether there may be something to take, and a place for it."""
        room = self.held < self.most_bytes and (self.writable or not self.line)
        return self.readable and not self.ended and room


class _Forwarding:
    def __init__(self, shaping: Shaping, targets: dict[str, tuple[str, int]]) -> None:
        self.shaping = shaping
        self.pacer = Pacer(shaping)
        self.epoll = select.epoll()
        self.listeners: dict[int, tuple[socket.socket, Flow]] = {}
        self.pipes: dict[int, _Pipe] = {}
        """By the descriptor of their source."""
        self.queues: dict[Flow, deque[_Pipe]] = {}
        """Pipes on which something waits; no empty ones."""
        self.parted: set[Flow] = set()
        self.corrupt: set[Flow] = set()
        """Flows of which the next piece of data is to be changed."""
        self.arrivals: list[tuple[float, int, _Pipe]] = []
        self.count = 0
        self.carried: dict[Flow, int] = {}
        self.pieces = self.late = 0
        self.latest_s = 0.0
        self.reserved: list[socket.socket] = []
        self.targets = [targets.get(name) or self._reserve() for name in shaping.names]

    # ------------------------------------------------------------ ports

    def _reserve(self) -> tuple[str, int]:
        """A port for a process that is to come: bound, so that nobody else gets it by chance, and
        not listened on, so that its process can."""
        socket_ = socket.socket()
        socket_.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        socket_.bind(("127.0.0.1", 0))
        self.reserved.append(socket_)
        host, port = socket_.getsockname()
        return host, port

    def listen(self) -> list[tuple[int, int, int]]:
        """(a, b, port on which a reaches b) of every pair."""
        ports = []
        for a in range(len(self.shaping.names)):
            for b in range(len(self.shaping.names)):
                if a == b:
                    continue
                listener = socket.socket()
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._held((a, b)))
                listener.bind(("127.0.0.1", 0))
                listener.listen(64)
                listener.setblocking(False)
                self.listeners[listener.fileno()] = listener, (a, b)
                self.epoll.register(listener.fileno(), select.EPOLLIN)
                ports.append((a, b, listener.getsockname()[1]))
        return ports

    def _alone(self, flow: Flow) -> float:
        """Bytes/s of a flow that has the network for itself."""
        a, b = flow
        return min(self.shaping.bandwidth[a][b], self.shaping.up[a], self.shaping.down[b])

    def _held(self, flow: Flow) -> int:
        return int(min(max(self._alone(flow) * _HELD_S, _LEAST_HELD), _MOST_HELD))

    # ------------------------------------------------------------ the loop

    def run(self, rope: int) -> None:
        """Until the rope ends."""
        os.set_blocking(rope, False)
        self.epoll.register(rope, select.EPOLLIN)
        text = b""
        while True:
            for fd, event in self.epoll.poll(self._patience()):
                if fd == rope:
                    if not (got := os.read(rope, 65536)):
                        return
                    *lines, text = (text + got).split(b"\n")
                    for line in lines:
                        answer(self._command(json.loads(line)))
                elif fd in self.listeners:
                    self._accept(*self.listeners[fd])
                elif fd in self.pipes:
                    self._event(self.pipes[fd], event)
            self._take()
            self._deliver()

    def _patience(self) -> float:
        """Seconds until something is to be done without an event; -1: nothing is."""
        times = [self.pacer.due(flow) for flow in self.queues if flow not in self.parted]
        if self.arrivals:
            times.append(self.arrivals[0][0])
        return max(0.0, min(times) - time.monotonic()) if times else -1

    def _event(self, pipe: _Pipe, event: int) -> None:
        """Of the socket that is the pipe's source, and the sink of the way back."""
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

    def _queue(self, pipe: _Pipe) -> None:
        if pipe.wants and not pipe.queued:
            pipe.queued = True
            self.queues.setdefault(pipe.flow, deque()).append(pipe)
            if pipe.flow not in self.parted:
                self.pacer.wait(pipe.flow, time.monotonic())

    def _take(self) -> None:
        """Takes from the senders what may leave by now; pipes of a flow in turn."""
        now = time.monotonic()
        for flow in [f for f in self.queues if f not in self.parted]:
            queue = self.queues[flow]
            while queue and self.pacer.due(flow) <= now:
                pipe = queue[0]
                if not pipe.wants or not self._read(pipe, now):
                    queue.popleft()
                    pipe.queued = False
                else:
                    queue.rotate(-1)
            if not queue:
                del self.queues[flow]
                self.pacer.rest(flow)

    def _read(self, pipe: _Pipe, now: float) -> bool:
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

    def _put(self, pipe: _Pipe, due: float, data: bytes | None) -> None:
        due = max(due, pipe.not_before + pipe.latency_s)
        if pipe.line:
            due = max(due, pipe.line[-1][0])
        pipe.line.append((due, data))
        pipe.held += len(data or b"")
        if len(pipe.line) == 1:
            self._expect(pipe)

    def _expect(self, pipe: _Pipe) -> None:
        if not pipe.expected:
            pipe.expected = True
            self.count += 1
            heapq.heappush(self.arrivals, (pipe.line[0][0], self.count, pipe))

    def _deliver(self) -> None:
        now = time.monotonic()
        while self.arrivals and self.arrivals[0][0] <= now:
            due, _, pipe = heapq.heappop(self.arrivals)
            pipe.expected = False
            self.pieces += 1
            self.latest_s = max(self.latest_s, now - due)
            self.late += now - due > _LATE_S
            if pipe.line and pipe.writable:
                self._flush(pipe, now)
                self._queue(pipe)

    def _flush(self, pipe: _Pipe, now: float) -> None:
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

    # ------------------------------------------------------------ connections

    def _accept(self, listener: socket.socket, flow: Flow) -> None:
        try:
            near, _ = listener.accept()
        except OSError:  # it went before we came
            return
        a, b = flow
        if flow in self.parted or (b, a) in self.parted:
            _abort(near)
            return
        far = socket.socket()
        far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._held((b, a)))
        for end in (near, far):
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        far.connect_ex(self.targets[b])
        now, there = time.monotonic(), self.shaping.latency_s[a][b]
        # The first word of the dialler leaves when the path was travelled once and back.
        forth = self._pipe(flow, near, far, now + there + self.shaping.latency_s[b][a])
        back = self._pipe((b, a), far, near, now + there)
        forth.back, back.back = back, forth
        for pipe in (forth, back):
            self.pipes[pipe.source.fileno()] = pipe
            self.epoll.register(pipe.source.fileno(), _EVENTS)

    def _pipe(
        self, flow: Flow, source: socket.socket, sink: socket.socket, not_before: float
    ) -> _Pipe:
        latency_s, rate = self.shaping.latency_s[flow[0]][flow[1]], self._alone(flow)
        # More than the path holds: pieces come a little before they leave, and go a little late.
        most = int(rate * (latency_s + 0.1)) if rate < float("inf") else _MOST_LINE
        return _Pipe(flow, source, sink, latency_s, most + _LEAST_HELD, not_before)

    def _finish(self, pipe: _Pipe, end: bytes | None) -> None:
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

    def _abort(self, pipe: _Pipe) -> None:
        """Breaks both ends off."""
        for end in (pipe.source, pipe.sink):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
        self._close(pipe)

    def _close(self, pipe: _Pipe) -> None:
        for way in (pipe, pipe.back):
            way.line.clear()
            way.held, way.ended, way.done = 0, True, True
            if (fd := way.source.fileno()) >= 0:
                self.epoll.unregister(fd)
                del self.pipes[fd]
                way.source.close()

    # ------------------------------------------------------------ commands

    def _command(self, table: dict[str, Any]) -> dict[str, Any]:
        what = table["do"]
        if what == "count":
            pairs = [[*flow, size] for flow, size in self.carried.items()]
            return {
                "pairs": pairs,
                "pieces": self.pieces,
                "late": self.late,
                "latest_s": self.latest_s,
            }
        flow: Flow = (table["from"], table["to"])
        if what == "part":
            self.parted.add(flow)
            self.pacer.rest(flow)
        elif what == "mend":
            self.parted.discard(flow)
            if flow in self.queues:
                self.pacer.wait(flow, time.monotonic())
        elif what == "corrupt":
            self.corrupt.add(flow)
        elif what == "slow":
            self.pacer.slow(flow, table["factor"])
        else:
            return {"error": f"no such command: {what}"}
        return {}


def _abort(end: socket.socket) -> None:
    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
    end.close()


def answer(table: dict[str, Any]) -> None:
    """A line to who holds the rope."""
    print(json.dumps(table), flush=True)


def main() -> int:
    """Reads the shaping, says where everybody is reached, and forwards until the rope ends."""
    keep_heap_warm()  # fresh pages cost more than the bytes that go into them
    line = sys.stdin.buffer.raw.readline()  # type: ignore[union-attr]  # unbuffered
    if not line:
        return 0
    table = json.loads(line)
    targets = {name: (host, int(port)) for name, (host, port) in table["targets"].items()}
    forwarding = _Forwarding(Shaping.from_json(table["shaping"]), targets)
    pairs = forwarding.listen()
    answer({"targets": forwarding.targets, "pairs": pairs})
    forwarding.run(sys.stdin.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
