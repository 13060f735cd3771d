"""Which links between replicas are measured before a run of saps begins.

What is completed from landmarks does not tell which few links of all are the fast ones, and rounds
alone measure those that are already thought so. A replica is measured against `OTHERS` others at
most, in turns of a tournament: nobody is in two pairs of a turn, as a peer is in one probe at a
time. Up to `OTHERS` replicas all pairs are measured. Pure.
"""

from __future__ import annotations

import numpy as np

__all__ = ["OTHERS", "tournament"]

OTHERS = 16


def tournament(n: int, seed: int, turns: int = OTHERS) -> list[list[tuple[int, int]]]:
    """Pairs of 0 … n-1, by turn; nobody is twice in a turn, and no pair comes again. Who is alone
    in a turn of an odd number is somebody else each time."""
    drawn = np.random.Philox(key=seed % 2**64).random_raw(n).argsort(kind="stable").tolist()
    ring: list[int | None] = [*drawn, None] if n % 2 else drawn
    found = []
    for _ in range(min(turns, len(ring) - 1)):
        halves = zip(ring, reversed(ring), strict=True)
        met = list(halves)[: len(ring) // 2]
        found.append([(a, b) for a, b in met if a is not None and b is not None])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return found
