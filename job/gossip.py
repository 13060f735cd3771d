"""Methods of kind "gossip", in which a replica meets one other in a round, with their options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .settings import Settings, at_least, at_most, expect
from .units import Rate

__all__ = ["NoLocoOptions", "PairOptions", "SapsOptions", "SapsOuterOptions"]


@dataclass(frozen=True, kw_only=True)
class PairOptions(Settings):
    """random-pairs, ring: two replicas go on from their mean; nothing is to be chosen."""


@dataclass(frozen=True, kw_only=True)
class FastPairOptions(Settings):
    """How fast links are preferred to slow ones."""

    threshold: Rate | Literal["auto"] = "auto"
    """From which rate on, in both directions, a link between two replicas is a fast one; "auto":
    the most that leaves every replica two partners to alternate between."""
    recent: int = 10
    """Rounds after which replicas that did not meet, not even over others, are made to."""

    def check(self) -> None:
        at_least(self, 1, "recent")
        at_most(self, 1000, "recent")


@dataclass(frozen=True, kw_only=True)
class SapsOptions(FastPairOptions):
    """saps: two replicas with a fast link take the mean of some coordinates, which a seed picks for
    all."""

    keep: float = 0.01
    """Share of the coordinates of each tensor that is exchanged in a round, in (0, 1]."""

    def check(self) -> None:
        super().check()
        expect(self, "keep", 0 < self.keep <= 1, "a number in (0, 1]")


@dataclass(frozen=True, kw_only=True)
class NoLocoOptions(Settings):
    """noloco: what a random pair moved on the mean, and how far each is from the middle of both, is
    the gradient of an outer SGD with momentum."""

    lr: float = 0.7
    """Outer learning rate."""
    momentum: float = 0.5
    """Outer momentum, in [0, 1)."""

    def check(self) -> None:
        expect(self, "lr", self.lr > 0, "more than 0")
        expect(self, "momentum", 0 <= self.momentum < 1, "a number in [0, 1)")


@dataclass(frozen=True, kw_only=True)
class SapsOuterOptions(NoLocoOptions, FastPairOptions):
    """saps-outer: the outer step of noloco, over pairs with fast links."""

    def check(self) -> None:
        NoLocoOptions.check(self)
        FastPairOptions.check(self)
