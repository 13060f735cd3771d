"""Where snapshots of a replica may lie. A term goes on from what peers say they have, and whoever
gives a snapshot gives the weights: so only those are heard that were told to have it, about stages
that its holder had.

They are its holder itself, who kept its copies in that term (the holders beside it do where the
plan's keeper is gone), and who had some of the same operators in a later term, for it was given
them then.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...dag.plan.plan import PeerId, Plan
from ...proto.broker_pb2 import Keeper, Snapshot
from ...proto.journal_pb2 import HolderKept, HoldersOfTerm
from .sets import Copies, overlap, spans_of, spans_to_proto

__all__ = ["SnapshotPlaces"]

_MOST_TERMS = 64
_MOST_HOLDERS = 1 << 14
"""Of all terms but the newest two: those of the oldest ones are forgotten first."""


class SnapshotPlaces:
    """Knows by term who held what, and who else may have copies of that; it outlives the broker."""

    def __init__(self) -> None:
        self._terms: dict[int, dict[PeerId, Copies]] = {}

    def begin(self, term: int, plan: Plan) -> None:
        """A term begins with a plan."""
        spans = spans_of(plan)
        found = {p: Copies(spans[p]) for p in plan.peers}
        for i, holder in enumerate(plan.peers if plan.keepers else ()):
            beside = plan.peers[(i + 1) % len(plan.peers)], plan.peers[i - 1]
            found[holder].peers |= dict.fromkeys(beside)
        self._terms[term] = found
        self.keep(term, [Keeper(holder=k.holder, peer=k.peer) for k in plan.keepers])
        holders = sum(map(len, self._terms.values()))
        for old in list(self._terms)[:-2]:
            if len(self._terms) <= _MOST_TERMS and holders <= _MOST_HOLDERS:
                break
            holders -= len(self._terms.pop(old))

    def keep(self, term: int, keepers: Iterable[Keeper]) -> None:
        """Others keep copies in a term from here on."""
        for keeper in keepers:
            its = self._terms.get(term, {}).get(PeerId(keeper.holder))
            if its is not None:
                its.peers[PeerId(keeper.peer)] = None

    def problem(self, peer: PeerId, snapshot: Snapshot) -> str:
        """Return why a peer cannot have a snapshot; empty: it may."""
        holder = PeerId(snapshot.holder)
        its = self._terms.get(snapshot.term, {}).get(holder)
        if its is None:
            return f"a snapshot of who held nothing in term {snapshot.term}"
        if its.spans != tuple((s.start, s.stop) for s in snapshot.spans):
            return f"a snapshot of {holder} with other stages than the plan gives it"
        if peer == holder or peer in its.peers:
            return ""
        later = (at for term, at in self._terms.items() if term > snapshot.term and peer in at)
        if any(overlap(its.spans, at[peer].spans) for at in later):
            return ""
        return f"a snapshot of {holder} of term {snapshot.term}, which was never given to it"

    # ------------------------------------------------------------ the journal's snapshots

    def kept(self) -> list[HoldersOfTerm]:
        """Everything, for `restore`."""
        return [
            HoldersOfTerm(
                term=term,
                holders=[
                    HolderKept(
                        holder=holder,
                        spans=spans_to_proto(its.spans),
                        keepers=its.peers,
                    )
                    for holder, its in at.items()
                ],
            )
            for term, at in self._terms.items()
        ]

    def restore(self, kept: Iterable[HoldersOfTerm]) -> None:
        """Go on as an earlier start of the broker left it, terms in their order: the oldest are
        forgotten first. Nothing changes where nothing was kept."""
        found = {
            at.term: {
                PeerId(h.holder): Copies(
                    tuple((s.start, s.stop) for s in h.spans),
                    dict.fromkeys(map(PeerId, h.keepers)),
                )
                for h in at.holders
            }
            for at in kept
        }
        self._terms = found or self._terms

    def __repr__(self) -> str:
        return f"<SnapshotPlaces of terms {list(self._terms)}>"
