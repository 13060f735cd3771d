"""Moments in 8 bits of small models' parameters, too, for both sides of a comparison."""

from __future__ import annotations

import pytest

from shoal.dag.cost import optimizer_states
from shoal.sim.plain import oracle

__all__ = ["from_elements"]


def from_elements(patch: pytest.MonkeyPatch, least: int) -> None:
    """A parameter with so many elements or more has its moments in 8 bits until the patch is
    undone."""
    patch.setattr(optimizer_states, "LEAST", least)
    patch.setattr(oracle, "LEAST_IN_8_BITS", least)
