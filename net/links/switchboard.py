"""All links of one peer without I/O: who may open a connection, and which one a link uses.

Of several connections of a link the newest counts, by the generation of the dial and the attempt
within it; it ends the one before. What is refused is told why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ...dag.schedule.flow import Role
from .buffers import Buffers
from .connection import Connection
from .frame import FrameKey, Payload
from .inbox import Allocate, Allowed
from .link import Link
from .messages import Hello
from .outbox import PIECES, Pieces
from .transport import LinkError, OnEvent, TransportEvent

__all__ = ["MAX_FRAME_BYTES", "Switchboard", "backoff_s"]

MAX_FRAME_BYTES = 16 * 1024**3
"""The largest frame that is received unless a transport is told otherwise."""


def backoff_s(failures: int) -> float:
    """Seconds to wait before the next attempt, after so many that brought nothing in a row."""
    return float(min(5.0, 0.05 * 2 ** min(failures, 10)))


class Switchboard:
    """Decides who may open a connection to this peer, and which connection each link uses. `boot`
    differs between two lives of one peer."""

    def __init__(
        self,
        me: str,
        boot: str,
        on_event: OnEvent,
        *,
        allocate: Allocate | None = None,
        max_frame_bytes: int = MAX_FRAME_BYTES,
        allowed: Allowed = lambda _: None,
        pieces: Pieces = PIECES,
    ) -> None:
        self.me = me
        self._boot = boot
        self._on_event = on_event
        self._buffers = Buffers()
        self._allocate = allocate or self._buffers.take
        self._max_frame_bytes = max_frame_bytes
        self._allowed = allowed
        self._pieces = pieces
        self._links: dict[str, Link] = {}
        self._expected: set[str] = set()  # never iterated
        self._connections: dict[str, Connection] = {}  # the one that each link uses
        self._greeting: dict[str, Connection] = {}  # our dials that were not answered yet
        self._last_dial: dict[str, tuple[int, int]] = {}  # the newest that was up, by link
        self._sessions = 0
        self._attempts = 0

    # The calls of the transport's interface that need no I/O.

    def expect(self, peer: str) -> None:
        self._expected.add(peer)  # the link itself is made when there is something of it

    def send(self, to: str, key: FrameKey, payload: Payload) -> None:
        self._known(to).send(key, payload)
        self._wake(to)

    def release(self, peer: str, key: FrameKey) -> None:
        if peer in self._links:
            self._links[peer].release(key)
            self._wake(peer)

    def allow(self, peer: str, role: Role, frames: int) -> None:
        self._known(peer).allow(role, frames)
        self._wake(peer)

    def hang_up(self, peer: str) -> None:
        self._expected.discard(peer)
        for connection in self._connections_of(peer):
            connection.end(f"{self.me} hung up")
        self._links.pop(peer, None)
        self._last_dial.pop(peer, None)
        if not self._links:
            self._buffers.trim()

    def link(self, peer: str) -> Link:
        """The link to `peer`, made if there is none."""
        if peer not in self._links:
            self._sessions += 1
            self._links[peer] = Link(
                self.me,
                peer,
                f"{self._boot}.{self._sessions}",
                self._allocate,
                self._max_frame_bytes,
                self._allowed,
                self._pieces,
            )
        return self._links[peer]

    def _known(self, peer: str) -> Link:
        if peer not in self._links and peer not in self._expected:
            raise LinkError(f"{self.me} has no link to {peer}: dial or expect it first")
        return self.link(peer)

    def _wake(self, peer: str) -> None:
        if peer in self._connections and self._links[peer].ready:
            self._connections[peer].wake()

    # Connections.

    def outgoing(self, peer: str, generation: int, wake: Callable[[], None]) -> Connection:
        """A stream to `peer` was opened: what it says first is ready to pull."""
        # Before our hello is written: what still came on the old connection would not be in it.
        self._end_all(peer, "a newer dial replaces it")
        self._attempts += 1
        connection = Connection(self, wake, self.link(peer), (generation, self._attempts))
        self._greeting[peer] = connection
        return connection

    def incoming(self, wake: Callable[[], None], proven: str | None = None) -> Connection:
        """Someone opened a stream to us; `proven`: who it is, where certificates say so."""
        return Connection(self, wake, None, (0, 0), proven)

    def admit(self, connection: Connection, hello: Hello) -> Link | None:
        """The link that an incoming hello is for; None when it was refused."""
        who = hello.source
        if hello.destination != self.me:
            connection.refuse(
                "destination", f"{who} dials {hello.destination}: this is {self.me}", who
            )
            return None
        if connection.proven not in (None, who):
            why = f"a hello of {who} by the certificate of {connection.proven}"
            connection.refuse("identity", why, connection.proven or "")
            return None
        if who not in self._expected:
            connection.refuse("stranger", f"{self.me} does not expect a dial of {who}", who)
            return None
        link, dial = self.link(who), (hello.generation, hello.attempt)
        last = self._last_dial.get(who, (0, 0))
        # Attempts of another session count anew, so only the generation says which is older.
        older = dial <= last if link.is_with(hello.session) else dial[0] < last[0]
        if older:
            connection.refuse(
                "older",
                f"dial {dial[0]}, attempt {dial[1]} of {who}: dial {last[0]}, attempt {last[1]} "
                f"came before",
                who,
            )
            return None
        # Before the link greets: what still came on the old connection would not be in our hello.
        self._end_all(who, f"replaced by dial {dial[0]}, attempt {dial[1]}")
        if self._links.get(who) is link:
            return link
        connection.refuse("stranger", f"{self.me} just hung up on {who}", who)
        return None

    def _connections_of(self, peer: str) -> list[Connection]:
        both = (self._connections.get(peer), self._greeting.get(peer))
        return [connection for connection in both if connection is not None]

    def _end_all(self, peer: str, why: str) -> None:
        """Ends the connections of a link. The owner hears of it, and may hang up then."""
        for connection in self._connections_of(peer):
            self.emit(connection.end(why))

    def connected(self, link: Link, connection: Connection) -> None:
        """The link uses this connection from now on."""
        if self._greeting.get(link.peer) is connection:
            del self._greeting[link.peer]
        connection.greeted = True
        self._connections[link.peer] = connection
        self._last_dial[link.peer] = connection.dial

    def disconnected(self, link: Link, connection: Connection) -> None:
        """The connection is over; the link is down if it used it."""
        connection.greeted = False
        for connections in (self._connections, self._greeting):
            if connections.get(link.peer) is connection:
                del connections[link.peer]
        if link.peer not in self._connections:
            link.broke()

    def close(self, why: str) -> None:
        """Ends every connection; links stay."""
        for peer in list(self._links):
            self._end_all(peer, why)

    def silence(self) -> None:
        """The owner is gone: no event is told any more."""
        self._on_event = lambda event: None

    def emit(self, events: Iterable[TransportEvent]) -> None:
        for event in events:
            self._on_event(event)

    def __repr__(self) -> str:
        return f"<Switchboard {self.me}: {len(self._connections)} of {len(self._links)} links up>"
