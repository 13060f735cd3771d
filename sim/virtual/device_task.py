"""The one thing that a peer's device does at a time, which stands still while its process does."""

from __future__ import annotations

from collections.abc import Callable

from .clock import VirtualClock

__all__ = ["DeviceTask"]


class DeviceTask:
    """Calls back when what was begun last has taken its time. `alive`: whether the peer still
    is."""

    def __init__(self, clock: VirtualClock, alive: Callable[[], bool]) -> None:
        self._clock, self._alive = clock, alive
        self._now: tuple[float, Callable[[], None]] | None = None
        """When it ends, or how long it still takes while the process stands still; and what
        then."""
        self._version = 0
        """How often that has changed."""

    def begin(self, seconds: float, ended: Callable[[], None]) -> None:
        """Call `ended` in so many seconds, and in as many more as the process stands still."""

        def end() -> None:
            if version == self._version and self._alive():
                self._now = None
                ended()

        self._now = self._clock.now + seconds, ended
        self._version = version = self._version + 1
        self._clock.after(seconds, end)

    def freeze(self) -> None:
        """Stop the clock of what is under way."""
        self._version += 1
        if self._now is not None:
            end_s, ended = self._now
            self._now = end_s - self._clock.now, ended

    def thaw(self) -> None:
        """Go on with what was left of it."""
        if self._now is not None:
            self.begin(*self._now)
