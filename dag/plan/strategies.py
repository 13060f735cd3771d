"""What a plan must know of a strategy: what the holders of a stage exchange once each has gone
through its microbatches of a step. What they make of it is in `peer/sync/strategy.py`.

From here follow the exchanges of a step and the collective of each (`dag/exchange/wiring.py`), the
memory of a stage, which plans are valid, and whether siblings can do a lost holder's work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["TRAITS", "StrategyTraits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyTraits:
    updates: bool = False
    """Whether holders exchange updates, which each one's own optimizer made of its own gradients,
    in place of gradients. Each is then in a pipeline of its own, in which the gradients of a tied
    parameter are added up before; and nobody else can go on from its optimizer's state."""
    collective: str = ""
    """The only one that carries what is exchanged; empty: any that adds up, as the plan says."""
    copies: int = 0
    """Copies of what is trained that a holder keeps beside the parameters."""


TRAITS: Mapping[str, StrategyTraits] = {
    "mean": StrategyTraits(),
    "ahead": StrategyTraits(updates=True, collective="gather", copies=1),
}
"""By the name that plans have."""
