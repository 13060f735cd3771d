"""What a monitor says when an invariant is broken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, get_args

from ...broker import events as b
from ...peer.core import events as p
from ..scenario.sentences import Fault, sentence
from ..virtual.clock import Observed

if TYPE_CHECKING:
    from ..virtual.world import World

__all__ = ["EVENTS", "Broken", "Check", "Violation"]

EVENTS: tuple[type, ...] = (*get_args(b.Event), *get_args(p.Event))
"""What machines handle; every other record is an instruction."""


class Broken(Exception):  # noqa: N818 (a fact that a check found; Violation is the error)
    """A check found that an invariant, "I1" to "I10", does not hold."""

    def __init__(self, invariant: str, what: str) -> None:
        super().__init__(what)
        self.invariant = invariant


class Violation(RuntimeError):  # noqa: N818 (what it is called everywhere)
    """An invariant does not hold: which, when, as what happened. After `shortest` (shortest.py)
    also the fewest faults and steps with which it still fails."""

    def __init__(self, seed: int, at_s: float, event: Observed, invariant: str, what: str) -> None:
        super().__init__(what)
        self.seed, self.at_s, self.event = seed, at_s, event
        self.invariant, self.what = invariant, what
        self.faults: Sequence[Fault] | None = None
        self.steps = 0

    def __str__(self) -> str:
        lines = [
            f"{self.invariant} does not hold, seed {self.seed}, at {self.at_s:.6f} s: {self.what}",
            f"  {self.event.who}: {_short(self.event.record)}",
        ]
        if self.faults is not None:
            named = "; ".join(map(sentence, self.faults)) or "no fault at all"
            lines.append(f"  still so with {self.steps} steps and {named}")
        lines.append(f"  again: --seed {self.seed}")
        return "\n".join(lines)


class Check:
    """One of the monitor's checks. Raises Broken."""

    wants: ClassVar[tuple[type, ...]] = (object,)
    """Classes of the records that it looks at."""

    def __init__(self, world: World) -> None:
        self.world = world

    def observe(self, seen: Observed) -> None:
        """Before a machine handles an event, and before an instruction of it is carried out."""

    def ended(self, run: str) -> None:
        """The run has ended."""


def _short(record: object) -> str:
    text = " ".join(repr(record).split())
    return text if len(text) <= 300 else text[:299] + "…"
