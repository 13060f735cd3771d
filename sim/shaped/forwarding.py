"""The forwarding process: carries connections between processes as if they were far apart.

    python -m shoal.sim.shaped.forwarding          started by forwarder.py, which see

One thread, one epoll. Each ordered pair (a, b) has a port on which a reaches b; what comes there
goes through two pipes (pipes.py). Standard input is the rope: a line with the shaping and the
addresses, then one command per line, each answered by a line. When the rope ends, so does the
process.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
from typing import Any

from ...net.links.buffers import keep_heap_warm
from .pipes import EVENTS, Pipe, Pipes, abort
from .shaping import Flow, Shaping

__all__ = ["main"]

_HELD_S = 0.03
"""What a sender's kernel may hold for us, in seconds of the path: enough to stay busy while another
process has the core, and little that waits where no model sees it."""
_LEAST_HELD, _MOST_HELD = 64 * 1024, 4 * 1024 * 1024


class _Forwarding:
    """`targets`: where ends listen that are there already; others have a port reserved for them."""

    def __init__(self, shaping: Shaping, targets: dict[str, tuple[str, int]]) -> None:
        self.shaping = shaping
        self.pipes = Pipes(shaping, self._forget)
        self.epoll = select.epoll()
        self.listeners: dict[int, tuple[socket.socket, Flow]] = {}
        self.sources: dict[int, Pipe] = {}
        """By descriptor."""
        self.reserved: list[socket.socket] = []
        self.targets = [targets.get(name) or self._reserve() for name in shaping.names]

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

    def _held(self, flow: Flow) -> int:
        """Bytes for the buffer of a socket from which a flow is read."""
        return int(min(max(self.shaping.alone(flow) * _HELD_S, _LEAST_HELD), _MOST_HELD))

    def run(self, rope: int) -> None:
        """Until the rope ends."""
        os.set_blocking(rope, False)
        self.epoll.register(rope, select.EPOLLIN)
        text = b""
        while True:
            for fd, event in self.epoll.poll(self.pipes.patience_s()):
                if fd == rope:
                    if not (got := os.read(rope, 65536)):
                        return
                    *lines, text = (text + got).split(b"\n")
                    for line in lines:
                        answer(self._command(json.loads(line)))
                elif fd in self.listeners:
                    self._accept(*self.listeners[fd])
                elif fd in self.sources:
                    self.pipes.event(self.sources[fd], event)
            self.pipes.take()
            self.pipes.deliver()

    def _accept(self, listener: socket.socket, flow: Flow) -> None:
        try:
            near, _ = listener.accept()
        except OSError:  # it went before we came
            return
        a, b = flow
        if self.pipes.parted(a, b):
            abort(near)
            return
        far = socket.socket()
        far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._held((b, a)))
        for end in (near, far):
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        far.connect_ex(self.targets[b])
        for pipe in self.pipes.join(flow, near, far):
            self.sources[pipe.source.fileno()] = pipe
            self.epoll.register(pipe.source.fileno(), EVENTS)

    def _forget(self, descriptor: int) -> None:
        self.epoll.unregister(descriptor)
        del self.sources[descriptor]

    def _command(self, table: dict[str, Any]) -> dict[str, Any]:
        what = table["do"]
        if what == "count":
            pairs = [[*flow, size] for flow, size in self.pipes.carried.items()]
            return {
                "pairs": pairs,
                "pieces": self.pipes.pieces,
                "late": self.pipes.late,
                "latest_s": self.pipes.latest_s,
                "spared": sorted(self.pipes.corrupt),
            }
        flow: Flow = (table["from"], table["to"])
        if what == "part":
            self.pipes.part(flow)
        elif what == "mend":
            self.pipes.mend(flow)
        elif what == "corrupt":
            self.pipes.corrupt.add(flow)
        elif what == "slow":
            self.pipes.pacer.slow(flow, table["factor"])
        else:
            return {"error": f"no such command: {what}"}
        return {}


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
