"""Segments of the vector in a round, which say who adds up what, of whom; and which frames of the
exchange that makes for one peer, by the plan that it got.

    hop GIVE     a member's contribution to a part, to who adds it up
    hop RESULT   the mean of a part, encoded once, to who takes it
    hop VERSION  the whole new version of a part, with shared state, to who has another one
    hop AUDIT    a contribution once more, as in GIVE, to who adds up the part again
    hop GATHER   the sum of a place's contributions to a part, to who adds up all

A frame's identity is that of its part: run, round (as its step), attempt (as its term), and the
elements (as its port). Where each client's contribution comes by itself, a giver has as many rows
of a part as it weighs, and a frame has some of them, a *block* (its number as the microbatch).

Peers of a place may give to one of them, who adds up theirs and gives the sum to who adds up all;
the result comes the same way. So of a place with m peers two frames of a part cross slow links in
place of 2·m, and sums have no order (`sums.py`), so their bits are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ...proto import broker_pb2
from ..plan.plan import PeerId
from .vector import PIECE, RunVector, Span

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
    "RoundFrame",
    "RoundWiring",
    "Share",
    "Signed",
    "VectorSegment",
    "blocks_of",
    "claims_due",
    "port_of",
    "segment_of",
    "segments_of",
    "span_of",
    "wiring",
]

GIVE, RESULT, VERSION, AUDIT, GATHER = 0, 1, 2, 3, 4
"""Hops of frames, as above."""
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


def claims_due(plan: broker_pb2.RoundPlan, peer: PeerId) -> list[int]:
    """Return how many claims a peer has to make: of what it gave, heard and got."""
    due = [s.claims(peer) for s in segments_of(plan)]
    return [sum(len(claims[i]) for claims in due) for i in range(3)]


class Share(NamedTuple):
    """One part, or a block of it, with another peer: to whom it goes, or from whom it comes."""

    part: Span
    peer: PeerId
    block: int = 0


RoundFrame = tuple[int, Span, PeerId, int]
"""Hop, part, the other peer of a frame, and its block."""


def blocks_of(part: Span, rows: int) -> list[range]:
    """Return which of so many rows of a part go in one frame each: all in one where they have no
    more elements than the largest part, else as many as do, at least one."""
    most = max(1, PIECE // (part[1] - part[0]))
    return [range(at, min(at + most, rows)) for at in range(0, rows, most)]


@dataclass
class RoundWiring:
    """All of one peer. Shares with itself are in `gives` and `takes`, and make no frame.

    gives: contributions, and who adds them up. adds: parts that it adds up, of whom; gathers: sums
    of places that it makes, by part, who is to give each, and of whom it is. sums: those that it
    gives, and to whom. results: to whom each goes. takes: results, and from whom; adders: who has
    made them. sends, gets: versions. weights: of givers, as far as it knows them. by_client: as in
    RoundPlan; then results are made of all that comes, and none before.
    """

    gives: list[Share] = field(default_factory=list)
    adds: dict[Span, tuple[Giver, ...]] = field(default_factory=dict)
    gathers: dict[Span, dict[PeerId, tuple[Giver, ...]]] = field(default_factory=dict)
    sums: list[Share] = field(default_factory=list)
    adders: dict[Span, PeerId] = field(default_factory=dict)
    results: list[Share] = field(default_factory=list)
    takes: list[Share] = field(default_factory=list)
    sends: list[Share] = field(default_factory=list)
    gets: list[Share] = field(default_factory=list)
    weights: dict[PeerId, int] = field(default_factory=dict)
    by_client: bool = False

    def comes(self, peer: PeerId) -> set[RoundFrame]:
        """Return the frames that come to `peer`, whose wiring this is, each by its source."""
        found = {
            (g.hop, part, g.peer, block)
            for part in dict.fromkeys((*self.adds, *self.gathers))
            for g in self.heard(part)
            for block, _ in enumerate(self.blocks(part, g.peer))
        }
        found |= {(RESULT, *s) for s in self.takes} | {(VERSION, *s) for s in self.gets}
        return {frame for frame in found if frame[2] != peer}

    def heard(self, part: Span) -> list[Giver]:
        """Return of whom something comes that is added up here, be it to the sum of a place; the
        sums of places that are made here come from nobody."""
        made = self.gathers.get(part, {})
        far = [g for g in self.adds.get(part, ()) if g.hop == GIVE or g.peer not in made]
        return [*far, *(g for givers in made.values() for g in givers)]

    def blocks(self, part: Span, giver: PeerId) -> list[range]:
        """Return which rows of a giver, one that it knows, are in each frame of a part."""
        return blocks_of(part, self.weights[giver] if self.by_client else 1)

    def goes(self) -> set[RoundFrame]:
        """Return the frames that leave, each by its destination."""
        hops = (
            (GIVE, self.gives),
            (GATHER, self.sums),
            (RESULT, self.results),
            (VERSION, self.sends),
        )
        return {(hop, *share) for hop, shares in hops for share in shares}

    @property
    def counterparts(self) -> tuple[PeerId, ...]:
        """Return the members that it exchanges frames with, itself perhaps among them, in order of
        first use."""
        shares = (*self.gives, *self.sums, *self.results, *self.takes, *self.sends, *self.gets)
        near = (givers for made in self.gathers.values() for givers in made.values())
        added = (g.peer for givers in (*self.adds.values(), *near) for g in givers)
        return tuple(dict.fromkeys((*(s.peer for s in shares), *added)))


def wiring(
    vector: RunVector,
    segments: Iterable[VectorSegment],
    peer: PeerId,
    fragment: int = 0,
    *,
    by_client: bool = False,
    again: bool = False,
    most: int = 0,
) -> RoundWiring:
    """What `peer` does, by the segments that name it. Of the fragment (0: all) contributions are
    added up; versions are given whole. `by_client`: as in RoundPlan; `most`: what its `part` is.
    `again`: contributions go to who adds up all, who makes the sums of places as well."""
    found, spans = RoundWiring(by_client=by_client), vector.spans(fragment)
    for segment in segments:
        by, (start, stop) = segment.aggregator, segment.span
        found.weights |= {g.peer: g.weight for g in segment.givers}
        near = [p for p in segment.places if (by if again else p.gatherer) == peer]
        to = by if again else segment.gives_to(peer)
        via = segment.takes_from(peer)
        passed = {t for place in segment.places for t in place.takers if t != place.gatherer}
        takers = [t for t in segment.takers if t not in passed] if by == peer else []
        takers = [*takers, *(t for place in near for t in place.takers if not again)]
        inside = ((max(start, a), min(stop, b)) for a, b in spans if a < stop and start < b)
        for part in (p for span in inside for p in vector.parts(*span, most)):
            if any(giver.peer == peer for giver in segment.givers):
                blocks = found.blocks(part, peer)
                found.gives += (Share(part, to, block) for block, _ in enumerate(blocks))
            for place in near:
                made = found.gathers.setdefault(part, {})
                made[place.gatherer] = segment.gathered(place)
                found.sums += () if again else (Share(part, by),)
            if by == peer and segment.givers:
                found.adds[part] = segment.added
            found.results += (Share(part, t) for t in takers if t != peer and segment.givers)
            if peer in segment.takers:
                found.takes.append(Share(part, via))
                found.adders[part] = by
        for part in vector.parts(start, stop, most) if segment.versions else ():
            for source, destination in segment.versions:
                if source == peer:
                    found.sends.append(Share(part, destination))
                if destination == peer:
                    found.gets.append(Share(part, source))
    return found


def port_of(part: Span) -> str:
    """What frames call a part."""
    return f"{part[0]}:{part[1]}"


def span_of(port: str) -> Span:
    """The part of a frame; (0, 0), which is none, for what is no name of one."""
    first, _, last = port.partition(":")
    known = first.isdecimal() and last.isdecimal() and len(port) < 40
    return (int(first), int(last)) if known else (0, 0)
