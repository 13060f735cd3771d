"""How often somebody may come: so many times in a row, then so many times per second."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable

__all__ = ["RateLimiter", "TokenBucket"]


class TokenBucket:
    """Tokens: so many at once, then so many per second. `refused`: how often there were too few,
    until whoever tells of it begins anew."""

    __slots__ = ("_at", "_left", "_most", "_per_s", "refused")

    def __init__(self, most: float, per_s: float, now: float = -math.inf) -> None:
        self._most, self._per_s = float(most), per_s
        self._left, self._at = self._most, now
        self.refused = 0

    def take(self, count: float, now: float) -> bool:
        """Whether so many may go now; they count from then on. `now`: seconds on any clock."""
        passed = max(0.0, now - self._at)  # a clock may be set back
        self._left = min(self._most, self._left + passed * self._per_s)
        self._at = now
        if count > self._left:
            self.refused += 1
            return False
        self._left -= count
        return True


class RateLimiter:
    """`who` is an address, or a subject. The `most` that knocked last are remembered."""

    def __init__(self, in_a_row: int, per_s: float, most: int) -> None:
        self._in_a_row, self._per_s, self._most = in_a_row, per_s, most
        self._left: OrderedDict[Hashable, TokenBucket] = OrderedDict()

    def allowed(self, who: Hashable, now: float) -> bool:
        """Whether they may knock now; counts it if so. `now`: seconds on any clock."""
        return self.of(who, now).take(1, now)

    def of(self, who: Hashable, now: float) -> TokenBucket:
        """Return what is left to one who knocks now."""
        found = self._left.pop(who, None) or TokenBucket(self._in_a_row, self._per_s, now)
        self._left[who] = found
        if len(self._left) > self._most:
            self._left.popitem(last=False)
        return found
