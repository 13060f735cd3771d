"""Contributions of clients, each by itself, at who combines them: rows in the order of members and
of the clients of each, whenever they come."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

from ...dag.plan.plan import PeerId
from ...dag.rounds.sums import LargeContributionError
from ...dag.rounds.vector import Span
from ...dag.rounds.wiring import RoundWiring
from ...proto import broker_pb2
from .algebra import RoundAlgebra

__all__ = ["ClientRows"]

V = TypeVar("V")


class ClientRows(Generic[V]):
    """Those of one attempt, at a peer with this wiring. Not locked."""

    def __init__(
        self, wiring: RoundWiring, plan: broker_pb2.RoundPlan, algebra: RoundAlgebra[V]
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
