"""Whether the owner lets the peer take part in runs, now. Pure: wall clock and bytes are arguments.

A peer is closed while its owner has paused it, outside of its hours, and once its host has moved
what the owner allows in a calendar month; what stands first here is what is said. The machine tells
the broker, and leaves a run after the step that it is in (`machine.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from ...proto import broker_pb2
from ...proto.common_pb2 import Reason
from ..hours import Hours
from .events import OwnerLooked

__all__ = ["Availability", "OwnerLimits"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnerLimits:
    """What the owner has set. None: no limit."""

    hours: Hours | None = None
    monthly_bytes: int | None = None
    """What all peers of the host may send and receive in a calendar month."""


class Availability:
    """`closed`: why the peer takes part in nothing; None: it does."""

    def __init__(self, terms: OwnerLimits | None = None) -> None:
        self.terms = terms or OwnerLimits()
        self.closed: Reason | None = None

    def __repr__(self) -> str:
        return f"<Availability: {self.closed.code if self.closed else 'open'}>"

    def saw(self, facts: OwnerLooked) -> bool:
        """Takes facts in; whether what is to be said has changed."""
        before, self.closed = self.closed, self._why(facts)
        return before != self.closed

    def message(self) -> broker_pb2.PeerMessage:
        return broker_pb2.PeerMessage(opening=broker_pb2.Opening(closed=self.closed))

    def _why(self, facts: OwnerLooked) -> Reason | None:
        hours, monthly = self.terms.hours, self.terms.monthly_bytes
        if facts.paused:
            return Reason(code="paused", text="its owner has paused it")
        if hours is not None and facts.at not in hours:
            return Reason(code="hours", text=f"it takes part from {hours}, by its own clock")
        if monthly is not None and facts.moved_bytes >= monthly:
            text = (
                f"the {monthly / 1e9:.4g} GB that its host may move in a month are spent: it takes "
                f"part again on the 1st of {_next_month(facts.at)}"
            )
            return Reason(code="monthly", text=text)
        return None


def _next_month(at: datetime) -> str:
    return f"{datetime(2000, at.month % 12 + 1, 1):%B}"
