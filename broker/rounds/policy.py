"""Who exchanges with whom in a round. Here all do with all; `gossip.py` has pairs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ...proto.broker_pb2 import RoundMember
from ..records.rounds import RoundRecord
from .version import most_made

__all__ = ["RoundPolicy"]


class RoundPolicy:
    """All members come to one version. Not durable. sources: by joiner of the present attempt, of
    the member whose version it takes, where there are several. kept: who goes on in this attempt
    with what was planned in an earlier one."""

    in_groups = False
    """Whether groups exchange each by themselves. Then an attempt plans those anew that lost
    somebody, and nobody loses its place for what its partner alone says."""

    def __init__(self, record: RoundRecord) -> None:
        self._record = record
        self.begin()

    def begin(self) -> None:
        """A round begins."""
        self.sources: dict[int, int] = {}
        self.kept = set[int]()

    def grouped(
        self, ready: Sequence[RoundMember], *, anew: Collection[int] | None, now: float
    ) -> list[RoundMember]:
        """Return the members of the next attempt. `anew`: those of the present one whose groups are
        planned again though all are there; None: all."""
        return [*ready]

    def joining(
        self, members: Sequence[RoundMember], candidates: Sequence[int], without: Collection[int]
    ) -> list[int]:
        """Return those of the candidates that take a version from a member; `without`: who could
        not make the version of the present attempt."""
        return [*candidates]

    def agreed(self, hashes: Mapping[int, int | None]) -> tuple[int, list[int]] | None:
        """Return a hash of what a round came to, and who has made what it was to make, by the
        hashes of members and joiners; None: of each the own holders differ."""
        return most_made(hashes)
