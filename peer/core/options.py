"""Settings of the peer's decisions."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from ...proto.common_pb2 import Reason
from ..hours import Hours
from .events import OwnerLooked

__all__ = ["OwnerLimits", "PeerOptions", "Timeouts"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnerLimits:
    """What the owner has set. None: no limit."""

    hours: Hours | None = None
    monthly_bytes: int | None = None
    """What all peers of the host may send and receive in a calendar month."""

    def closed(self, facts: OwnerLooked) -> Reason | None:
        """Return why the peer takes part in nothing now; None: it does."""
        if facts.paused:
            return Reason(code="paused", text="its owner has paused it")
        if self.hours is not None and facts.at not in self.hours:
            return Reason(code="hours", text=f"it takes part from {self.hours}, by its own clock")
        if self.monthly_bytes is not None and facts.moved_bytes >= self.monthly_bytes:
            text = (
                f"the {self.monthly_bytes / 1e9:.4g} GB that its host may move in a month are "
                "spent: it takes part again on the 1st of "
                f"{datetime(2000, facts.at.month % 12 + 1, 1):%B}"
            )
            return Reason(code="monthly", text=text)
        return None


_LEAST_REPORTS = 64
"""Twice the steps between two messages of the broker about what is committed."""


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """How long a peer in a run waits before it complains, seconds."""

    link_s: float = 30.0
    """A needed link may be down for so long: longer than a reboot of a home router's Wi-Fi."""
    stall_s: float = 300.0
    """No action ran for so long, or for 20 steps when that is longer."""
    export_retry_s: float = 2.0
    """Before the final weights are uploaded once more."""
    export_tries: int = 5


@dataclass(frozen=True, kw_only=True)
class PeerOptions:
    """Settings of the machine; times in seconds."""

    backoff_s: float = 0.5
    """Pause after the first failed connection; doubles with each further one."""
    backoff_max_s: float = 30.0
    give_up_s: float | None = None
    """Exit with code 3 when no Welcome came for so long. None: keep trying, as a daemon should."""
    first_s: float | None = None
    """The same before the first Welcome of all: an address is more often wrong than a broker is
    late. None: as give_up_s."""
    drain_s: float = 30.0
    """How long the owner's first stop waits for the broker's word, or for the end of a step."""
    hand_over_s: float = 3600.0
    """How long it waits at most until its part is handed over, whatever the broker says."""
    reports: int = 1024
    """Steps that it finishes without the broker: at a step per second, a quarter of an hour."""
    patience: Timeouts = field(default_factory=Timeouts)
    terms: OwnerLimits = field(default_factory=OwnerLimits)
    """When and how much the owner lets it take part."""

    def __post_init__(self) -> None:
        if self.reports < _LEAST_REPORTS:
            raise ValueError(
                f"peer option reports is {self.reports}: expected at least {_LEAST_REPORTS}, as "
                "the broker says only now and then which it has"
            )
