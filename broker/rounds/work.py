"""How the local work of a round is divided among its replicas. Pure."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["divide"]


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
