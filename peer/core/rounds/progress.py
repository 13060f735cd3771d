"""How an exchange goes on at one holder: when something of it came last, and when the broker heard
so. Pure.

The broker ends an attempt when nothing has come to anybody for a while. So it is told that
something came, which may be a part of a frame on a slow line, every `SAYS_S` at most: of exchanges
that take less it hears nothing.
"""

from __future__ import annotations

from ....proto.broker_pb2 import PeerMessage, RoundReport
from .. import events as e

__all__ = ["SAYS_S", "Progress"]

SAYS_S = 10.0


class Progress:
    """Counts what comes to one holder in a term, attempt after attempt."""

    def __init__(self, replica: str, term: int) -> None:
        self._replica, self._term = replica, term
        self._came, self._at, self._said = 0, 0.0, 0.0

    def begin(self, now: float) -> None:
        """Count waits from now on: an attempt begins, or more is asked of it."""
        self._at = self._said = now

    def left(self, now: float) -> None:
        """Note that something of its own is with who it is for."""
        self._at = now

    def came(self, round_: int, attempt: int, now: float) -> list[e.Instruction]:
        """Something of an attempt came."""
        self._came, self._at = self._came + 1, now
        if now < self._said + SAYS_S:
            return []
        self._said = now
        report = RoundReport(run=self._replica, term=self._term, round=round_, attempt=attempt)
        report.came = self._came
        return [e.Tell(PeerMessage(round=report))]

    def waits_until(self, patience_s: float) -> float:
        """Return when it has waited for so long, if nothing comes or leaves meanwhile."""
        return self._at + patience_s
