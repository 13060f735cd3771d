"""How often somebody may come: so many times in a row, then so many times per second."""

from __future__ import annotations

from collections import OrderedDict

__all__ = ["RateLimiter"]


class RateLimiter:
    """`who` is an address, or a subject. The `most` that knocked last are remembered."""

    def __init__(self, in_a_row: int, per_s: float, most: int) -> None:
        self._in_a_row, self._per_s, self._most = float(in_a_row), per_s, most
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()  # (left, when)

    def allowed(self, who: str, now: float) -> bool:
        """Whether they may knock now; counts it if so. `now`: seconds on any clock."""
        left, at = self._left.pop(who, (self._in_a_row, now))
        left = min(self._in_a_row, left + (now - at) * self._per_s)
        self._left[who] = (left - 1 if left >= 1 else left, now)
        if len(self._left) > self._most:
            self._left.popitem(last=False)
        return left >= 1
