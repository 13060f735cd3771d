"""The grid that contributions are rounded to, by its exponent.

An element that is too large for the grid is another attempt with a coarser one, and that has a
limit: the first coarser grid is had for one member's word, as no digit of a weight is lost by it;
a coarser one still for the words of two. Who asks for it alone is left out. Grids become finer
again after some rounds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from ...dag.rounds.sums import EXPONENT

__all__ = ["Grid"]

_RAISED = 12
"""By so much a contribution that is too large raises the exponent."""
_MOST_EXPONENT = 48
"""Who has a larger element is left out."""
_CALM = 16
"""Rounds without such a contribution behind which the exponent is lowered again."""


class Grid:
    """exponent: of the next attempt; as in RoundPlan."""

    def __init__(self, exponent: int) -> None:
        self.exponent = exponent
        self._calm = 0
        """Rounds since it was raised, or lowered."""
        self._large = defaultdict[int, set[int]](set)
        """By exponent, who had an element in this round that was too large for it."""

    def begin(self) -> None:
        """A round begins."""
        self._large.clear()
        self._calm += 1
        if self._calm >= _CALM and self.exponent > EXPONENT:
            self.exponent, self._calm = max(EXPONENT, self.exponent - _RAISED), 0

    def overflows(self, number: int, level: int) -> Collection[int]:
        """An element of a replica was too large for an exponent. Return who counts again with the
        next one, itself and whose word stood alone before; nobody: it is left out."""
        said = self._large[level]
        said.add(number)
        if level >= _MOST_EXPONENT or (level > EXPONENT and len(said) < 2):
            return ()
        self.exponent, self._calm = level + _RAISED, 0
        return said
