"""A peer's stream to the broker in the simulated world: two ordered directions of messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...broker.events import StreamId
from ...net.transports.carrier import InOrder
from ...net.transports.memory import HELLO_S, SILENT_S

if TYPE_CHECKING:
    from .peer_shell import PeerShell
    from .world import World

__all__ = ["BROKER", "Control", "nothing"]

BROKER = "broker"
"""The broker's name on the network."""


class Control:
    """One attempt to attach: from the dial to the end of the stream that came of it.

    The dial takes a way there and back. A message takes its bytes over the link to the broker, and
    comes behind those before it. When one end cannot hear the other, the stream breaks after
    SILENT_S, as gRPC's keepalive has it.
    """

    def __init__(self, world: World, peer: PeerShell, number: int) -> None:
        self.world, self.peer, self.name = world, peer, peer.name
        self.id = StreamId(f"stream-{number}")
        self._there, self._back = InOrder(), InOrder()
        self._silent_since: float | None = None
        self.open_here = True
        """Whether the peer has not seen its end."""
        self.open_there = False
        """Whether the broker has seen its begin and not its end."""
        world.carrier.send(self.name, BROKER, 0, nothing, self._there.next(self._reached))
        world.after(HELLO_S, self._not_reached)

    # ------------------------------------------------------------ the peer's end

    def say(self, data: bytes) -> None:
        if self.open_here:
            said = self._there.next(lambda: self.world.broker.said(self, data))
            self.world.carrier.send(self.name, BROKER, len(data), nothing, said)

    def end_here(self, why: str) -> None:
        """The peer's process ended it, or its process is gone; the broker hears of it later."""
        if self.open_here:
            self.open_here = False
            closed = self._there.next(lambda: self.world.broker.closed(self, why))
            self.world.carrier.send(self.name, BROKER, 0, nothing, closed)

    # ------------------------------------------------------------ the broker's end

    def tell(self, data: bytes) -> None:
        if self.open_there:
            told = self._back.next(lambda: self.peer.told(self, data))
            self.world.carrier.send(BROKER, self.name, len(data), nothing, told)

    def end_there(self, why: str) -> None:
        """The broker ended it, after what it told."""
        if self.open_there:
            self.open_there = False
            ended = self._back.next(lambda: self._end_for_peer(why))
            self.world.carrier.send(BROKER, self.name, 0, nothing, ended)

    # ------------------------------------------------------------ what happens to it

    def cut(self, why: str) -> None:
        """Both ends see it break, now."""
        if self.open_there:
            self.world.broker.closed(self, why)
        self._end_for_peer(why)

    def watch(self) -> None:
        """Whether its ends hear each other has changed, perhaps."""
        if self.world.hear_each_other(self.name, BROKER):
            self._silent_since = None
        elif self._silent_since is None:
            self._silent_since = since = self.world.now

            def give_up() -> None:
                if self._silent_since == since:
                    self.cut(f"no answer for {SILENT_S:.0f} s")

            self.world.after(SILENT_S, give_up)

    def _reached(self) -> None:
        if self.open_here and not self.world.broker.alive:
            refused = self._back.next(lambda: self._end_for_peer("no broker answers there"))
            self.world.carrier.send(BROKER, self.name, 0, nothing, refused)
        elif self.open_here:
            self.open_there = True
            self.world.broker.opened(self)
            attached = self._back.next(lambda: self.peer.attached(self))
            self.world.carrier.send(BROKER, self.name, 0, nothing, attached)

    def _not_reached(self) -> None:
        if not self.open_there:
            self._end_for_peer(f"the broker cannot be reached within {HELLO_S:.0f} s")

    def _end_for_peer(self, why: str) -> None:
        if self.open_here:
            self.open_here = False
            self.peer.detached(self, why)


def nothing() -> None:
    pass
