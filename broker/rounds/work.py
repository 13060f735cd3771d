"""How the local work of a round is divided among its replicas, by what they are taken to do in a
second. Pure.

How long a step takes is a replica's own word, as it may report steps that it has not made. So what
one alone says counts up to a bound: it is at most MOST_TIMES as fast as the next one, and others
wait for it at most so many times as long as for the next one.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["MOST_TIMES", "at_least", "at_most", "divide"]

MOST_TIMES = 4.0


def at_least(seconds: Sequence[float]) -> list[float]:
    """Seconds of a step, of each replica: of the fastest no less than the next one's, divided by
    MOST_TIMES. 0: not known."""
    known = sorted(s for s in seconds if s > 0)
    least = known[1] / MOST_TIMES if len(known) > 1 else 0.0
    return [max(s, least) if s > 0 else s for s in seconds]


def at_most(seconds: Sequence[float]) -> float:
    """The longest of some times of different replicas, but no more than MOST_TIMES the next
    one."""
    longest = sorted(seconds)[-2:]
    return min(longest[-1], MOST_TIMES * longest[0])


def divide(units: int, seconds: Sequence[float]) -> list[int]:
    """How many of so many steps each replica makes, by the seconds that it takes for one, so that
    all end together: proportional to its speed, by largest remainders; at least one each while
    there are enough. The sum is `units`."""
    if not seconds:
        return []
    speeds = [1.0 / s if s > 0 else 0.0 for s in seconds]
    known = [s for s in speeds if s > 0]
    mean = sum(known) / len(known) if known else 1.0
    speeds = [s or mean for s in speeds]
    total = sum(speeds)
    least = 1 if units >= len(speeds) else 0
    shares = [max(float(least), units * s / total) for s in speeds]
    found = [int(share) for share in shares]
    order = sorted(range(len(speeds)), key=lambda i: (found[i] - shares[i], i))
    at = 0
    while sum(found) < units:
        found[order[at % len(order)]] += 1
        at += 1
    while sum(found) > units:  # those of one step each took it from the others
        most = max(range(len(found)), key=lambda i: (found[i], -i))
        found[most] -= 1
    return found
