"""The receiving half of a link: what came, what is still missing, and what may come.

Rules:
- A frame is announced under the number after the last one, within its role's credit, the size
  limit, and what its owner allows for its key; only then is its buffer allocated, once, at its full
  size. Anything else is refused.
- Its bytes come in order. When the last one is here the frame has arrived and is acknowledged. Of
  a snapshot's or a round's frame the sender hears after each piece how much is here, which tells it
  how full the path is.
- From the announcement until `release` it holds a slot of its role. Credit, in total since the
  session began = frames announced + free slots; it never shrinks.
- A frame whose key is here or was lately is acknowledged at once, takes no slot, and its bytes are
  dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...dag.schedule.flow import Role
from .frame import Arrived, FrameError, FrameHeader, FrameKey
from .messages import Ack, Chunk, Credit, Partial, Piece

__all__ = ["Allocate", "Allowed", "Answer", "Inbox"]

Answer = Ack | Credit | Partial
"""What the other side is told of what it said."""

Allocate = Callable[[int], memoryview]
"""Gives a flat writable buffer of that many bytes."""

Allowed = Callable[[FrameKey], int | None]
"""The most bytes that a frame of this key can have; None: nothing is known of it, and only the
general limit holds."""

_REMEMBERED_KEYS = 4096


@dataclass(slots=True)
class _Incoming:
    """A frame that is not wholly here."""

    header: FrameHeader
    data: memoryview
    have: int = 0


@dataclass(slots=True)
class _Slots:
    """The places for frames of one role. `taken`: frames here or on their way; `granted`: credit
    that the other side was told of, or is with the next message (`Link`); `announced`: by it, in
    this session."""

    allowed: int = 0
    taken: int = 0
    announced: int = 0
    granted: int = 0


class Inbox:
    """Receives the frames of one link: keeps their pieces until they are whole, and grants credit
    for further ones."""

    def __init__(
        self,
        me: str,
        peer: str,
        allocate: Allocate,
        max_frame_bytes: int,
        allowed: Allowed = lambda _: None,
    ) -> None:
        self._me, self._peer = me, peer
        self._allocate = allocate
        self._max_frame_bytes = max_frame_bytes
        self._allowed = allowed
        self._slots = {role: _Slots() for role in Role}
        self._partial: dict[int, _Incoming] = {}
        self._held: set[FrameKey] = set()  # arrived, not released
        self._past: dict[FrameKey, None] = {}  # lately released, oldest first
        self._announced = 0

    # What the owner says; each returns what the other side must be told.

    def allow(self, role: Role, frames: int) -> list[Credit]:
        self._slots[role].allowed = frames
        return self._grant(role)

    def hurries(self, role: Role) -> bool:
        """Whether the other side may soon have to wait: it may announce fewer frames than half of
        the role's slots."""
        slots = self._slots[role]
        return 2 * (slots.granted - slots.announced) < slots.allowed

    def release(self, key: FrameKey) -> list[Credit]:
        if key not in self._held:
            return []
        self._held.remove(key)
        past = self._past
        past[key] = None
        if len(past) > _REMEMBERED_KEYS:
            del past[next(iter(past))]
        role = key.role
        self._slots[role].taken -= 1
        return self._grant(role)

    def _grant(self, role: Role) -> list[Credit]:
        slots = self._slots[role]
        free = slots.allowed - slots.taken
        total = slots.announced + free if free > 0 else slots.announced
        if total <= slots.granted:
            return []
        slots.granted = total
        return [Credit(role, total)]

    # What the other side says; each raises FrameError when it may not.

    def announce(
        self, header: FrameHeader, first: Piece | Chunk | None = None
    ) -> tuple[list[Arrived], list[Answer]]:
        """A header came, perhaps with the first of its bytes. A frame without bytes has arrived
        with it."""
        key, number, size_bytes = header.key, header.number, header.size_bytes
        slots = self._slots[key.role]
        if key.source != self._peer or key.destination != self._me:
            raise FrameError(f"{key} came on the link {self._peer} -> {self._me}")
        if number != self._announced + 1:
            raise FrameError(f"frame number {number}: expected {self._announced + 1}")
        if slots.announced >= slots.granted:
            raise FrameError(
                f"{key} is frame {slots.announced + 1} of its role: credit is {slots.granted}"
            )
        if size_bytes > self._max_frame_bytes:
            raise FrameError(f"{size_bytes} bytes for {key}: at most {self._max_frame_bytes} here")
        allowed = self._allowed(key)
        if allowed is not None and size_bytes > allowed:
            raise FrameError(
                f"{size_bytes} bytes for {key}: the plan and its codec allow {allowed}"
            )
        if key in self._held or key in self._past or (self._partial and self._is_partial(key)):
            self._announced += 1
            slots.announced += 1
            return [], [Ack(number), *self._grant(key.role)]
        try:
            frame = _Incoming(header, self._allocate(size_bytes))
        except MemoryError:
            raise FrameError(f"no memory for the {size_bytes} bytes of {key}") from None
        self._announced += 1
        slots.announced += 1
        slots.taken += 1
        if size_bytes == 0:
            return self._arrived(frame)
        self._partial[number] = frame
        return ([], []) if first is None else self.take(first)

    def _is_partial(self, key: FrameKey) -> bool:
        for frame in self._partial.values():  # noqa: SIM110  # hardly ever one
            if frame.header.key == key:
                return True
        return False

    def take(self, piece: Piece | Chunk) -> tuple[list[Arrived], list[Answer]]:
        """Bytes came; they are copied into the frame's buffer."""
        frame = self._partial.get(piece.number)
        if frame is None:
            if 0 < piece.number <= self._announced:
                return [], []  # of a duplicate that was acknowledged while its bytes were under way
            raise FrameError(f"bytes of frame {piece.number}, which was not announced")
        header, begin = frame.header, piece.offset
        if begin != frame.have:
            raise FrameError(f"bytes of {header.key} from {begin} on: expected {frame.have}")
        data = piece.data
        end = begin + data.nbytes
        if end > header.size_bytes:
            raise FrameError(
                f"bytes up to {end} of {header.key}: its header says {header.size_bytes}"
            )
        frame.data[begin:end] = data
        frame.have = end
        if end < header.size_bytes:
            told = header.key.role in (Role.SNAPSHOT, Role.ROUND)
            return [], [Partial(piece.number, end)] if told else []
        del self._partial[piece.number]
        return self._arrived(frame)

    def _arrived(self, frame: _Incoming) -> tuple[list[Arrived], list[Answer]]:
        header = frame.header
        self._held.add(header.key)
        arrived = Arrived(
            header.key,
            header.codec,
            header.codec_header,
            header.spec,
            frame.data,
            header.absent,
        )
        return [arrived], [Ack(header.number)]

    # Connections.

    @property
    def announced(self) -> int:
        return self._announced

    @property
    def partial(self) -> tuple[tuple[int, int], ...]:
        """(number, bytes here) of each frame that is not wholly here."""
        return tuple((number, frame.have) for number, frame in self._partial.items())

    @property
    def credits(self) -> tuple[tuple[Role, int], ...]:
        return tuple((role, s.granted) for role, s in self._slots.items() if s.granted)

    def restart(self) -> None:
        """The sender forgot the link: partial frames are dropped, numbers and credit begin anew.
        What arrived and was not released keeps its slot."""
        for frame in self._partial.values():
            self._slots[frame.header.key.role].taken -= 1
        self._partial.clear()
        self._announced = 0
        for slots in self._slots.values():
            slots.announced = slots.granted = 0
        for role in self._slots:
            self._grant(role)

    def __repr__(self) -> str:
        return f"<Inbox {len(self._held)} held, {len(self._partial)} partial>"
