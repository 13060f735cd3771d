"""Which snapshots of a run lie where, and which of them make a set that it can go on from.

A set is all snapshots of one step under one term that together cover the whole graph. What is known
here is what peers have said, and nothing else: it is as good after a restart of the broker, when
peers say it again with their Hello.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, replace

from ...dag.plan.plan import PeerId
from ...proto.broker_pb2 import Checkpoint, Snapshot

__all__ = ["MOST_SNAPSHOTS", "SnapshotCatalog", "SnapshotSet"]

MOST_SNAPSHOTS = 4096
"""Of one peer and run; what it says of more is not remembered."""

Span = tuple[int, int]


@dataclass(frozen=True)
class SnapshotSet:
    """`where`: for each holder whose snapshot it has, the spans of the graph in that, and the peers
    where it lies; empty for a `checkpoint`, which lies with the broker."""

    term: int
    step: int
    where: dict[PeerId, tuple[tuple[Span, ...], tuple[PeerId, ...]]]
    checkpoint: Checkpoint | None = None
    live: bool = False
    """Or it is what the holders have in their stages."""
    rebuilt: tuple[PeerId, ...] = ()
    """With `live`: holders that have nothing in theirs, and make them anew from the others'."""

    def without(self, peers: Container[PeerId]) -> SnapshotSet | None:
        """What is left of it without these; None: it is not whole then."""
        where = {
            holder: (spans, tuple(p for p in there if p not in peers))
            for holder, (spans, there) in self.where.items()
        }
        whole = all(there for _, there in where.values())
        return replace(self, where=where) if whole else None

    def overlapping(self, spans: Iterable[Span]) -> tuple[PeerId, ...]:
        """Holders whose snapshots somebody with these spans needs."""
        wanted = tuple(spans)
        return tuple(
            holder
            for holder, (have, _) in self.where.items()
            if any(a < d and c < b for a, b in wanted for c, d in have)
        )


@dataclass
class _Copies:
    spans: tuple[Span, ...]
    peers: dict[PeerId, None] = field(default_factory=dict)


class SnapshotCatalog:
    """The snapshots of one run: which peer holds which, and which of them make a complete set."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], dict[PeerId, _Copies]] = {}
        self._at: dict[PeerId, dict[tuple[int, int, PeerId], None]] = {}
        """The same by peer: (step, term, holder)."""
        self._changes = 0
        self._copied: tuple[tuple[int, int, int], object, object, bool] | None = None
        """What was last asked of `copied`, and the answer."""

    def held(self, peer: PeerId, snapshot: Snapshot) -> None:
        """It lies at a peer, whole."""
        there = self._at.setdefault(peer, {})
        if len(there) >= MOST_SNAPSHOTS:
            return
        holder = PeerId(snapshot.holder)
        spans = tuple((s.start, s.stop) for s in snapshot.spans)
        of_set = self._known.setdefault((snapshot.step, snapshot.term), {})
        of_set.setdefault(holder, _Copies(spans)).peers[peer] = None
        there[snapshot.step, snapshot.term, holder] = None
        self._changes += 1

    def not_held(self, peer: PeerId, snapshot: Snapshot) -> None:
        self._forget(peer, (snapshot.step, snapshot.term, PeerId(snapshot.holder)))

    def gone(self, peer: PeerId) -> None:
        """Nothing lies there any more, as far as anybody can tell."""
        for name in self.lying_at(peer):
            self._forget(peer, name)

    def spoilt(self, found: SnapshotSet | None) -> None:
        """It cannot be gone on from."""
        if found is not None:
            self._drop(found.step, found.term)

    def not_needed(self, step: int) -> None:
        """Nobody goes back to before this step."""
        for key in [k for k in self._known if k[0] < step]:
            self._drop(*key)

    @property
    def peers(self) -> tuple[PeerId, ...]:
        """Where something lies."""
        return tuple(self._at)

    def _drop(self, step: int, term: int) -> None:
        for holder, copies in self._known.get((step, term), {}).copy().items():
            for peer in tuple(copies.peers):
                self._forget(peer, (step, term, holder))

    def _forget(self, peer: PeerId, name: tuple[int, int, PeerId]) -> None:
        there = self._at.get(peer, {})
        if name not in there:
            return
        self._changes += 1
        step, term, holder = name
        of_set = self._known[step, term]
        del there[name], of_set[holder].peers[peer]
        if not there:
            del self._at[peer]
        if not of_set[holder].peers:
            del of_set[holder]
        if not of_set:
            del self._known[step, term]

    def newest(
        self, operators: int, most: int, gives: Callable[[PeerId], bool] = lambda peer: True
    ) -> SnapshotSet | None:
        """The one to go on from, of at most `most` steps, with what lies at peers that can give it;
        None: there is none, or the run has to begin anew."""
        for step, term in sorted(self._known, reverse=True):
            if step <= most and (found := self._whole(step, term, operators, gives)) is not None:
                return found
        return None

    def _whole(
        self, step: int, term: int, operators: int, gives: Callable[[PeerId], bool]
    ) -> SnapshotSet | None:
        where = {
            holder: (copies.spans, there)
            for holder, copies in self._known[step, term].items()
            if (there := tuple(filter(gives, copies.peers)))
        }
        spans = sorted(span for have, _ in where.values() for span in have)
        at = 0
        for start, stop in spans:
            if start > at:
                return None
            at = max(at, stop)
        return SnapshotSet(term, step, where) if at >= operators > 0 else None

    def copied(
        self, step: int, term: int, holders: Sequence[PeerId], keepers: dict[PeerId, PeerId]
    ) -> bool:
        """Whether every holder has its snapshot of a step, and its keeper a copy. Asked at every
        report, of the same holders and keepers: looked for when something lies elsewhere than
        before."""
        key = step, term, self._changes
        match self._copied:
            case before, a, b, known if before == key and a is holders and b is keepers:
                return known
        found = self._all_copied(step, term, holders, keepers)
        self._copied = key, holders, keepers, found
        return found

    def _all_copied(
        self, step: int, term: int, holders: Sequence[PeerId], keepers: dict[PeerId, PeerId]
    ) -> bool:
        of_set = self._known.get((step, term), {})
        if len(of_set) < len(holders):
            return False
        for holder in holders:
            there = of_set[holder].peers if holder in of_set else {}
            keeper = keepers.get(holder)
            if holder not in there or (keeper is not None and keeper not in there):
                return False
        return True

    def lying_at(self, peer: PeerId) -> tuple[tuple[int, int, PeerId], ...]:
        """(step, term, holder) of what lies at a peer."""
        return tuple(self._at.get(peer, ()))

    def __repr__(self) -> str:
        known = ", ".join(f"{s} (term {t})" for s, t in sorted(self._known))
        return f"<SnapshotCatalog {known or 'none'}>"
