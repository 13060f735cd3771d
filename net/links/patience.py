"""How much of what can wait may be on its way at once, so that nothing waits long behind it.

Between a link and its path lie buffers: gRPC's, the kernel's, a router's, megabytes in all. What
fills them delays each frame that comes after it, by seconds where the uplink is slow. So of what
can wait only a window is on its way:

    window = rate * (round trip + wait)     bytes

rate: what arrived while a piece was on its way, bytes/s, where the window was full; round trip: the
least that a piece took, s; wait: how long what comes next may be held up, s. Once the path is full,
`wait` seconds of its rate stand in buffers, not more. That is the window of FAST TCP (Wei, Jin,
Low, Hegde 2006, equation 1) with a delay to be held, as LEDBAT has it (RFC 6817). While nothing
stands in buffers the window grows by half with each round trip; after a rest it begins with `wait`
seconds, so that no path gets a whole window at once. Whoever else uses the path makes pieces late
and the window small; what went out before a piece on the same link is reckoned.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

__all__ = ["LEAST_BYTES", "SendWindow"]

LEAST_BYTES = 4 * 1024
"""Of a snapshot's piece: half of its `wait_s` at 2.6 Mbit/s."""
_FIRST_BYTES = 32 * 1024
"""The window of a path of which nothing is known."""
_LOOK_S = 60.0
"""After so long all that is on its way arrives first, and the round trip is measured anew: paths
change, and what stands in buffers for long looks like a longer path."""
_SMOOTH = 8
"""A smaller window is taken over in so many samples: one of them may be late for want of a core."""


class _Out(NamedTuple):
    """A piece on its way. `end`: of it in its frame. `before`: bytes that had arrived when it left.
    `ahead`: bytes of frames that go first, on their way then. `full`: the window had no place for
    more. `first`: size of the first piece on its way then, which perhaps was there in part."""

    number: int
    end: int
    size_bytes: int
    left_s: float
    before: int
    ahead: int
    full: bool
    first: int


class SendWindow:
    """The window of one lane of one link; its frames go one after the other. Times are seconds of a
    clock that never goes back."""

    def __init__(
        self,
        wait_s: float,
        most_bytes: int,
        rest_share: float = 0.0,
        least_bytes: int = LEAST_BYTES,
    ) -> None:
        """`most_bytes`, `least_bytes`: of a piece. `rest_share`: see `piece_bytes`."""
        self._wait_s = wait_s
        self._most_bytes, self._least_bytes = most_bytes, least_bytes
        self._rest_share = rest_share
        self._out: deque[_Out] = deque()
        self._out_bytes = 0
        self._arrived = 0
        self._window = float(_FIRST_BYTES)
        self._rate = 0.0
        self._least = 0.0
        """The path gives no less, bytes/s: what is known where little is asked of it, or where each
        piece leaves behind the one before and the window is never full."""
        self._grown = 0.0
        """By how much the last piece was larger than without a rest: the window is, too."""
        self._round_trip_s = math.inf
        self._emptied_s = -math.inf
        self._looked_s = -math.inf
        self._looks = False
        """Nothing leaves until nothing is on its way."""

    def piece_bytes(self, rest_s: float) -> int:
        """How large the next piece may be: half of `wait_s` of the path, or `rest_share` of the
        time in which nothing else went on the link, seconds."""
        grown = self._least * self._rest_share * rest_s
        return int(min(max(self._usual_bytes, grown), self._most_bytes))

    @property
    def _usual_bytes(self) -> float:
        return max(max(self._rate, self._least) * self._wait_s / 2, self._least_bytes)

    @property
    def full(self) -> bool:
        """Whether as much is on its way as may be. The last piece may go over the window: it could
        not grow by less than a piece otherwise."""
        return bool(self._out) and (self._looks or self._out_bytes >= self._window + self._grown)

    def left(self, number: int, end: int, size_bytes: int, now: float, ahead: int) -> None:
        """A piece of frame `number` was handed out that goes up to `end` in it; `ahead`: bytes of
        frames that go first, on their way on this link."""
        if not self._out:
            looks = now - self._looked_s > _LOOK_S
            if self._rate and (looks or now - self._emptied_s > self._round_trip_s):
                begin = max(self._rate * self._wait_s, 2 * self._least_bytes)
                self._window = min(self._window, begin)
            if looks:
                self._round_trip_s, self._looked_s, self._looks = math.inf, now, False
                self._least = 0.0
        self._out_bytes += size_bytes
        if self._rest_share:
            self._grown = max(0.0, size_bytes - self._usual_bytes)
        full = self._out_bytes >= self._window + self._grown
        first = self._out[0].size_bytes if self._out else size_bytes
        self._out.append(_Out(number, end, size_bytes, now, self._arrived, ahead, full, first))

    def arrived(self, number: int, have: float, now: float) -> None:
        """All before frame `number` is there, and `have` bytes of it."""
        last: _Out | None = None
        before = self._arrived
        while self._out and (self._out[0].number, self._out[0].end) <= (number, have):
            last = self._out.popleft()
            self._out_bytes -= last.size_bytes
            self._arrived += last.size_bytes
        if last is None:
            return
        if (took_s := now - last.left_s) > 0:
            self._learn(last, took_s, self._arrived - before)
        if not self._out:
            self._emptied_s = now
        self._looks = bool(self._out) and now - self._looked_s > _LOOK_S

    def _learn(self, piece: _Out, took_s: float, size_bytes: int) -> None:
        self._round_trip_s = min(self._round_trip_s, took_s)
        arrived = self._arrived - piece.before
        rate = arrived / took_s
        window = rate * (self._round_trip_s + self._wait_s)
        behind_s = took_s * piece.ahead / (arrived + piece.ahead)
        late_s = took_s - self._round_trip_s
        # Two of the least pieces that left together are late by one of them, which is no queue.
        together_s = max(self._wait_s / 2, 0.9 * self._least_bytes / max(self._rate, rate))
        self._least = max(self._least, (arrived - piece.first) / took_s)
        if late_s < together_s:
            if piece.full:
                self._window += size_bytes / 2
                self._rate = max(self._rate, rate)
        elif window >= self._window:
            self._window, self._rate = window, rate
        elif piece.full and late_s > self._wait_s / 2 + behind_s:
            # Where the window was not full, less was asked of the path than it gives.
            self._window += (window - self._window) / _SMOOTH
            self._rate += (rate - self._rate) / _SMOOTH
            self._least += (min(self._least, rate) - self._least) / _SMOOTH

    def broke(self) -> None:
        """What was on its way goes out again on another connection."""
        self._out.clear()
        self._out_bytes = 0
        self._looks = False

    def __repr__(self) -> str:
        return f"<SendWindow {self._out_bytes} of {self._window:.0f} bytes>"
