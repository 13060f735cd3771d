"""What one member may take of the broker at once, and all of them together.

Each call counts for the subject of its certificate, from before its message is read until its end.
One that is over its share is refused at once, unread: a queue of calls would cost what the limit is
to save. A share is what an honest member needs several times over, and a small part of what there
is for all, so that one member takes nothing that others need. The user who runs the broker has no
share of his own, for he can end it anyway; neither has anybody where nobody has an identity, on
loopback.

Messages are read one after the other of each subject, so that what is under way from it is bounded
in bytes, too: two messages of calls, and one of each of its open streams.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from ...net.identity.names import OWNER, Party, PartyRole
from ...net.knocks import RateLimiter
from .admission import AdmissionError

__all__ = [
    "CALLS",
    "MESSAGES",
    "MOST_MESSAGE_BYTES",
    "MOST_PIECE_BYTES",
    "CallLimit",
    "Shares",
]

MOST_PIECE_BYTES = 4 << 20
"""Of a blob, in one message; clients send 1 MiB."""
MOST_MESSAGE_BYTES = MOST_PIECE_BYTES + 1024
"""That gRPC begins to take at all: what is longer is refused by its first five bytes."""
_SPEC_BYTES = MOST_PIECE_BYTES
"""A spec that is a third too large is read, to be refused with what to do instead
(`planner/requests/requirements.py`)."""
MESSAGES = 4096, 512.0
"""That one peer says in a row, and then per second; further ones wait at their sender. One that was
away brings some 1,000 reports at once. A step makes one or two: no run has 250 steps a second."""
_READING = 2
"""Messages of calls that are read at once of one subject."""
_MOST_SUBJECTS = 10_000
"""Whose rates are remembered, by method."""


@dataclass(frozen=True, kw_only=True)
class CallLimit:
    """How much the calls of one method may take of the broker."""

    bytes: int = 64 << 10
    """Of a message; most have names and numbers only."""
    message_s: float = 300.0
    """For a call's message to come: 4 MiB over a line of 128 kbit/s."""
    of_one: int = 16
    """Calls at once, of one subject."""
    of_all: int = 4096
    """The same, of all together."""
    in_a_row: int = 256
    """Calls of one subject, then `per_s`."""
    per_s: float = 16.0
    """Infinite: as many as they like."""
    busy: str = "RESOURCE_EXHAUSTED"
    """The status of one that is over `of_one` or `of_all`. "ABORTED": clients try again by
    themselves."""


CALLS: dict[str, CallLimit] = {
    # Strangers may call it: whoever holds many messages back has few of all calls.
    "Admission.Join": CallLimit(message_s=10.0),
    # One stream is a peer's; a second one opens while the first has not ended, a third and fourth
    # when its process is started again meanwhile. A house that loses its uplink comes back slower.
    "Attach.Attach": CallLimit(of_one=4, of_all=10_000, in_a_row=32, per_s=1.0),
    # A search over jobs submits a few dozen in a row; planning takes a second each, so nobody is
    # served sooner by more.
    "Runs.Submit": CallLimit(bytes=_SPEC_BYTES, of_one=4, of_all=64, in_a_row=64, per_s=1.0),
    "Runs.Preview": CallLimit(bytes=_SPEC_BYTES, of_one=4, of_all=64, in_a_row=64, per_s=1.0),
    # Hosts read their data for it, for minutes perhaps.
    "Runs.Resolve": CallLimit(of_one=8, of_all=256, in_a_row=64, per_s=1.0),
    # Everybody who looks on, in several windows each.
    "Runs.Watch": CallLimit(of_one=64),
    # Blobs come and go as often as they like: what they cost is bytes, bounded at once and on disk.
    # 10,000 names with their sizes.
    "Blobs.Have": CallLimit(bytes=1 << 20, busy="ABORTED", per_s=math.inf),
    # Each holds one piece or two of 1 MiB; a peer has three or four at once.
    "Blobs.Store": CallLimit(bytes=MOST_MESSAGE_BYTES, busy="ABORTED", per_s=math.inf),
    "Blobs.Fetch": CallLimit(of_one=32, of_all=8192, busy="ABORTED", per_s=math.inf),
}
"""Methods that differ from the usual."""
_USUAL = CallLimit()


class Shares:
    """Counts; lives in one event loop."""

    def __init__(self, calls: dict[str, CallLimit] | None = None) -> None:
        self._calls = CALLS if calls is None else calls
        self._open: Counter[str] = Counter()  # by method
        self._of: Counter[tuple[str, str]] = Counter()  # by method and subject
        self._rates: dict[str, RateLimiter] = {}
        self._reading: dict[str, tuple[asyncio.Semaphore, int]] = {}  # and how many want it

    def limit(self, method: str) -> CallLimit:
        return self._calls.get(method, _USUAL)

    @contextmanager
    def taken(self, method: str, caller: Party | None, now: float) -> Iterator[None]:
        """For as long as a call lasts. `now`: seconds on any clock. Raises AdmissionError."""
        limit, who = self.limit(method), _counted(caller)
        if self._open[method] >= limit.of_all:
            raise AdmissionError(
                limit.busy,
                f"{self._open[method]} calls of {method} are open, the broker's limit: try again "
                "when some have ended",
            )
        if who and self._of[method, who] >= limit.of_one:
            raise AdmissionError(
                limit.busy,
                f"{who} has {self._of[method, who]} calls of {method} open, the limit for one: try "
                "again when some have ended",
            )
        if who and not self._may(method, limit, who, now):
            raise AdmissionError(
                "RESOURCE_EXHAUSTED",
                f"{who} calls {method} too often: expected at most {limit.in_a_row:g} calls in a "
                f"row, then {limit.per_s:g} a second",
            )
        self._open[method] += 1
        self._of[method, who] += 1
        try:
            yield
        finally:
            self._open[method] -= 1
            self._of[method, who] -= 1
            if not self._of[method, who]:
                del self._of[method, who]

    def _may(self, method: str, limit: CallLimit, who: str, now: float) -> bool:
        if limit.per_s == math.inf:
            return True
        if method not in self._rates:
            self._rates[method] = RateLimiter(limit.in_a_row, limit.per_s, _MOST_SUBJECTS)
        return self._rates[method].allowed(who, now)

    @asynccontextmanager
    async def reading(self, caller: Party | None) -> AsyncIterator[None]:
        """While a message of a call is read and parsed: few at once of each subject."""
        who = _counted(caller)
        if not who:
            yield
            return
        turn, wanted = self._reading.get(who, (asyncio.Semaphore(_READING), 0))
        self._reading[who] = turn, wanted + 1
        try:
            async with turn:
                yield
        finally:
            turn, wanted = self._reading.pop(who)
            if wanted > 1:
                self._reading[who] = turn, wanted - 1

    def __repr__(self) -> str:
        return f"<Shares {self._open.total()} calls of {len(self._of)} subjects and methods>"


def _counted(caller: Party | None) -> str:
    """Return the owner that the stream counts for; empty: nobody."""
    own = caller == Party(PartyRole.OPERATOR, OWNER)
    return "" if caller is None or own else caller.subject
