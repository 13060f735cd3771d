"""The owner's cap of an uplink or downlink: all connections of a transport share it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

__all__ = ["Cap", "Reserve"]

BURST_S = 0.05
"""What was not used within so long is lost: a cap is not an average over an hour."""


class Reserve:
    """When bytes may leave at a rate, without a clock of its own: `take` says how long to wait."""

    def __init__(self, bytes_per_s: float) -> None:
        if not 0 < bytes_per_s < float("inf"):
            raise ValueError(f"a cap of {bytes_per_s} bytes/s: expected a number above 0")
        self._rate = bytes_per_s
        self._free_at = float("-inf")

    def take(self, size_bytes: int, now: float) -> float:
        """Seconds from now until so many bytes may go, after all that was taken before."""
        begin = max(self._free_at, now - BURST_S)
        self._free_at = begin + size_bytes / self._rate
        return max(0.0, self._free_at - now)


class Cap:
    """The same, waiting. `clock`: seconds, as the event loop's."""

    def __init__(self, bytes_per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._reserve, self._clock = Reserve(bytes_per_s), clock

    async def take(self, size_bytes: int) -> None:
        wait_s = self._reserve.take(size_bytes, self._clock())
        if wait_s > 0:
            await asyncio.sleep(wait_s)
