"""What a monitor says when an invariant is broken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, get_args

from ...broker import events as b
from ...peer.core import events as p
from ..scenario.sentences import Fault, sentence
from ..virtual.clock import Observed
from ..virtual.world import World

__all__ = ["EVENTS", "Broken", "Check", "Violation", "shortest"]

EVENTS: tuple[type, ...] = (*get_args(b.Event), *get_args(p.Event))
"""What machines handle; every other record is an instruction."""


class Broken(Exception):  # noqa: N818 (a fact that a check found; Violation is the error)
    """A check found that an invariant, "I1" to "I10", does not hold."""

    def __init__(self, invariant: str, what: str) -> None:
        super().__init__(what)
        self.invariant = invariant


class Violation(RuntimeError):  # noqa: N818 (what it is called everywhere)
    """An invariant does not hold: which, when, as what happened. After `shortest`
    also the fewest faults and steps with which it still fails."""

    def __init__(self, seed: int, at_s: float, event: Observed, invariant: str, what: str) -> None:
        super().__init__(what)
        self.seed, self.at_s, self.event = seed, at_s, event
        self.invariant, self.what = invariant, what
        self.faults: Sequence[Fault] = ()
        self.steps = 0

    def __str__(self) -> str:
        lines = [
            f"{self.invariant} does not hold, seed {self.seed}, at {self.at_s:.6f} s: {self.what}",
            f"  {self.event.who}: {_short(self.event.record)}",
        ]
        if self.steps:
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


# The fewest faults and steps with which a world still fails: what a person wants to look at.
#
#     raise shortest(faults, 20, fails)           # fails(faults, steps) plays the world once more
#
# First the faults, by delta debugging (Zeller and Hildebrandt 2002, "Simplifying and isolating
# failure-inducing input", algorithm ddmin): of what is left, no fault can be left out.
# Then the steps, by halves. A world is its seed, faults and steps, so each try is exact.

Fails = Callable[[tuple[Fault, ...], int], "Violation | None"]
"""Plays the world with these faults and so many steps; what was violated, or None."""

MOST_TRIES = 200


def shortest(
    faults: Sequence[Fault], steps: int, fails: Fails, most_tries: int = MOST_TRIES
) -> Violation:
    """Return the violation with the fewest faults and steps. Any counts as the same failure. After
    `most_tries` worlds what was found by then is the shortest. Raises ValueError when the whole
    does not fail."""
    tries, failed = 0, list[Violation]()

    def tried(some: Sequence[Fault], steps: int) -> bool:
        nonlocal tries
        tries += 1
        found = fails(tuple(some), steps) if tries <= most_tries else None
        if found is not None:
            failed.append(found)
        return found is not None

    if not tried(faults, steps):
        raise ValueError(f"{len(faults)} faults and {steps} steps do not fail: nothing to shorten")
    left = _fewest(list(faults), lambda some: tried(some, steps))
    low, high = 0, steps  # it fails with `high`; not known to with `low`
    while high - low > 1:
        middle = (low + high) // 2
        if tried(left, middle):
            high = middle
        else:
            low = middle
    failed[-1].faults, failed[-1].steps = tuple(left), high
    return failed[-1]


def _fewest(faults: list[Fault], fails: Callable[[Sequence[Fault]], bool]) -> list[Fault]:
    """ddmin: halves, quarters and so on, each alone and what is left without each."""
    if not faults or fails(()):
        return []
    parts = 2
    while len(faults) > 1:
        size = -(-len(faults) // parts)
        chunks = [faults[i : i + size] for i in range(0, len(faults), size)]
        rests = [[f for chunk in chunks if chunk is not out for f in chunk] for out in chunks]
        smaller = next((some for some in (*chunks, *rests) if some != faults and fails(some)), None)
        if smaller is not None:
            parts = 2 if smaller in chunks else max(parts - 1, 2)
            faults = smaller
        elif parts >= len(faults):
            break
        else:
            parts = min(2 * parts, len(faults))
    return faults
