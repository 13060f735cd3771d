"""How much faster than the next one a replica is taken to be, by those who plan rounds and by those
who divide their work. How long a step takes is a replica's own word, as it may report steps that it
has not made."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["MOST_TIMES", "at_least"]

MOST_TIMES = 4.0


def at_least(seconds: Sequence[float]) -> list[float]:
    """Seconds of a step, of each replica: of the fastest no less than the next one's, divided by
    MOST_TIMES. 0: not known."""
    known = sorted(s for s in seconds if s > 0)
    least = known[1] / MOST_TIMES if len(known) > 1 else 0.0
    return [max(s, least) if s > 0 else s for s in seconds]
