"""Which marks of a trace people want to see, and which disturb the run."""

from __future__ import annotations

from collections.abc import Iterable

from ...trace import Mark

__all__ = ["FAULTS", "disturbing", "notable"]

FAULTS = frozenset(
    {
        *("kill", "cut", "stop", "leave", "cut-off", "slow", "flap", "corrupt"),
        *("broker_restart", "stretch", "lost"),
    }
)
"""What goes wrong, or is made to."""
_ORDINARY = frozenset({"loss", "waiting", "building", "running", "exporting", "done"})
"""What every run has."""


def notable(marks: Iterable[Mark]) -> list[Mark]:
    """In order of time, without what every run has, and without who was there at the start."""
    found = [m for m in marks if m.what not in _ORDINARY and not (m.what == "join" and m.at_s <= 0)]
    return sorted(found, key=lambda m: m.at_s)


def disturbing(marks: Iterable[Mark]) -> list[float]:
    """When something happened after which steps need not be as before."""
    return [m.at_s for m in notable(marks)]
