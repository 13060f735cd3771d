"""The sending half of a link: which bytes go next.

Rules:
- Frames of one role go in the order of `send`, one after the other. A frame is announced (its
  header goes out, it gets the next number) when it is first of its role, and the receiver's credit
  for that role covers it.
- Pieces of different roles interleave: snapshots and probes only when nothing else can go, except
  that every 16th piece is theirs, so that a busy link starves nobody; and their pieces are at most
  a quarter as long, so that nothing waits long for one. Among the other roles each has its turn.
  So a frame waits for at most one piece of each other role. A header goes with the first piece.
- Of snapshots and rounds only so much is on its way that little stands in buffers (`patience.py`).
- A frame stays here, encoded, until it is acknowledged. After a break it goes on behind the bytes
  that the receiver has; it is never encoded again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ...dag.schedule.flow import Role
from .frame import FrameError, FrameHeader, FrameKey, Payload
from .messages import MIN_CHUNK_BYTES, Announcement, Chunk, Hello
from .patience import SendWindow
from .transport import LinkError

__all__ = ["PIECES", "Outbox", "Pieces"]

_PATIENT = frozenset({Role.SNAPSHOT, Role.PROBE, Role.ROUND})
_PATIENT_TURN = 16
_LEAST_ROUND_BYTES = 8 * 1024
_PATIENT_SHARE = 4
_REMEMBERED_KEYS = 4096
_QUEUED_FRAMES = 65536


class Pieces(NamedTuple):
    """How large the pieces of a frame may be."""

    most_s: float
    """A piece should take at most this long on the link."""
    most_bytes: int
    wait_s: float = 0.025
    """So long may a frame be held up by a snapshot on the link, whose pieces take half of it..."""
    rest_share: float = 0.0
    """...or up to this share of the time in which nothing else went on the link, if that is more:
    fewer pieces where each costs more than the bytes in it."""
    round_wait_s: float = 0.2
    """So long by a round, which shares the line with those of other links: each has so much of its
    own rate in buffers."""


PIECES = Pieces(0.05, 2 * 1024 * 1024)
"""A byte costs least over gRPC in pieces of 2 MiB; smaller and larger ones both cost more (256 KiB:
twice as much; 4 MiB: a tenth more)."""


@dataclass(slots=True)
class _Outgoing:
    """A frame that is not acknowledged. number 0: not announced; sent: bytes handed out; began_s:
    when the first of them were, None over a break."""

    key: FrameKey
    payload: Payload
    size_bytes: int
    buffers: tuple[memoryview, ...]
    number: int = 0
    sent: int = 0
    began_s: float | None = None

    @property
    def header(self) -> FrameHeader:
        payload = self.payload
        return FrameHeader(
            self.number,
            self.key,
            payload.codec,
            payload.codec_header,
            payload.spec,
            self.size_bytes,
            payload.absent,
        )


@dataclass(slots=True, eq=False)
class _Lane:
    """One role. `patient`: others go first. `queue`: frames not wholly handed out, in order; only
    the first may be announced. `announced`, `credit`: frames of this session, in total.
    `window`: what bounds the bytes on their way."""

    patient: bool
    window: SendWindow | None = None
    queue: deque[_Outgoing] = field(default_factory=deque)
    announced: int = 0
    credit: int = 0

    @property
    def ready(self) -> bool:
        """Whether its first frame may go on; there is one."""
        if self.announced < self.credit or self.queue[0].number > 0:
            return self.window is None or not self.window.full
        return False


class Outbox:
    """Sends the frames of one link: decides which bytes go next. Everything that it hands out is
    for one connection, in order."""

    def __init__(self, pieces: Pieces = PIECES) -> None:
        self._lanes = {role: _Lane(role in _PATIENT) for role in Role}
        most_bytes = pieces.most_bytes // _PATIENT_SHARE
        window = SendWindow(pieces.wait_s, most_bytes, pieces.rest_share)
        self._lanes[Role.SNAPSHOT].window = window
        window = SendWindow(pieces.round_wait_s, most_bytes, least_bytes=_LEAST_ROUND_BYTES)
        self._lanes[Role.ROUND].window = window
        self.waiting: list[_Lane] = []
        """Lanes with a queue. Who had its turn longest ago comes first."""
        self._unacknowledged: dict[int, _Outgoing] = {}  # by number; announced frames only
        self._keys: set[FrameKey] = set()  # not acknowledged
        self._past: dict[FrameKey, None] = {}  # lately acknowledged, oldest first
        self._number = 0  # of the last announced frame
        self._acknowledged = 0  # highest number
        self._since_patient = 0
        self.patient = False
        """Whether the last piece was of what can wait."""
        self._ahead = 0
        """Bytes on their way that the window does not hold."""
        self._hurried_s: float | None = None
        """When the last piece of another frame than a snapshot's was handed out; before that, when
        the first of a snapshot's was."""
        self._rate = _Rate(pieces)
        self.again_bytes = 0
        """Handed out so far for connections that ended before the receiver had them."""

    def send(self, key: FrameKey, payload: Payload) -> None:
        """Queues the frame; a key that is known is ignored. Raises LinkError past the bound."""
        keys = self._keys
        if key in keys or key in self._past:
            return
        if len(keys) >= _QUEUED_FRAMES:
            raise LinkError(f"{len(self)} frames wait for {key.destination} already; {key} is over")
        buffers = payload.buffers
        if any([b.format != "B" or b.ndim != 1 for b in buffers]):
            buffers = tuple([b.cast("B") for b in buffers])
        keys.add(key)
        lane = self._lanes[key.role]
        if not lane.queue:
            self.waiting.append(lane)
        lane.queue.append(_Outgoing(key, payload, payload.size_bytes, buffers))

    def credit(self, role: Role, frames: int) -> None:
        """The receiver's total; it never shrinks within a session."""
        lane = self._lanes[role]
        if frames > lane.credit:
            lane.credit = frames

    def acknowledge(self, number: int, now: float) -> tuple[FrameKey, float | None] | None:
        """The frame is there: it is forgotten; also when its first byte was handed out. None for
        one that was acknowledged before. Raises FrameError for a number never announced."""
        if not 0 < number <= self._number:
            raise FrameError(
                f"acknowledged frame {number}: only 1 to {self._number} were announced"
            )
        frame = self._unacknowledged.pop(number, None)
        if frame is None:
            return None
        key = frame.key
        lane = self._lanes[key.role]
        if lane.window is not None:
            lane.window.arrived(number, math.inf, now)
        else:
            self._ahead -= frame.sent
        if lane.queue and lane.queue[0] is frame:
            self._leave(lane)
        if number > self._acknowledged:
            self._acknowledged = number
        self._keys.remove(key)
        past = self._past
        past[key] = None
        if len(past) > _REMEMBERED_KEYS:
            del past[next(iter(past))]
        return key, frame.began_s

    def partial(self, number: int, have: int, now: float) -> None:
        """Note that so many bytes of a frame are there. Raises FrameError for what was never
        sent."""
        frame = self._unacknowledged.get(number)
        if number > self._number or (frame is not None and have > frame.sent):
            raise FrameError(f"the other side has {have} bytes of frame {number}: never sent")
        if frame is not None and (window := self._lanes[frame.key.role].window) is not None:
            window.arrived(number, have, now)

    def resume(self, hello: Hello) -> list[FrameKey]:
        """Goes on behind what the receiver has; returns the frames that it has wholly.

        Raises FrameError when it claims what was never sent; nothing has changed then.
        """
        partial = dict(hello.partial)
        if not self._acknowledged <= hello.announced <= self._number:
            raise FrameError(
                f"the other side knows of frames up to {hello.announced}: {self._number} were "
                f"announced, and it has acknowledged {self._acknowledged}"
            )
        for number, have in partial.items():
            frame = self._unacknowledged.get(number)
            if frame is None or number > hello.announced or have >= frame.size_bytes:
                raise FrameError(f"the other side has {have} bytes of frame {number}: never sent")
        self._broke()  # so it learns nothing below, whatever the time is
        done = [
            found[0]
            for number in list(self._unacknowledged)
            if number <= hello.announced and number not in partial
            if (found := self.acknowledge(number, 0.0)) is not None
        ]
        self._requeue(partial)
        self._number = hello.announced
        for role, frames in hello.credits:
            self.credit(role, frames)
        return done

    def restart(self) -> None:
        """The receiver forgot the link: all that is unacknowledged is announced anew."""
        self._broke()
        self._requeue({})
        self._number = self._acknowledged = 0
        for lane in self._lanes.values():
            lane.announced = lane.credit = 0

    def _broke(self) -> None:
        for lane in self._lanes.values():
            if lane.window is not None:
                lane.window.broke()

    def _requeue(self, partial: dict[int, int]) -> None:
        """Puts announced frames back before the others of their role, in order of number."""
        self._ahead = 0
        for number in sorted(self._unacknowledged, reverse=True):
            frame = self._unacknowledged[number]
            self.again_bytes += frame.sent - partial.get(number, 0)
            lane = self._lanes[frame.key.role]
            if lane.queue and lane.queue[0] is frame:
                lane.queue.popleft()
            lane.queue.appendleft(frame)
            frame.began_s = None
            if number in partial:
                frame.sent = partial[number]
                self._ahead += 0 if lane.window is not None else frame.sent
            else:
                frame.number = frame.sent = 0
                lane.announced -= 1
                del self._unacknowledged[number]
        self.waiting = [lane for lane in self._lanes.values() if lane.queue]

    def _leave(self, lane: _Lane) -> None:
        """The first frame of a lane needs it no more."""
        lane.queue.popleft()
        if not lane.queue:
            self.waiting.remove(lane)

    @property
    def ready(self) -> bool:
        """Whether `pull` has something."""
        for lane in self.waiting:  # noqa: SIM110  # half of any()'s time
            if lane.ready:
                return True
        return False

    @property
    def rests(self) -> bool:
        """Whether `pull` has nothing but a piece of a round, which may take a while."""
        found = [lane for lane in self.waiting if lane.ready]
        return found == [self._lanes[Role.ROUND]]

    def pull(self, now: float) -> Announcement | Chunk | None:
        """What goes next, or None when nothing may go. `now`: seconds, to learn from when the link
        asks again how large pieces may be."""
        waiting = self.waiting
        if len(waiting) == 1 and not waiting[0].patient:  # as nearly always
            lane = waiting[0] if waiting[0].ready else None
        else:
            lane = self._next_lane() if waiting else None
        if lane is None:
            self._rate.idle()
            return None
        frame = lane.queue[0]
        begins = frame.number == 0
        if begins:
            self._number += 1
            frame.number, frame.began_s = self._number, now
            lane.announced += 1
            self._unacknowledged[frame.number] = frame
        piece = self._piece(frame, lane, now) if frame.size_bytes else None
        if frame.sent == frame.size_bytes:
            self._leave(lane)
        return Announcement(frame.header, piece) if begins else piece

    def _piece(self, frame: _Outgoing, lane: _Lane, now: float) -> Chunk:
        most = self._rate.chunk_bytes(now)
        if lane.window is not None:
            # Where the others leave only every 16th piece, each is as long as that allows.
            share = most // _PATIENT_SHARE if self._hurries else 0
            if self._hurried_s is None:
                self._hurried_s = now
            most = max(lane.window.piece_bytes(now - self._hurried_s), share)
        elif lane.patient:  # what comes next may be urgent
            most = max(MIN_CHUNK_BYTES, most // _PATIENT_SHARE)
        begin, size = frame.sent, min(most, frame.size_bytes - frame.sent)
        frame.sent += size
        self.patient = lane.patient
        if lane.window is not None:
            lane.window.left(frame.number, frame.sent, size, now, self._ahead)
            self._rate.idle()  # it vanishes into buffers that are kept empty
        else:
            self._ahead += size
            self._hurried_s = now
            self._rate.handed_out(size, now)
        if size == frame.size_bytes:
            return Chunk(frame.number, 0, size, frame.buffers)
        return Chunk(frame.number, begin, size, tuple(_slices(frame.buffers, begin, size)))

    @property
    def _hurries(self) -> bool:
        """Whether something waits that goes first."""
        return any(lane.ready and not lane.patient for lane in self.waiting)

    def _next_lane(self) -> _Lane | None:
        urgent: _Lane | None = None
        patient: _Lane | None = None
        for lane in self.waiting:
            if lane.ready:
                if lane.patient:
                    patient = patient or lane
                else:
                    urgent = urgent or lane
        if urgent is None and patient is None:
            return None
        if urgent is None or (patient and self._since_patient >= _PATIENT_TURN - 1):
            chosen = patient
            self._since_patient = 0
        else:
            chosen = urgent
            self._since_patient += patient is not None
        assert chosen is not None
        if len(self.waiting) > 1:
            self.waiting.remove(chosen)
            self.waiting.append(chosen)
        return chosen

    def __len__(self) -> int:
        """Frames that are not acknowledged."""
        return len(self._keys)

    def __repr__(self) -> str:
        return f"<Outbox {len(self)} frames, {len(self._unacknowledged)} announced>"


class _Rate:
    """Learns the link's speed from when it asks for more.

    The first pieces vanish into buffers, which looks fast; once those are full, the time between
    two requests is the time that a piece takes.
    """

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._bytes_per_s = 0.0
        self._last: tuple[int, float] | None = None

    def chunk_bytes(self, now: float) -> int:
        if self._last is not None and now > self._last[1]:
            rate = self._last[0] / (now - self._last[1])
            self._bytes_per_s = (
                rate if not self._bytes_per_s else 0.8 * self._bytes_per_s + 0.2 * rate
            )
        pieces = self._pieces
        wanted = int(self._bytes_per_s * pieces.most_s)
        if wanted < MIN_CHUNK_BYTES:
            wanted = MIN_CHUNK_BYTES
        return wanted if wanted < pieces.most_bytes else pieces.most_bytes

    def idle(self) -> None:
        """Nothing more to send: the time until the next request says nothing."""
        self._last = None

    def handed_out(self, size_bytes: int, now: float) -> None:
        together = self._last[0] if self._last is not None and self._last[1] == now else 0
        self._last = (together + size_bytes, now)


def _slices(buffers: tuple[memoryview, ...], start: int, size: int) -> Iterator[memoryview]:
    """`size` bytes from `start` of the buffers put together, as views."""
    for buffer in buffers:
        if start >= buffer.nbytes:
            start -= buffer.nbytes
            continue
        part = buffer[start : start + size]
        yield part
        size -= part.nbytes
        start = 0
        if not size:
            return
