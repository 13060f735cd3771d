"""One stream of a link without I/O, from its hello to its last words.

A transport gives a connection each message that comes (`receive`), writes what it has to say
(`pull`), tells it when the stream ended (`closed`), and closes the stream when the connection is
`over` and has nothing more to say. What it may do with its link the switchboard decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from .frame import FrameError
from .link import Link
from .messages import (
    MAX_HELLO_BYTES,
    Hello,
    Message,
    Outgoing,
    Parts,
    Refusal,
    Said,
    decode,
    encoded,
    seal,
    sealed_bytes,
    size_of,
)
from .transport import LinkDown, LinkRefused, LinkUp, TransportEvent

if TYPE_CHECKING:
    from .switchboard import Switchboard

__all__ = ["Connection"]


class Connection:
    """One stream of a link, from the hello on. `wake` is called when there is something to pull,
    unless `hear` says so."""

    def __init__(
        self,
        board: Switchboard,
        wake: Callable[[], None],
        link: Link | None,
        dial: tuple[int, int],
        proven: str | None = None,
    ) -> None:
        self._board = board
        self.wake = wake
        self._link = link  # None before the hello of an incoming one, and when it is over
        self.peer = link.peer if link else ""
        """Who is at the other end, as far as it is known."""
        self.proven = proven
        """Whom the certificate of who opened it names; None: there is none, or we opened it."""
        self.dial = dial  # (generation, attempt)
        self.dialled = link is not None
        self.over = False
        """Nothing is received any more; the stream is closed once `pull` gives None."""
        self.useful = False
        """Whether it moved a whole frame; a dialler that gets nowhere comes back more slowly."""
        self.greeted = False
        """Whether its link uses it."""
        self._last_words: list[Hello | Refusal] = []
        if link is not None:
            self._say(link.hello(*dial))

    @property
    def ready(self) -> bool:
        """Whether there may be something to pull; also its own end."""
        if self._last_words or self.over:
            return True
        return self.greeted and self._link is not None and self._link.ready

    def _say(self, message: Hello | Refusal) -> None:
        self._last_words.append(message)

    def receive(self, message: bytes, now: float) -> None:
        """A message came. Nothing is raised, whatever it is. `now`: seconds, of `pull`'s clock."""
        if self.over:
            return
        try:
            if not self.greeted and len(message) > MAX_HELLO_BYTES:
                raise FrameError(f"a message of {len(message)} bytes before the hello")
            records = decode(message)
        except FrameError as e:
            self.refuse("protocol", str(e))
            return
        if self._take_all(records, now):
            self.wake()

    def hear(self, said: Said, now: float) -> bool:
        """As `receive`, of what the other side's `give` gave. Whether there is something to pull
        now: `wake` may not have been called for it."""
        if isinstance(said, bytes):
            self.receive(said, now)
            return False
        return not self.over and self._take_all(said, now)

    def _take_all(self, records: Iterable[Message | Outgoing], now: float) -> bool:
        """Whether there is something to pull now."""
        for part in records:
            link = self._link  # none any more: the owner hung up in a callback
            try:
                if self.greeted and link is not None and not isinstance(part, Refusal):
                    events = link.receive(part, now)
                    self.useful = self.useful or bool(events)
                else:
                    events = self._take(part)
            except FrameError as e:
                self.refuse("protocol", str(e))
                return False
            if events:
                self._board.emit(events)
        link = self._link
        return self.greeted and link is not None and link.ready

    def _take(self, message: Message | Outgoing) -> list[TransportEvent]:
        """Take a record that is not for the link."""
        if self.over:  # by what came before it, or by the owner in a callback
            return []
        if isinstance(message, Refusal):
            why = f"{self.peer or 'the other side'} refuses: {message.text}"
            return [LinkRefused(self.peer, why), *self.end(why)]
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
            before = self._link.again_bytes
            events = self._link.greet(hello)
            self._say(self._link.hello(*self.dial))
        elif (hello.generation, hello.attempt) == self.dial:
            before = self._link.again_bytes
            events = self._link.greet(hello)
        else:
            raise FrameError(
                f"{self.peer} answers dial {hello.generation}, attempt {hello.attempt}: "
                f"this is dial {self.dial[0]}, attempt {self.dial[1]}"
            )
        self._board.connected(self._link, self)
        self.wake()
        again = self._link.again_bytes - before
        return [LinkUp(self._link.peer, self.dial[0], again), *events]

    def pull(self, now: float) -> Parts | None:
        """The next message to write, in parts; None when there is nothing now."""
        if self._last_words:
            return seal(encoded(self._last_words.pop(0)))
        if self.over or not self.greeted:
            return None
        assert self._link is not None
        return self._link.pull(now)

    def give(self, now: float) -> tuple[Said, int] | None:
        """The next message, not written, and its size in bytes; see `pull`. For a transport that
        stays within one process."""
        if self._last_words:
            word = self._last_words.pop(0)
            return [word], sealed_bytes(size_of(word))
        if self.over or not self.greeted:
            return None
        assert self._link is not None
        said = self._link.say(now)
        return None if said is None else (said[0], sealed_bytes(said[1]))

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
        """End the connection; return what is to be said of it."""
        if self.over:
            return []
        was_up = self.greeted
        self.over = True
        if self._link is not None:
            self._board.disconnected(self._link, self)
        self._link = None  # a connection that is still being closed keeps no frames
        self.wake()
        return [LinkDown(self.peer, why)] if was_up else []
