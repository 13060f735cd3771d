"""Losses of steps that were done again: on equal devices the same as before, bit for bit."""

from __future__ import annotations

from collections import deque

__all__ = ["ReplayedLosses"]

_LOSSES = 4096
"""Newest steps whose losses are compared."""


class ReplayedLosses:
    """Remembers what was told of each step."""

    def __init__(self) -> None:
        self._told: deque[tuple[int, float]] = deque(maxlen=_LOSSES)
        self._drift = 0.0
        """The largest relative difference so far."""

    def told(self, step: int, loss: float) -> None:
        self._told.append((step, loss))

    def again(self, step: int, loss: float) -> str:
        """A sentence for people where it differs by more than any before; else empty."""
        before = next((had for k, had in reversed(self._told) if k == step), None)
        if before is None or before == loss or (before != before and loss != loss):
            return ""
        drift = abs(loss - before) / max(abs(before), 1e-12)
        if drift <= self._drift:
            return ""
        self._drift = drift
        return (
            f"step {step} gave the loss {loss:.9g} when it was done again, {before:.9g} before "
            f"({drift:.1e} of it): another device, or another order of sums"
        )
