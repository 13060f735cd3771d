"""All links of one peer without I/O: who may open a connection, and which one a link uses.

A transport makes a `Connection` for every stream that it opens (`outgoing`) or that is opened to it
(`incoming`), gives it each message that comes, writes what it pulls, and closes the stream when the
connection is over and has nothing more to say. Everything else is decided here.

A connection greets first. Of several connections of a link the newest counts, by the generation of
the dial and the attempt within it; it ends the one before. What is refused is told why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..dag.flow import Role
from .buffers import Buffers
from .frame import FrameError, FrameKey, Payload
from .inbox import Allocate
from .link import Link
from .messages import Hello, Message, Parts, Refusal, decode, record, seal
from .transport import (
    LinkDown,
    LinkError,
    LinkRefused,
    LinkUp,
    OnEvent,
    TransportEvent,
)

__all__ = ["MAX_FRAME_BYTES", "Connection", "Switchboard", "backoff_s"]

MAX_FRAME_BYTES = 16 * 1024**3
"""The largest frame that is received unless a transport is told otherwise."""


def backoff_s(failures: int) -> float:
    """Seconds to wait before the next attempt, after so many that brought nothing in a row."""
    return float(min(5.0, 0.05 * 2 ** min(failures, 10)))


class Connection:
    """One stream of a link, from the hello on. `wake` is called when there is something to pull."""

    def __init__(
        self, board: Switchboard, wake: Callable[[], None], link: Link | None, dial: tuple[int, int]
    ) -> None:
        self._board = board
        self.wake = wake
        self._link = link  # None before the hello of an incoming one, and when it is over
        self.peer = link.peer if link else ""
        """Who is at the other end, as far as it is known."""
        self.dial = dial  # (generation, attempt)
        self.dialled = link is not None
        self.over = False
        """Nothing is received any more; the stream is closed once `pull` gives None."""
        self.useful = False
        """Whether it moved a whole frame; a dialler that gets nowhere comes back more slowly."""
        self._last_words: list[Parts] = []
        if link is not None:
            self._say(link.hello(*dial))

    @property
    def greeted(self) -> bool:
        return self._link is not None and self._board.uses(self._link, self)

    def _say(self, message: Hello | Refusal) -> None:
        self._last_words.append(seal([record(message)]))

    def receive(self, message: bytes) -> None:
        """A message came. Nothing is raised, whatever it is."""
        if self.over:
            return
        try:
            records = decode(message)
        except FrameError as e:
            self.refuse("protocol", str(e))
            return
        for part in records:
            try:
                events = self._take(part)
            except FrameError as e:
                self.refuse("protocol", str(e))
                return
            self._board.emit(events)

    def _take(self, message: Message) -> list[TransportEvent]:
        if self.over:  # by what came before it, or by the owner in a callback
            return []
        if isinstance(message, Refusal):
            why = f"{self.peer or 'the other side'} refuses: {message.text}"
            return [LinkRefused(self.peer, why), *self.end(why)]
        if self.greeted:
            assert self._link is not None
            events = self._link.receive(message)
            self.useful |= bool(events)
            if self._link.ready:
                self.wake()
            return events
        if not isinstance(message, Hello):
            raise FrameError(f"a {type(message).__name__} before the hello")
        return self._greet(message)

    def _greet(self, hello: Hello) -> list[TransportEvent]:
        if self._link is None:
            self.dial = (hello.generation, hello.attempt)
            self._link = self._board.admit(self, hello)
            if self._link is None:
                return []
            self.peer = self._link.peer
            events = self._link.greet(hello)
            self._say(self._link.hello(*self.dial))
        elif (hello.generation, hello.attempt) == self.dial:
            events = self._link.greet(hello)
        else:
            raise FrameError(
                f"{self.peer} answers dial {hello.generation}, attempt {hello.attempt}: "
                f"this is dial {self.dial[0]}, attempt {self.dial[1]}"
            )
        self._board.connected(self._link, self)
        self.wake()
        return [LinkUp(self._link.peer, self.dial[0]), *events]

    def pull(self, now: float) -> Parts | None:
        """The next message to write, in parts; None when there is nothing now."""
        if self._last_words:
            return self._last_words.pop(0)
        if self.over or not self.greeted:
            return None
        assert self._link is not None
        return self._link.pull(now)

    def refuse(self, code: str, why: str, peer: str = "") -> None:
        """The other side broke a rule or is not wanted: it is told, and so is our owner."""
        self._say(Refusal(code, why))
        self._board.emit([LinkRefused(peer or self.peer, why), *self.end(why)])

    def closed(self, why: str) -> None:
        """The stream ended, or could not be opened."""
        if not self.over:
            unreached = self.dialled and not self.greeted
            events = self.end(why)
            self._board.emit([LinkDown(self.peer, why)] if unreached else events)

    def end(self, why: str) -> list[TransportEvent]:
        """It is over; returns what is to be said of it."""
        if self.over:
            return []
        was_up = self.greeted
        self.over = True
        if self._link is not None:
            self._board.disconnected(self._link, self)
        self._link = None  # a connection that is still being closed keeps no frames
        self.wake()
        return [LinkDown(self.peer, why)] if was_up else []


class Switchboard:
    """See the module. `boot` differs between two lives of one peer."""

    def __init__(
        self,
        me: str,
        boot: str,
        on_event: OnEvent,
        *,
        allocate: Allocate | None = None,
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        self.me = me
        self._boot = boot
        self._on_event = on_event
        self._buffers = Buffers()
        self._allocate = allocate or self._buffers.take
        self._max_frame_bytes = max_frame_bytes
        self._links: dict[str, Link] = {}
        self._expected: set[str] = set()  # never iterated
        self._connections: dict[str, Connection] = {}  # the one that each link uses
        self._greeting: dict[str, Connection] = {}  # our dials that were not answered yet
        self._last_dial: dict[str, tuple[int, int]] = {}  # the newest that was up, by link
        self._sessions = 0
        self._attempts = 0

    # The calls of the transport's interface that need no I/O.

    def expect(self, peer: str) -> None:
        self._expected.add(peer)
        self.link(peer)

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
            )
        return self._links[peer]

    def _known(self, peer: str) -> Link:
        if peer not in self._links:
            raise LinkError(f"{self.me} has no link to {peer}: dial or expect it first")
        return self._links[peer]

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

    def incoming(self, wake: Callable[[], None]) -> Connection:
        """Someone opened a stream to us."""
        return Connection(self, wake, None, (0, 0))

    def admit(self, connection: Connection, hello: Hello) -> Link | None:
        """The link that an incoming hello is for; None when it was refused."""
        who = hello.source
        if hello.destination != self.me:
            connection.refuse(
                "destination", f"{who} dials {hello.destination}: this is {self.me}", who
            )
            return None
        if who not in self._expected:
            connection.refuse("stranger", f"{self.me} does not expect a dial of {who}", who)
            return None
        link, dial = self._links[who], (hello.generation, hello.attempt)
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

    def uses(self, link: Link, connection: Connection) -> bool:
        return self._connections.get(link.peer) is connection

    def connected(self, link: Link, connection: Connection) -> None:
        """The link uses this connection from now on."""
        if self._greeting.get(link.peer) is connection:
            del self._greeting[link.peer]
        self._connections[link.peer] = connection
        self._last_dial[link.peer] = connection.dial

    def disconnected(self, link: Link, connection: Connection) -> None:
        """The connection is over; the link is down if it used it."""
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
