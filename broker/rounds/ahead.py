"""How a round's work is divided where local steps go on while the round before is exchanged.

Behind its own steps of a round a replica makes some of the next one, *ahead* of the version that
these belong to; that version lands behind them. So what was made ahead is the beginning of the next
round's work, and only the rest of it is handed out when that round begins. A replica that was left
out gives it back with all else.
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections.abc import Mapping, Sequence

from .work import divide

__all__ = ["steps_ahead", "steps_of"]

_SPARE = 1.25
"""Times what the exchange took last, with `overlap = "auto"`."""
_MOST = 2
"""Of a round, no more than this part is ahead then."""


def steps_of(units: int, seconds: Sequence[float], carried: Sequence[int]) -> list[int]:
    """How many of so many steps each replica makes, `carried` of them done ahead: one after the
    other goes to who would end first with it, so that who was ahead by more has fewer to come. Who
    has none comes first: a round in which only one works is lost with that one."""
    if not any(carried):
        return divide(units, seconds)
    found, known = [*carried], [s for s in seconds if s > 0]
    typical = statistics.median(known) if known else 1.0
    each = [s if s > 0 else typical for s in seconds]
    ends = [
        ((n + 1) * s if n else 0.0, i) for i, (n, s) in enumerate(zip(found, each, strict=True))
    ]
    heapq.heapify(ends)
    for _ in range(units - sum(carried)):
        _, i = ends[0]
        found[i] += 1
        heapq.heapreplace(ends, ((found[i] + 1) * each[i], i))
    return found


def steps_ahead(
    overlap: int | str,
    every: int,
    steps: Mapping[int, int],
    *,
    left: int,
    exchange_s: float,
    round_s: float,
) -> dict[int, int]:
    """How many steps of the next round each replica may make, in proportion to its `steps` of this
    one. `left`: steps that are there for it, over all replicas, but for one of each behind those:
    what is evaluated twice, where the version lands and at the end, must not be at one step. Where
    they are too few, nobody is ahead. `exchange_s`, `round_s`: how long the last exchange took, and
    the steps of a round, which "auto" goes by; 0: not known."""
    if overlap == "auto":
        share = _SPARE * exchange_s / round_s if round_s else 0.0
        most = every // _MOST
        overlap = min(most, math.ceil(every * share) + 1) if share else 0
    found = {n: h * int(overlap) // every for n, h in steps.items()}
    return found if sum(found.values()) <= left else dict.fromkeys(steps, 0)
