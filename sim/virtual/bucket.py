"""A token bucket: what a link lets through at once after a rest.

It holds up to `size_bytes` tokens, one for each byte, and is refilled at the link's bandwidth. What
finds tokens does not see that bandwidth; what finds none goes at it, and takes each token as it
comes. Times are seconds of any clock.
"""

from __future__ import annotations

__all__ = ["Bucket"]


class Bucket:
    """Full at first."""

    def __init__(self, size_bytes: float, bytes_per_s: float) -> None:
        self.size_bytes, self.bytes_per_s = size_bytes, bytes_per_s
        self._level = size_bytes
        self._at = 0.0

    def there(self, now: float) -> float:
        """Tokens, by now."""
        passed = max(0.0, now - self._at)
        return min(self.size_bytes, self._level + self.bytes_per_s * passed)

    def take(self, size_bytes: float, now: float) -> float:
        """How many of these bytes find tokens, which are gone then."""
        level = self.there(now)
        taken = min(level, size_bytes)
        self._level, self._at = level - taken, max(self._at, now)
        return taken

    def skip(self, now: float) -> None:
        """The tokens that came since the last call were taken as they came."""
        self._at = max(self._at, now)
