"""What a plan must know of a strategy: what the holders of a stage exchange once each has gone
through its microbatches of a step. What they make of it is in `peer/sync/strategy.py`.

From here follow the exchanges of a step and the collective of each (`dag/exchange/wiring.py`), how
long messages are, the memory of a stage, which plans are valid, and whether siblings can do a lost
holder's work.

A plan names a strategy by a text: a word, and where it has options all of them by name, such as
"powersgd:rank=4,saving=2".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from ..ir.graph import TensorSpec
from . import messages

__all__ = ["TRAITS", "StrategyChoice", "StrategyTraits", "parse_strategy"]

Elements = Callable[[Sequence[TensorSpec], Mapping[str, float], int], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyTraits:
    updates: bool = False
    """Whether holders exchange updates, which each one's own optimizer made of its own gradients,
    in place of gradients. Each is then in a pipeline of its own, in which the gradients of a tied
    parameter are added up before."""
    own_state: bool = False
    """Whether a holder keeps something that the others do not have, so that nobody else can go on
    in its place without its snapshot."""
    collective: str = ""
    """The only one that carries what is exchanged; empty: any that adds up, as the plan says."""
    copies: int = 0
    """Copies of what is trained that a holder keeps beside the parameters."""
    options: tuple[str, ...] = ()
    """Their names."""
    sums: int = 1
    """How often in a step holders add something up, each time with what came of it before."""
    elements: Elements | None = None
    """Numbers in a message of these parameters, with these options, in which of the sums; None: all
    gradients, which any codec may carry. Else the strategy encodes, and messages go as they are."""
    by_stage: bool = False
    """Whether the planner chooses the option `ratio` stage by stage; the job's is the largest."""
    own_momentum: bool = False
    """Whether it keeps the momentum of SGD, in the optimizer's place."""
    alone: bool = False
    """Whether it changes the update, so that a stage with one holder needs it too."""


TRAITS: Mapping[str, StrategyTraits] = {
    "mean": StrategyTraits(),
    "ahead": StrategyTraits(updates=True, own_state=True, collective="gather", copies=1),
    "dgc": StrategyTraits(own_state=True, own_momentum=True, collective="gather"),
    "powersgd": StrategyTraits(
        own_state=True,
        copies=1,
        options=("rank", "saving"),
        sums=2,
        elements=messages.powersgd,
    ),
    "gtopk": StrategyTraits(
        own_state=True,
        collective="tree",
        copies=1,
        options=("ratio",),
        elements=messages.gtopk,
    ),
    "demo": StrategyTraits(
        own_state=True,
        collective="gather",
        copies=1,
        options=("block", "top", "decay"),
        elements=messages.demo,
        alone=True,
    ),
    "lags": StrategyTraits(
        own_state=True,
        collective="gather",
        copies=1,
        options=("ratio",),
        elements=messages.lags,
        by_stage=True,
    ),
    "acp-sgd": StrategyTraits(
        own_state=True,
        copies=1,
        options=("rank", "saving"),
        elements=messages.acp_sgd,
    ),
}
"""By the word that plans have."""


class StrategyChoice(NamedTuple):
    """A strategy with its options."""

    word: str
    traits: StrategyTraits
    options: Mapping[str, float]

    def elements(self, specs: Sequence[TensorSpec], which: int = 0) -> int:
        """Numbers in a message of one of its sums, of parameters of these specs. The first has one
        more for each parameter: whether there was a gradient."""
        if self.traits.elements is None:
            return sum(spec.elements for spec in specs) + len(specs)
        return self.traits.elements(specs, self.options, which) + (len(specs) if not which else 0)


@cache
def parse_strategy(text: str) -> StrategyChoice:
    """Raises ValueError for a text that is no strategy's, and for options that are not its own."""
    word, _, rest = text.partition(":")
    if word not in TRAITS:
        raise ValueError(f"{word!r} is no strategy: expected one of {', '.join(TRAITS)}")
    pairs = [part.partition("=") for part in rest.split(",")] if rest else []
    names = tuple(name for name, _, _ in pairs)
    if sorted(names) != sorted(TRAITS[word].options):
        wanted = ", ".join(TRAITS[word].options) or "none"
        raise ValueError(f"{text!r} has the options {', '.join(names)}: expected {wanted}")
    options = {name: float(value) for name, _, value in pairs}
    for name, value in options.items():
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"{text!r}: {name} is {value}: expected a number, 0 or more")
    return StrategyChoice(word, TRAITS[word], options)
