"""The owner's cap of an uplink or downlink, and what moves: all connections of a transport share
them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

__all__ = ["Cap", "Meter", "Reserve"]

BURST_S = 0.05
"""What was not used within so long is lost: a cap is not an average over an hour."""
PIECE_S = 0.1


class Reserve:
    """When bytes may leave at a rate, without a clock of its own: `take` says how long to wait."""

    def __init__(self, bytes_per_s: float) -> None:
        if not 0 < bytes_per_s < float("inf"):
            raise ValueError(f"a cap of {bytes_per_s} bytes/s: expected a number above 0")
        self.bytes_per_s = bytes_per_s
        self._free_at = float("-inf")

    def take(self, size_bytes: int, now: float) -> float:
        """Seconds from now until so many bytes may go, after all that was taken before."""
        begin = max(self._free_at, now - BURST_S)
        self._free_at = begin + size_bytes / self.bytes_per_s
        return max(0.0, self._free_at - now)


class Meter:
    """Counts bytes that were sent or received; from one thread."""

    def __init__(self) -> None:
        self.bytes = 0

    def add(self, size_bytes: int) -> None:
        self.bytes += size_bytes


class Cap:
    """Cap on a rate that waits; without a rate it only counts. `clock`: seconds, as the event
    loop's."""

    def __init__(
        self,
        bytes_per_s: float | None,
        clock: Callable[[], float] = time.monotonic,
        meter: Meter | None = None,
    ) -> None:
        self._reserve = None if bytes_per_s is None else Reserve(bytes_per_s)
        self._clock, self._meter = clock, meter

    def piece(self, most: int) -> int:
        """Bytes that should go at a time so that others have their turn: at most `most`, and what
        takes a tenth of a second."""
        if self._reserve is None:
            return most
        return max(1, min(most, int(PIECE_S * self._reserve.bytes_per_s)))

    def count(self, size_bytes: int) -> None:
        """Counts bytes that go without waiting."""
        if self._meter is not None:
            self._meter.add(size_bytes)

    async def take(self, size_bytes: int) -> None:
        self.count(size_bytes)
        if self._reserve is None:
            return
        wait_s = self._reserve.take(size_bytes, self._clock())
        if wait_s > 0:
            await asyncio.sleep(wait_s)

    async def take_in_turns(self, size_bytes: int) -> None:
        """As `take`, piece by piece: others have their turn between them."""
        while size_bytes > 0:
            size = self.piece(size_bytes)
            await self.take(size)
            size_bytes -= size
