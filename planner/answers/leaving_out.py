"""Planning goes on without an offer that it cannot be made with.

An error of planning that is no answer (not "too little memory", but a bug that some number leads
to) ends the run of a submitter who did nothing wrong, when the number is another peer's. So it is
asked whose numbers they are:

- Every offer is taken as one of an ordinary peer. Is the error still there, the links between them
  are taken for ordinary ones, too; and if it is there then, it is the run's own.
- Else offers get their own numbers back, half of them at a time, and those of the halves that fail;
  where only both halves together do, the one that joined last of the fewest. What is found is left
  out, by name, and the plan is made with the others.

Each try is a whole plan, so there are few: MOST_TRIES.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from ...dag.cost.network import Network
from ...dag.ir.graph import GraphError
from ...dag.plan.plan import PeerId, PlanError
from ...job.words import some_of
from ..base.interface import NoPlan, PeerOffer
from ..requests.run_spec import RunSpecError

__all__ = ["MOST_TRIES", "LeftOut", "without_culprits"]

T = TypeVar("T")

log = logging.getLogger(__name__)

MOST_TRIES = 40
"""Plans that may be tried: for one culprit among 1,000 offers some 25 are enough."""
ORDINARY_BYTES = 2**40
"""The most memory that a peer has which is taken for an ordinary one."""

_ANSWERS = (NoPlan, PlanError, GraphError, RunSpecError, MemoryError)
"""Errors that say something about the run: these are no bugs."""

Offers = tuple[PeerOffer, ...]
LeftOut = dict[PeerId, str]
"""Why a peer was left out."""


def without_culprits(
    make: Callable[[Offers, Network | None], T], offers: Sequence[PeerOffer], links: Network | None
) -> tuple[T, LeftOut]:
    """What `make` makes of the offers and the links between them, and who had to be left out.
    Raises what `make` raises where that is an answer, or not for want of other offers."""
    every = tuple(offers)
    try:
        return make(every, links), {}
    except _ANSWERS:
        raise
    except Exception as error:
        log.exception("plan_crashed")
        return _Search(make, every, links, error).result()


@dataclass
class _Search(Generic[T]):
    """Searches for the offers with which planning fails, by trying plans without some of them."""

    _make: Callable[[Offers, Network | None], T]
    _offers: Offers
    _links: Network | None
    _error: Exception
    _tries: int = 0

    def result(self) -> tuple[T, LeftOut]:
        left = self._culprits()
        kept = [i for i, offer in enumerate(self._offers) if offer.peer not in left]
        links = self._links.part(kept) if self._links is not None else None
        try:
            return self._make(tuple(self._offers[i] for i in kept), links), left
        except NoPlan as error:
            named = some_of([f"{o} ({left[o.peer]})" for o in self._offers if o.peer in left])
            text = f"{error.reason}; left out, as no plan can be made with them: {named}"
            raise NoPlan(text, error.code, error.short_bytes) from None

    def _culprits(self) -> LeftOut:
        """Raises the first error where nobody's numbers are at fault."""
        if self._fails(frozenset()) is not None:
            log.warning("plan_without_links why=%s", self._error)
            self._links = None
            if self._fails(frozenset()) is not None:
                raise self._error
        every = list(range(len(self._offers)))
        if (whole := self._fails(frozenset(every))) is None:
            return {}  # the links' fault alone
        left: LeftOut = {}
        for i, error in self._of(every, whole):
            text = f"{type(error).__name__}: {error}"[:200]
            left[self._offers[i].peer] = f"planning with what it says of itself failed: {text}"
        return left

    def _of(self, part: list[int], error: Exception) -> list[tuple[int, Exception]]:
        """Return the peers of a part that fails, which must go."""
        if len(part) == 1:
            return [(part[0], error)]
        found: list[tuple[int, Exception]] = []
        half = len(part) // 2
        for some in (part[:half], part[half:]):
            if (why := self._fails(frozenset(some))) is not None:
                found += self._of(some, why)
        if found:
            return found
        low, high = half, len(part)  # the first `low` pass, the first `high` fail
        while high - low > 1:
            middle = (low + high) // 2
            why = self._fails(frozenset(part[:middle]))
            low, high, error = (middle, high, error) if why is None else (low, middle, why)
        return [(part[high - 1], error)]

    def _fails(self, own: frozenset[int]) -> Exception | None:
        """Why no plan is made when these have their own numbers, and all others ordinary ones."""
        self._tries += 1
        if self._tries > MOST_TRIES:
            raise self._error
        offers = tuple(o if i in own else _ordinary(o) for i, o in enumerate(self._offers))
        try:
            self._make(offers, self._links)
        except MemoryError:
            raise
        except _ANSWERS:
            return None
        except Exception as error:  # the bug that is looked for, whatever it is
            return error
        return None


def _ordinary(offer: PeerOffer) -> PeerOffer:
    """Return the peer as one that says nothing of its speed."""
    memory = min(max(0, offer.device_memory_bytes), ORDINARY_BYTES)
    return replace(
        offer,
        device_memory_bytes=memory,
        host_memory_bytes=0,
        flops_per_s=0.0,
        speeds=None,
        learned=1.0,
        host="",
        cores=0.0,
        threads=0,
    )
