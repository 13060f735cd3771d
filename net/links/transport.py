"""The transport: what carries frames between peers, whatever carries the bytes.

Calls never wait. What happens comes as events through one callback, which the transport calls in
the one thread that also makes the calls (for gRPC, the event loop's); it may call the transport.

A *link* joins two peers and outlives its connections. It begins with `dial` or `expect` and ends
with `hang_up`. While it lives, a frame that was sent arrives once, however often the connection
breaks; frames of one role arrive in the order in which they were sent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...dag.schedule.flow import Role
from .frame import Arrived, FrameKey, Payload, immutable

if TYPE_CHECKING:
    from .switchboard import Switchboard

__all__ = [
    "GROWS_S",
    "FrameAcknowledged",
    "FrameArrived",
    "FrameGrows",
    "LinkDown",
    "LinkError",
    "LinkRefused",
    "LinkUp",
    "OnEvent",
    "Transport",
    "TransportEvent",
]


class LinkError(RuntimeError):
    """The transport was asked for what cannot be: a frame to a peer without a link, say."""


@immutable
class LinkUp:
    """Frames can flow, both ways. `generation` is that of the dial."""

    peer: str
    generation: int
    again_bytes: int = 0
    """Of frames that were under way when the last connection ended, and go out once more."""


@immutable
class LinkDown:
    """The connection broke. Nothing is lost: the side that dials tries again until `hang_up`."""

    peer: str
    why: str


@immutable
class LinkRefused:
    """One side broke a rule, or is not wanted: `why` says which rule, and whose reason it is.

    `peer` is who the other side claims to be. The side that dials tries again, ever more slowly.
    """

    peer: str
    why: str


@immutable
class FrameArrived:
    """A whole frame is here and holds its receive slot until `release`."""

    arrived: Arrived


@immutable
class FrameAcknowledged:
    """The peer has the whole frame; its buffers are free again here. `began_s`: when its first byte
    was handed to the connection, by the link's clock; None: a connection broke since."""

    peer: str
    key: FrameKey
    began_s: float | None = None


@immutable
class FrameGrows:
    """More of a round's frame is here, which takes long; said every `GROWS_S` at most."""

    peer: str
    key: FrameKey


GROWS_S = 5.0

TransportEvent = LinkUp | LinkDown | LinkRefused | FrameArrived | FrameGrows | FrameAcknowledged
OnEvent = Callable[[TransportEvent], None]


class Transport(ABC):
    """One peer's end of all its links, which `board` has."""

    board: Switchboard

    @abstractmethod
    def dial(self, peer: str, address: str, generation: int) -> None:
        """Reach `peer` at `address`, and again after every break, until `hang_up`. A newer
        generation replaces the dial before, and keeps the link's frames; an older one is ignored.
        """

    def expect(self, peer: str) -> None:
        """Let `peer` dial us; whoever is not expected is refused."""
        self.board.expect(peer)

    def hang_up(self, peer: str) -> None:
        """Forget the link with all its frames, sent or not; no event follows. Without a link,
        nothing happens."""
        self.board.hang_up(peer)

    def send(self, to: str, key: FrameKey, payload: Payload) -> None:
        """Queue a frame. A key that the link has already is ignored. The payload's buffers stay
        unchanged until FrameAcknowledged or `hang_up`. Raises LinkError without a link."""
        self.board.send(to, key, payload)

    def release(self, peer: str, key: FrameKey) -> None:
        """An arrived frame was consumed: its slot is free for the next of its role. Nothing
        happens for a frame that is not here."""
        self.board.release(peer, key)

    def allow(self, peer: str, role: Role, frames: int) -> None:
        """How many frames of a role may be here or on their way at once; 0 until said otherwise.
        Raises LinkError without a link."""
        self.board.allow(peer, role, frames)
