"""Settings of the peer's decisions."""

from __future__ import annotations

from dataclasses import dataclass, field

from .assignment import Timeouts
from .opening import OwnerLimits

__all__ = ["PeerOptions"]

_LEAST_REPORTS = 64
"""Twice the steps between two messages of the broker about what is committed."""


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
