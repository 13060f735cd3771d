"""What the streams of a memory network run over: a clock, a carrier, and faults."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from .carrier import Carrier

__all__ = ["Clock", "Medium", "Tamper"]

Tamper = Callable[[str, str, bytes], bytes | None]
"""(source, destination, message) -> what arrives instead; None: the stream breaks there."""


class Clock(Protocol):
    """Calls back once after some seconds; calls of equal time in the order they were made."""

    now: float

    def after(self, delay_s: float, callback: Callable[[], object]) -> None: ...


class Medium:
    """What messages between the processes of one memory network go over."""

    def __init__(self, clock: Clock, carrier: Carrier) -> None:
        self.clock, self.carrier = clock, carrier
        self.tamper: Tamper | None = None
        """A fault for tests: sees and may change every message."""
        self.left_s = 0.0
        """When the last byte left of the message that is being received now."""
        self.frozen: dict[str, deque[Callable[[], None]]] = {}
        """Peers whose process stands still, and what waits for it to go on."""
        self._corrupt: dict[tuple[str, str], deque[float]] = {}

    def hear_each_other(self, a: str, b: str) -> bool:
        parted = self.carrier.parted(a, b) or self.carrier.parted(b, a)
        return not parted and a not in self.frozen and b not in self.frozen

    def held(self, peer: str, what: Callable[[], None]) -> bool:
        """Whether the peer stands still; `what` is then done when it goes on."""
        if peer not in self.frozen:
            return False
        self.frozen[peer].append(what)
        return True

    def corrupt(self, source: str, destination: str, where: float) -> None:
        """The next message from one to the other that has bytes arrives with one changed: that at
        `where`, in [0, 1), of its length."""
        self._corrupt.setdefault((source, destination), deque()).append(where)

    def corrupts(self, source: str, destination: str) -> bool:
        """Whether a message is still to be changed: none has come since."""
        return bool(self._corrupt.get((source, destination)))

    def changed(self, source: str, destination: str, message: bytes) -> bytes | None:
        """What arrives in the place of a message; None: the stream breaks there."""
        if message and (places := self._corrupt.get((source, destination))):
            at = int(places.popleft() * len(message))
            message = message[:at] + bytes([message[at] ^ 0x55]) + message[at + 1 :]
        return message if self.tamper is None else self.tamper(source, destination, message)

    def tampers(self, source: str, destination: str) -> bool:
        """Whether `changed` could change a message."""
        if self.tamper is None and not self._corrupt:
            return False
        return self.tamper is not None or self.corrupts(source, destination)
