"""The collectives by name. One that is not here is in no plan."""

from __future__ import annotations

from .all_to_all import AllToAll
from .collective import Collective
from .gather import Gather
from .hierarchical import Hierarchical
from .ring import Ring
from .rows import TwoLevel
from .star import Star, Stars
from .tree import Tree

__all__ = ["COLLECTIVES", "SUMS"]

_SUMS = (AllToAll(), TwoLevel(), Ring(), Tree(), Hierarchical())

COLLECTIVES: dict[str, Collective] = {c.name: c for c in (*_SUMS, Star(), Stars(), Gather())}
SUMS: tuple[str, ...] = tuple(c.name for c in _SUMS)
"""Those that add up the gradients of a stage's holders: what a plan chooses from."""
