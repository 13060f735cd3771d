"""Contributions of clients, each by itself, to one attempt at who combines them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

from ...dag.exchange.collective import Hop
from ...dag.plan.plan import PeerId
from ...dag.rounds.sums import LargeContributionError
from ...dag.rounds.vector import Span
from ...dag.rounds.wiring import ALL, RoundWiring
from ...proto import broker_pb2
from .part_algebra import PartAlgebra

__all__ = ["ClientRows"]

V = TypeVar("V")


class ClientRows(Generic[V]):
    """Rows in the order of members and of the clients of each, whenever they come. Not locked."""

    def __init__(
        self, wiring: RoundWiring, plan: broker_pb2.RoundPlan, algebra: PartAlgebra[V]
    ) -> None:
        self._wiring, self._plan, self._algebra = wiring, plan, algebra
        self._adds = {part: hops for (part, _, phase), hops in wiring.takes.items() if phase == ALL}
        self._came: dict[Span, dict[tuple[PeerId, int], V]] = {part: {} for part in self._adds}

    def add(self, part: Span, hop: Hop, block: int, values: V) -> None:
        """Keep a block of rows, once. Raises LargeContributionError."""
        if not self._algebra.fits(part, values, self._plan.exponent, rows=True):
            raise LargeContributionError(
                f"of a client of {hop.source} an element is no number below 2^{self._plan.exponent}"
            )
        self._came[part].setdefault((hop.source, block), values)

    def combined(self) -> Mapping[Span, V]:
        """Return what is made of each part, and forget the rows; nothing while some lack."""
        found: dict[Span, list[tuple[int, V]]] = {}
        for part, hops in self._adds.items():
            found[part] = []
            for hop in hops:
                for block, rows in enumerate(self._wiring.blocks(part, hop)):
                    if (hop.source, block) not in self._came[part]:
                        return {}
                    found[part].append((len(rows), self._came[part][hop.source, block]))
        made = self._algebra.combined(found, self._plan) if found else {}
        self._came.clear()
        return made
