"""Contributions to one attempt that are kept apart from the sum of all: those of places, of peers
near each other, of whom one gives the sum of all (`dag/rounds/wiring.py`), and those of clients
where each comes by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

from ...dag.plan.plan import PeerId
from ...dag.rounds.sums import LargeContributionError
from ...dag.rounds.vector import Span
from ...dag.rounds.wiring import GATHER, RoundWiring
from ...proto import broker_pb2
from ..secure.attempt_receipts import AttemptReceipts
from .part_algebra import PartAlgebra, PlaceSum, WrittenPart

__all__ = ["ClientRows", "PlaceSums"]

V = TypeVar("V")


class PlaceSums(Generic[V]):
    """Sums that are made here, by `wiring`: of the own place or, where sums are added up again, of
    all. Not locked."""

    def __init__(
        self,
        wiring: RoundWiring,
        plan: broker_pb2.RoundPlan,
        algebra: PartAlgebra[V],
        receipts: AttemptReceipts | None,
    ) -> None:
        self._wiring, self._plan, self._algebra = wiring, plan, algebra
        self._receipts = receipts
        self._of = {
            (part, giver.peer): at
            for part, made in wiring.gathers.items()
            for at, givers in made.items()
            for giver in givers
        }
        """By part and giver, who has the sum that its contribution is in."""
        self._sums: dict[tuple[Span, PeerId], tuple[PlaceSum[V], set[PeerId]]] = {}
        """With whose contributions are in it; of what is made nothing is left."""
        self._made = set[tuple[Span, PeerId]]()

    def has(self, part: Span, giver: PeerId) -> bool:
        """Whether a contribution is in one of them."""
        return (part, giver) in self._of

    def add(self, part: Span, giver: PeerId, values: V) -> tuple[PeerId, WrittenPart[V]] | None:
        """Add a contribution once. Return the sum with who gives it, signed if that is this peer,
        when all of it is there. Raises LargeContributionError, and adds nothing."""
        by = self._of[part, giver]
        at, givers = (part, by), self._wiring.gathers[part][by]
        if at in self._made:
            return None
        if at not in self._sums:
            self._sums[at] = self._algebra.place_sum(part, self._plan), set()
        total, came = self._sums[at]
        if giver not in came:
            total.add(values, next(g.weight for g in givers if g.peer == giver))
            came.add(giver)
        if len(came) < len(givers):
            return None
        del self._sums[at]
        self._made.add(at)
        made = self._algebra.written_sum(part, total.total, self._algebra.codings[GATHER])
        if self._receipts is not None:
            heard = self._receipts.heard(part, ((g, 1) for g in givers))
            self._receipts.sign_sum(by, part, made.buffers, heard)
        return by, made


class ClientRows(Generic[V]):
    """Rows of clients, each contribution by itself, of one attempt at who combines them: in the
    order of members and of the clients of each, whenever they come. Not locked."""

    def __init__(
        self, wiring: RoundWiring, plan: broker_pb2.RoundPlan, algebra: PartAlgebra[V]
    ) -> None:
        self._wiring, self._plan, self._algebra = wiring, plan, algebra
        self._came: dict[Span, dict[tuple[PeerId, int], V]] = {part: {} for part in wiring.adds}

    def add(self, part: Span, giver: PeerId, block: int, values: V) -> None:
        """Keep a block of rows, once. Raises LargeContributionError."""
        if not self._algebra.fits(part, values, self._plan.exponent, rows=True):
            raise LargeContributionError(
                f"of a client of {giver} an element is no number below 2^{self._plan.exponent}"
            )
        self._came[part].setdefault((giver, block), values)

    def combined(self) -> Mapping[Span, V]:
        """Return what is made of each part, and forget the rows; nothing while some lack."""
        found: dict[Span, list[tuple[int, V]]] = {}
        for part, givers in self._wiring.adds.items():
            found[part] = []
            for giver in givers:
                for block, rows in enumerate(self._wiring.blocks(part, giver.peer)):
                    if (giver.peer, block) not in self._came[part]:
                        return {}
                    found[part].append((len(rows), self._came[part][giver.peer, block]))
        made = self._algebra.combined(found, self._plan) if found else {}
        self._came.clear()
        return made
