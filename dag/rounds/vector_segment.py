"""Segments of the vector in a round: who adds up what, of whom, and what a peer can say of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ...proto import broker_pb2
from ..plan.plan import PeerId
from .vector import Span

__all__ = [
    "AUDIT",
    "GATHER",
    "GIVE",
    "RESULT",
    "UNDIVIDED",
    "VERSION",
    "Claims",
    "Giver",
    "Place",
    "Signed",
    "VectorSegment",
    "segment_of",
    "segments_of",
]

GIVE, RESULT, VERSION, AUDIT, GATHER = 0, 1, 2, 3, 4
"""Hops of frames (`wiring.py`)."""
UNDIVIDED = 1 << 16
"""Elements that are added up by one peer, however many there are: 256 KB in fp32; those of a part,
where these are fewer."""

Signed = tuple[int, PeerId]
"""Hop and signer of what is sent."""


class Giver(NamedTuple):
    """hop: of what comes from this peer, its contribution or the sum of its place."""

    peer: PeerId
    weight: int
    hop: int = GIVE


class Place(NamedTuple):
    """As `RoundPlace` of the wire."""

    gatherer: PeerId
    givers: tuple[PeerId, ...] = ()
    takers: tuple[PeerId, ...] = ()


class Claims(NamedTuple):
    """What a peer gave of a segment, heard and got."""

    gave: list[Signed]
    heard: list[Signed]
    got: list[Signed]


@dataclass(frozen=True, slots=True)
class VectorSegment:
    """As `RoundSegment` of the wire. versions: (source, destination)."""

    span: Span
    aggregator: PeerId
    givers: tuple[Giver, ...] = ()
    takers: tuple[PeerId, ...] = ()
    versions: tuple[tuple[PeerId, PeerId], ...] = ()
    places: tuple[Place, ...] = ()

    @property
    def added(self) -> tuple[Giver, ...]:
        """Givers of what is added up to all: of a place its sum, in place of its first giver."""
        by = {peer: place for place in self.places for peer in place.givers}
        found: dict[PeerId, Giver] = {}
        for giver in self.givers:
            place = by.get(giver.peer)
            if place is None:
                found[giver.peer] = giver
            else:
                at = place.gatherer
                weight = giver.weight + (found[at].weight if at in found else 0)
                found[at] = Giver(at, weight, GATHER)
        return tuple(found.values())

    def gathered(self, place: Place) -> tuple[Giver, ...]:
        """The givers of a place."""
        return tuple(g for g in self.givers if g.peer in place.givers)

    def gives_to(self, peer: PeerId) -> PeerId:
        """To whom a giver gives."""
        return next((p.gatherer for p in self.places if peer in p.givers), self.aggregator)

    def takes_from(self, peer: PeerId) -> PeerId:
        """From whom the result comes to a taker."""
        near = (p.gatherer for p in self.places if peer in p.takers and peer != p.gatherer)
        return next(near, self.aggregator)

    # ------------------------------------------------------------ what can be said of it

    def claims(self, peer: PeerId) -> Claims:
        """Return what a peer, which knows of it what it has to, can tell of it."""
        gave = [(GIVE, peer)] if any(g.peer == peer for g in self.givers) else []
        heard = [(g.hop, g.peer) for g in self.added] if self.aggregator == peer else []
        for place in self.places:
            if place.gatherer == peer:
                gave.append((GATHER, peer))
                heard += [(GIVE, g.peer) for g in self.gathered(place)]
        got = [(RESULT, self.aggregator)] if peer in self.takers else []
        return Claims(gave, heard, got)

    @property
    def again(self) -> list[Signed]:
        """What who adds it up again can tell of: all contributions, and the sums of places."""
        sums = [(GATHER, place.gatherer) for place in self.places]
        return [*((GIVE, g.peer) for g in self.givers), *sums]


def segment_of(s: broker_pb2.RoundSegment) -> VectorSegment:
    """Read a segment of the wire. One that ends before it begins has no parts."""
    return VectorSegment(
        (s.start, s.stop),
        PeerId(s.aggregator),
        tuple(Giver(PeerId(g.peer), g.weight) for g in s.givers),
        tuple(map(PeerId, s.takers)),
        tuple((PeerId(v.source), PeerId(v.destination)) for v in s.versions),
        tuple(
            Place(PeerId(p.gatherer), tuple(map(PeerId, p.givers)), tuple(map(PeerId, p.takers)))
            for p in s.places
        ),
    )


def segments_of(plan: broker_pb2.RoundPlan | broker_pb2.RoundAudit) -> Iterator[VectorSegment]:
    """Yield the segments of a plan."""
    return map(segment_of, plan.segments)
