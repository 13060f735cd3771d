"""What carries messages between the ends of the in-memory transport: two models of a network.

A carrier takes one message and calls back twice: when its last byte has left, so that the sender
may give the next one, and when it has arrived. Where it knows at once when the last byte will have
left, it says so instead of the first call. `Timed` is the simple carrier, a function of the
message alone; `sim/virtual/wan.py` is one in which messages share what they go through.

A directed pair can be parted: what has left arrives, everything else waits for `mend`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

__all__ = ["Carrier", "Carry", "InOrder", "Schedule", "Timed", "steady"]

Call = Callable[[], None]

Schedule = Callable[[float, Call], object]
"""Calls back once after that many seconds; calls of equal time in the order they were made."""

Carry = Callable[[str, str, int], tuple[float, float]]
"""(source, destination, size_bytes) -> (seconds until the next one may leave, seconds until this
one has arrived)."""


class Carrier(Protocol):
    """Takes messages, and calls back when each has left and when it has arrived."""

    def send(
        self, source: str, destination: str, size_bytes: int, left: Call, arrived: Call
    ) -> float | None:
        """Starts a message. Never calls back before it returns: the seconds until its last byte has
        left, and `left` is not called; or None."""

    def part(self, source: str, destination: str) -> None:
        """From now on nothing leaves from one to the other; the other direction stays as it is."""

    def mend(self, source: str, destination: str) -> None:
        """What was held up goes on."""

    def parted(self, source: str, destination: str) -> bool: ...

    def slow(self, source: str, destination: str, factor: float) -> None:
        """Bytes from one to the other take so many times longer; 1: as at first."""


def steady(latency_s: float = 0.0, bandwidth_bytes_per_s: float = float("inf")) -> Carry:
    """Every directed pair alike and on its own."""

    def carry(source: str, destination: str, size_bytes: int) -> tuple[float, float]:
        busy_s = size_bytes / bandwidth_bytes_per_s
        return busy_s, busy_s + latency_s

    return carry


class Timed:
    """Each message takes what a `Carry` says, whatever else is under way."""

    def __init__(self, schedule: Schedule, carry: Carry) -> None:
        self._schedule, self._carry = schedule, carry
        self._held: dict[tuple[str, str], list[Call]] = {}  # parted pairs, and what waits there
        self._factor: dict[tuple[str, str], float] = {}

    def send(
        self, source: str, destination: str, size_bytes: int, left: Call, arrived: Call
    ) -> float | None:
        pair = source, destination
        if self._held and pair in self._held:
            self._held[pair].append(lambda: self._late(*pair, size_bytes, left, arrived))
            return None
        busy_s, arrives_s = self._carry(source, destination, size_bytes)
        if self._factor:
            more_s = busy_s * (self._factor.get(pair, 1.0) - 1.0)
            busy_s, arrives_s = busy_s + more_s, arrives_s + more_s
        self._schedule(arrives_s, arrived)
        return busy_s

    def _late(
        self, source: str, destination: str, size_bytes: int, left: Call, arrived: Call
    ) -> None:
        """A message whose sender waits to be called."""
        busy_s = self.send(source, destination, size_bytes, left, arrived)
        if busy_s is not None:
            self._schedule(busy_s, left)

    def part(self, source: str, destination: str) -> None:
        self._held.setdefault((source, destination), [])

    def mend(self, source: str, destination: str) -> None:
        for start in self._held.pop((source, destination), ()):
            start()

    def parted(self, source: str, destination: str) -> bool:
        return (source, destination) in self._held

    def slow(self, source: str, destination: str, factor: float) -> None:
        self._factor[source, destination] = factor


class InOrder:
    """The order of one stream: what arrives before something that was sent earlier waits for it."""

    def __init__(self) -> None:
        self._sent = 0  # messages so far; each has its number
        self._next = 0  # number of the first one that was not handed on
        self._early: dict[int, Call] = {}

    def next(self, arrive: Call) -> Call:
        """What to call when the stream's next message has arrived; `arrive` is called in turn."""
        number = self._sent
        self._sent += 1

        def arrived() -> None:
            if number == self._next and not self._early:  # as nearly always
                self._next += 1
                arrive()
                return
            self._early[number] = arrive
            while (first := self._early.pop(self._next, None)) is not None:
                self._next += 1
                first()

        return arrived
