"""Visits: what a plan is made of, and who it is about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

from .action import Action

__all__ = ["PeerId", "Route", "Visit", "Visits"]

PeerId = NewType("PeerId", str)


@dataclass(frozen=True, slots=True)
class Visit:
    stage: int
    peer: PeerId


Route = tuple[Visit, ...]
"""The visits of one microbatch, in order."""
Visits = tuple[tuple[Action, ...], ...]
"""The visits of each of `Plan.peers`, in the order in which it does them."""
