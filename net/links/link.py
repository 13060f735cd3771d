"""One link without I/O: what its two ends say to each other, over any number of connections.

A link has two halves in each direction, `Outbox` and `Inbox`, that live from `dial`/`expect` until
`hang_up`. A *connection* is one open stream; it begins with a hello from each side (the dialling
side speaks first) and carries the halves' messages until it breaks. The halves stay.

What a hello settles:
- Who is there. The wrong destination, an uninvited source, or an older dial is refused.
- Which *session* of the other end this is. A new one means that the other end forgot the link
  (its process restarted, or it hung up): what it had in part is dropped, numbers and credits begin
  anew, and what it has not acknowledged goes out again.
- What it has: frames acknowledged while the connection was down, and where partial ones go on.

A message that breaks a rule ends the connection with a refusal that names the rule. Nothing that
was taken before is lost, and the side that dials comes again, ever more slowly.

A credit is worth no message of its own while the other side has half of its slots to use: it goes
with whatever is said next, which is at the latest the acknowledgement of the next frame.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ...dag.schedule.flow import Role
from .frame import FrameError, FrameHeader, FrameKey, Payload
from .inbox import Allocate, Allowed, Answer, Inbox
from .messages import (
    MIN_CHUNK_BYTES,
    Ack,
    Announcement,
    Chunk,
    Credit,
    Hello,
    Message,
    Outgoing,
    Partial,
    Parts,
    Piece,
    encoded,
    seal,
    size_of,
)
from .outbox import PIECES, Outbox, Pieces
from .transport import GROWS_S, FrameAcknowledged, FrameArrived, FrameGrows, TransportEvent

__all__ = ["Link"]

_UNREAD_ACKS = 65536
"""Only a sender that announces duplicates and never reads lets so many wait."""


class Link:
    """This end of the link between `me` and `peer`. `session` is new for each Link of a peer."""

    def __init__(
        self,
        me: str,
        peer: str,
        session: str,
        allocate: Allocate,
        max_frame_bytes: int,
        allowed: Allowed = lambda _: None,
        pieces: Pieces = PIECES,
    ) -> None:
        self.me, self.peer, self.session = me, peer, session
        self._inbox = Inbox(me, peer, allocate, max_frame_bytes, allowed)
        self._outbox = Outbox(pieces)
        self._other = ""  # session of the other end
        self._acks: deque[Ack] = deque()
        self._credits: dict[Role, Credit] = {}  # to say; a later one replaces an earlier one
        self._patient: dict[Role, Credit] = {}  # to say with something else
        self._partial: dict[int, Partial] = {}  # to say, the newest of each frame
        self._up = False
        self._growing: tuple[FrameHeader, float] | None = None
        """The round's frame that came last, and when something was said of it."""

    # What the owner says.

    def send(self, key: FrameKey, payload: Payload) -> None:
        self._outbox.send(key, payload)

    def allow(self, role: Role, frames: int) -> None:
        self._say(self._inbox.allow(role, frames))

    def release(self, key: FrameKey) -> None:
        now = key.role in self._credits or self._inbox.hurries(key.role)
        for credit in self._inbox.release(key):
            (self._credits if now else self._patient)[credit.role] = credit

    def _say(self, messages: Sequence[Answer]) -> None:
        for message in messages:
            if isinstance(message, Ack):
                self._partial.pop(message.number, None)
                self._acks.append(message)
            elif isinstance(message, Credit):
                self._credits[message.role] = message
            else:
                self._partial[message.number] = message

    # One connection.

    def hello(self, generation: int, attempt: int) -> Hello:
        """What to say first on a new connection."""
        return Hello(
            source=self.me,
            destination=self.peer,
            generation=generation,
            attempt=attempt,
            session=self.session,
            knows=self._other,
            announced=self._inbox.announced,
            partial=self._inbox.partial,
            credits=self._inbox.credits,
        )

    def greet(self, hello: Hello) -> list[TransportEvent]:
        """The other side's hello came: the link is up. Raises FrameError when the hello is not
        for this link, or claims what cannot be; nothing that waits to be sent is lost then."""
        if (hello.source, hello.destination) != (self.peer, self.me):
            raise FrameError(
                f"a hello from {hello.source} to {hello.destination}: this is {self.me}, "
                f"and the dial is for {self.peer}"
            )
        self._acks.clear()  # those that the last connection lost are in our own hello
        self._credits.clear()  # all are said anew below
        self._patient.clear()
        self._partial.clear()
        if hello.session != self._other:
            self._other = hello.session
            self._inbox.restart()
            self._outbox.restart()
        elif hello.knows != self.session:
            self._outbox.restart()
        done = self._outbox.resume(hello) if hello.knows == self.session else []
        # Our hello may have been written before the session was known.
        self._say([Credit(role, frames) for role, frames in self._inbox.credits])
        self._up = True
        return [FrameAcknowledged(self.peer, key) for key in done]

    def receive(self, message: Message | Outgoing, now: float) -> list[TransportEvent]:
        """A record came on the connection, written or as it was. Raises FrameError when it breaks a
        rule; the caller ends the connection then."""
        if len(self._acks) >= _UNREAD_ACKS:
            raise FrameError(f"{self.peer} leaves {len(self._acks)} acknowledgements unread")
        if isinstance(message, Ack):
            done = self._outbox.acknowledge(message.number, now)
            return [] if done is None else [FrameAcknowledged(self.peer, *done)]
        if isinstance(message, Credit):
            self._outbox.credit(message.role, message.frames)
            return []
        if isinstance(message, Partial):
            self._outbox.partial(message.number, message.have, now)
            return []
        grows: list[TransportEvent] = []
        if isinstance(message, Announcement):
            arrived, answers = self._inbox.announce(message.header, message.first)
            self._begins(message.header, now)
            if not arrived:
                self._hurry()  # its bytes may take long
        elif isinstance(message, (Chunk, Piece)):
            arrived, answers = self._inbox.take(message)
            grows = [] if arrived else self._grows(message.number, now)
        elif isinstance(message, FrameHeader):
            arrived, answers = self._inbox.announce(message)
            self._begins(message, now)
            self._hurry()
        else:
            raise FrameError(f"a {type(message).__name__.lower()} in the middle of a link")
        if answers:
            self._say(answers)
        return [FrameArrived(a) for a in arrived] or grows

    def _begins(self, header: FrameHeader, now: float) -> None:
        if header.key.role is Role.ROUND:
            self._growing = header, now

    def _grows(self, number: int, now: float) -> list[TransportEvent]:
        """More of a frame came, which is not whole."""
        if self._growing is None or self._growing[0].number != number:
            return []
        header, since = self._growing
        if now - since < GROWS_S:
            return []
        self._growing = header, now
        return [FrameGrows(self.peer, header.key)]

    def pull(self, now: float) -> Parts | None:
        """The next message to write, or None: nothing to say, or the link is down. Small records
        share a message, since each costs both sides as much as 50 KiB do; a piece ends it that is
        large. One of a round goes alone: an acknowledgement in front of it would come when
        all of it has, seconds later on a slow uplink that many links share."""
        said = self.say(now)
        return None if said is None else seal([part for r in said[0] for part in encoded(r)])

    def say(self, now: float) -> tuple[list[Outgoing], int] | None:
        """As `pull`, for who need not write it: the records of the next message, and the bytes that
        they take."""
        if not self._up:
            return None
        records: list[Outgoing] = []
        found: Outgoing
        size, outbox = 0, self._outbox
        if self._patient and self.ready:
            self._hurry()
        while size < MIN_CHUNK_BYTES:
            if self._credits:
                found = self._credits.pop(next(iter(self._credits)))
            elif self._acks:
                found = self._acks.popleft()
            elif self._partial:
                found = self._partial.pop(next(iter(self._partial)))
            elif records and outbox.rests:
                break
            else:
                piece = outbox.pull(now)
                if piece is None:
                    break
                records.append(piece)
                size += size_of(piece)
                if outbox.patient:
                    break  # what comes next may be urgent
                continue
            records.append(found)
            size += size_of(found)
        return (records, size) if records else None

    def _hurry(self) -> None:
        """Credits need not wait any more."""
        if self._patient:
            self._credits = self._patient | self._credits  # who did not wait is newer
            self._patient = {}

    @property
    def again_bytes(self) -> int:
        """What was handed out so far and has to go out once more, since connections ended."""
        return self._outbox.again_bytes

    def is_with(self, session: str) -> bool:
        """Whether the other end is still in this session."""
        return self._other == session

    @property
    def ready(self) -> bool:
        """Whether `pull` has something to say."""
        if not self._up:
            return False
        if self._acks or self._credits or self._partial:
            return True
        return bool(self._outbox.waiting) and self._outbox.ready

    def broke(self) -> None:
        """The connection is gone."""
        self._up = False
        self._acks.clear()
        self._credits.clear()
        self._patient.clear()
        self._partial.clear()

    def __repr__(self) -> str:
        state = "up" if self._up else "down"
        return f"<Link {self.me} - {self.peer} {state}, {self._outbox!r}, {self._inbox!r}>"
