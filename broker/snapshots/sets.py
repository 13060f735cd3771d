"""Which snapshots of a run lie where, and which of them make a set that it can go on from.

A set is all snapshots of one step, and of one round where a run has rounds, under one term that
together cover the whole graph. What is known here is what peers have said, and nothing else: it is
as good after a restart of the broker, when peers say it again with their Hello.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, replace

from ...dag.plan.plan import PeerId, Plan
from ...proto import broker_pb2
from ...proto.broker_pb2 import Checkpoint, Snapshot

__all__ = ["MOST_SNAPSHOTS", "SnapshotCatalog", "SnapshotSet"]

MOST_SNAPSHOTS = 4096
"""Of one peer and run; what it says of more is not remembered."""

Span = tuple[int, int]
_Key = tuple[int, int, int]
"""Of a set: step, term and round."""


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
    round: int = 0
    """Of a run with rounds: whose version is in it."""

    def without(self, peers: Container[PeerId]) -> SnapshotSet | None:
        """Return the set without these peers; None: it is not whole then."""
        where = {
            holder: (spans, tuple(p for p in there if p not in peers))
            for holder, (spans, there) in self.where.items()
        }
        whole = all(there for _, there in where.values())
        return replace(self, where=where) if whole else None

    def overlapping(self, spans: Iterable[Span]) -> tuple[PeerId, ...]:
        """Holders whose snapshots somebody with these spans needs."""
        wanted = tuple(spans)
        return tuple(holder for holder, (have, _) in self.where.items() if overlap(wanted, have))


def overlap(some: Iterable[Span], others: Sequence[Span]) -> bool:
    """Whether an operator is in both."""
    return any(a < d and c < b for a, b in some for c, d in others)


def spans_of(plan: Plan) -> dict[PeerId, tuple[Span, ...]]:
    """By holder, the operators of its stages."""
    found: dict[PeerId, tuple[Span, ...]] = {}
    for stage in plan.stages:
        for holder in stage.holders:
            found[holder] = (*found.get(holder, ()), (stage.start, stage.stop))
    return found


def spans_to_proto(spans: Iterable[Span]) -> list[broker_pb2.Span]:
    """As they stand in a message."""
    return [broker_pb2.Span(start=start, stop=stop) for start, stop in spans]


@dataclass(slots=True)
class Copies:
    """The operators in a holder's snapshots, and peers that have these, or may."""

    spans: tuple[Span, ...]
    peers: dict[PeerId, None] = field(default_factory=dict)


class SnapshotCatalog:
    """The snapshots of one run: which peer holds which, and which of them make a complete set."""

    def __init__(self) -> None:
        self._known: dict[_Key, dict[PeerId, Copies]] = {}
        self._at: dict[PeerId, dict[tuple[_Key, PeerId], None]] = {}
        """The same by peer, with the holder."""
        self._spoilt: dict[_Key, dict[PeerId, None]] = {}
        """By set, who could not go on from it."""
        self._changes = 0
        self._copied: tuple[tuple[_Key, int], object, object, bool] | None = None
        """What was last asked of `copied`, and the answer."""

    def held(self, peer: PeerId, snapshot: Snapshot) -> None:
        """Note that a snapshot lies at a peer, whole."""
        there = self._at.setdefault(peer, {})
        if len(there) >= MOST_SNAPSHOTS:
            return
        holder = PeerId(snapshot.holder)
        spans = tuple((s.start, s.stop) for s in snapshot.spans)
        of_set = self._known.setdefault(_key_of(snapshot), {})
        of_set.setdefault(holder, Copies(spans)).peers[peer] = None
        there[_key_of(snapshot), holder] = None
        self._changes += 1

    def not_held(self, peer: PeerId, snapshot: Snapshot) -> None:
        self._forget(peer, _key_of(snapshot), PeerId(snapshot.holder))

    def gone(self, peer: PeerId) -> None:
        """Nothing lies there any more, as far as anybody can tell."""
        for key, holder in tuple(self._at.get(peer, ())):
            self._forget(peer, key, holder)

    def spoilt(self, found: SnapshotSet | None, by: PeerId, only: bool) -> None:
        """A peer says that a set cannot be gone on from. It is gone once another one says so, or
        this one again where it is the `only` one that could have its part."""
        if found is None:
            return
        key = found.step, found.term, found.round
        said = self._spoilt.setdefault(key, {})
        if any(peer != by for peer in said) or (only and by in said):
            self._drop(key)
        said[by] = None

    def not_needed(self, step: int) -> None:
        """Nobody goes back to before this step."""
        for key in [k for k in self._known if k[0] < step]:
            self._drop(key)
        self._spoilt = {k: said for k, said in self._spoilt.items() if k[0] >= step}

    @property
    def peers(self) -> tuple[PeerId, ...]:
        """Where something lies."""
        return tuple(self._at)

    def _drop(self, key: _Key) -> None:
        for holder, copies in self._known.get(key, {}).copy().items():
            for peer in tuple(copies.peers):
                self._forget(peer, key, holder)

    def _forget(self, peer: PeerId, key: _Key, holder: PeerId) -> None:
        there = self._at.get(peer, {})
        if (key, holder) not in there:
            return
        self._changes += 1
        of_set = self._known[key]
        del there[key, holder], of_set[holder].peers[peer]
        if not there:
            del self._at[peer]
        if not of_set[holder].peers:
            del of_set[holder]
        if not of_set:
            del self._known[key]

    def newest(
        self,
        operators: int,
        most: int,
        gives: Callable[[PeerId], bool] = lambda peer: True,
        round_: int = 0,
    ) -> SnapshotSet | None:
        """The one to go on from in a round, of at most `most` steps, with what lies at peers that
        can give it; None: there is none, or the run has to begin anew."""
        able = (k for k in sorted(self._known, reverse=True) if k[0] <= most and k[2] == round_)
        wholes = (self._whole(key, operators, gives) for key in able)
        return next((found for found in wholes if found is not None), None)

    def _whole(
        self, key: _Key, operators: int, gives: Callable[[PeerId], bool]
    ) -> SnapshotSet | None:
        where = {
            holder: (copies.spans, there)
            for holder, copies in self._known[key].items()
            if (there := tuple(filter(gives, copies.peers)))
        }
        spans = sorted(span for have, _ in where.values() for span in have)
        at = 0
        for start, stop in spans:
            if start > at:
                return None
            at = max(at, stop)
        step, term, round_ = key
        whole = at >= operators > 0
        return SnapshotSet(term, step, where, round=round_) if whole else None

    def copied(
        self,
        step: int,
        term: int,
        holders: Sequence[PeerId],
        keepers: dict[PeerId, PeerId],
        round_: int = 0,
    ) -> bool:
        """Whether every holder has its snapshot of a step, and its keeper a copy. Asked at every
        report, of the same holders and keepers: looked for when something lies elsewhere than
        before."""
        key = (step, term, round_), self._changes
        match self._copied:
            case before, a, b, known if before == key and a is holders and b is keepers:
                return known
        found = self._all_copied(key[0], holders, keepers)
        self._copied = key, holders, keepers, found
        return found

    def _all_copied(
        self, key: _Key, holders: Sequence[PeerId], keepers: dict[PeerId, PeerId]
    ) -> bool:
        of_set = self._known.get(key, {})
        if len(of_set) < len(holders):
            return False
        for holder in holders:
            there = of_set[holder].peers if holder in of_set else {}
            keeper = keepers.get(holder)
            if holder not in there or (keeper is not None and keeper not in there):
                return False
        return True

    def __repr__(self) -> str:
        known = ", ".join(f"{s} (term {t})" for s, t, _ in sorted(self._known))
        return f"<SnapshotCatalog {known or 'none'}>"


def _key_of(snapshot: Snapshot) -> _Key:
    return snapshot.step, snapshot.term, snapshot.round
