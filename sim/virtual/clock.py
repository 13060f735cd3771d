"""Virtual time: a heap of calls, and what happened when."""

from __future__ import annotations

import gc
import heapq
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ...broker import events as b
    from ...peer.core import events as p

__all__ = ["Bucket", "Observe", "Observed", "StalledError", "Timers", "VirtualClock", "beside"]


class StalledError(RuntimeError):
    """Nothing is left to happen, or too much time went by, before what was waited for."""


class Observed(NamedTuple):
    """What a machine is about to handle, or an instruction of it that is about to be carried
    out."""

    now: float
    who: str
    """A peer's name, or "broker"."""
    record: b.Event | b.Instruction | p.Event | p.Instruction


Observe = Callable[[Observed], None]


def beside(before: Observe | None, observe: Observe) -> Observe:
    """What has both see everything, the one that was there before first."""

    def both(seen: Observed) -> None:
        if before is not None:
            before(seen)
        observe(seen)

    return both


@contextmanager
def _seldom_collected() -> Iterator[None]:
    """A world makes records that stay, and hardly a cycle: looking through them for garbage as
    often as Python does took a fifth of its time."""
    before = gc.get_threshold()
    gc.set_threshold(50_000, 20, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)


class VirtualClock:
    """Calls things back at later times, in their order. Nothing reads another clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], object]]] = []
        self._soon: deque[Callable[[], object]] = deque()
        """Calls of this moment, asked for after everything in the heap that is of it, too."""
        self._order = 0

    def after(self, delay_s: float, callback: Callable[[], object]) -> None:
        """Calls back at a later time; calls of equal time in the order in which they were asked."""
        self._order += 1
        if delay_s == 0.0:
            self._soon.append(callback)
        else:
            heapq.heappush(self._heap, (self.now + delay_s, self._order, callback))

    @property
    def calls(self) -> int:
        """How many were asked for so far: the events of a world."""
        return self._order

    def until(self, done: Callable[[], bool], limit_s: float = 3600.0) -> None:
        """Lets time go on until `done()`. Raises StalledError when it never will."""
        end, heap, soon = self.now + limit_s, self._heap, self._soon
        with _seldom_collected():
            while not done():
                if soon and not (heap and heap[0][0] <= self.now):
                    soon.popleft()()
                    continue
                if not heap or heap[0][0] > end:
                    raise StalledError(f"at {self.now:.3f} s: {self.state()}")
                self.now, _, callback = heapq.heappop(heap)
                callback()

    @property
    def next_s(self) -> float:
        """When something happens next; inf: never."""
        if self._soon:
            return self.now
        return self._heap[0][0] if self._heap else float("inf")

    def state(self) -> str:
        """What people read when nothing happens any more."""
        return f"{len(self._heap) + len(self._soon)} calls to come"


class Timers:
    """Named timers of one machine: setting one again replaces it."""

    def __init__(self, clock: VirtualClock, fired: Callable[[str], None]) -> None:
        self._clock, self._fired = clock, fired
        self._versions: dict[str, int] = {}

    def set(self, name: str, at: float) -> None:
        version = self._versions[name] = self._versions.get(name, 0) + 1

        def fire() -> None:
            if self._versions[name] == version:
                self._fired(name)

        self._clock.after(max(0.0, at - self._clock.now), fire)


# A token bucket: what a link lets through at once after a rest.
#
# It holds up to `size_bytes` tokens, one for each byte, and is refilled at the link's bandwidth.
# What finds tokens does not see that bandwidth; what finds none goes at it, and takes each token as
# it comes. Times are seconds of any clock.


class Bucket:
    """Full at first."""

    def __init__(self, size_bytes: float, bytes_per_s: float) -> None:
        self.size_bytes, self.bytes_per_s = size_bytes, bytes_per_s
        self._level = size_bytes
        self._at = 0.0

    def there(self, now: float) -> float:
        """Tokens, by now."""
        passed = max(0.0, now - self._at)
        return min(self.size_bytes, self._level + self.bytes_per_s * passed)

    def take(self, size_bytes: float, now: float) -> float:
        """How many of these bytes find tokens, which are gone then."""
        level = self.there(now)
        taken = min(level, size_bytes)
        self._level, self._at = level - taken, max(self._at, now)
        return taken

    def skip(self, now: float) -> None:
        """The tokens that came since the last call were taken as they came."""
        self._at = max(self._at, now)
