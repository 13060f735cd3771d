"""Peers on the in-memory twin of a network."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from shoal.net.links.messages import decode, written
from shoal.net.transports.memory import MemoryNetwork, steady

from .worlds import Outsider, Peer, World


class MemoryWorld(World):
    """A queue of calls on a clock of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self.network = MemoryNetwork(self, steady(0.01, 100e6))

    def after(self, delay_s: float, callback: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + delay_s, next(self._count), callback))

    async def join(self, name, boot="1", max_frame_bytes=1 << 30):
        peer = self._peer(name)

        def on_event(event):
            peer.events.append(event)
            peer.on_event(event)

        peer.transport = self.network.transport(
            name, boot, on_event, max_frame_bytes=max_frame_bytes
        )
        return peer

    async def dial(self, a, b, generation=1):
        a.transport.dial(b.name, b.name, generation)

    async def until(self, condition):
        limit = self.now + 1000
        while not condition():
            assert self._queue, "nothing more will happen"
            self.now, _, callback = heapq.heappop(self._queue)
            assert self.now < limit, "1000 virtual seconds passed"
            callback()

    def cut(self, a, b):
        assert self.network.break_link(a.name, b.name) > 0

    async def outsider(self, to, name="out"):
        return MemoryOutsider(self, to)

    async def crash(self, peer):
        peer.transport.close()

    async def close(self):
        for peer in self.peers.values():
            peer.transport.close()


class MemoryOutsider(Outsider):
    """Stands where a Connection stands."""

    def __init__(self, world: MemoryWorld, to: Peer) -> None:
        super().__init__()
        self.peer, self.over, self._out = "outsider", False, []
        self._stream = world.network.open(self, to.name, self)

    @property
    def ready(self):
        return bool(self._out)

    def give(self, now):
        return (self._out[0], len(self._out.pop(0))) if self._out else None

    def hear(self, said, now):
        self.heard += decode(said if isinstance(said, bytes) else written(said))

    def closed(self, why):
        self.ended = True

    def say(self, *messages):
        self._out.extend(messages)
        self._stream.there.wake()

    def hang_up(self):
        self._stream.close("the outsider hung up")
