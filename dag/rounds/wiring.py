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
place of 2·m, and sums have no order (`sums.py`), so their bits are the same. It is a collective of
one shard for each part, whose phases (`dag/exchange/collective.py`) are

    0  members give       1  places add up        2  who adds up all makes the result
                          3  places pass it on    4  members take it
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from ...proto import broker_pb2
from ..exchange.collective import Hop
from ..plan.plan import PeerId
from .vector import PIECE, RunVector, Span

__all__ = [
    "ALL",
    "AUDIT",
    "GATHER",
    "GIVE",
    "NEAR",
    "PASSED",
    "RESULT",
    "TAKEN",
    "UNDIVIDED",
    "VERSION",
    "At",
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
    "kind_of",
    "port_of",
    "segment_of",
    "segments_of",
    "span_of",
    "wiring",
]

GIVE, RESULT, VERSION, AUDIT, GATHER = 0, 1, 2, 3, 4
"""Hops of frames, as above."""
NEAR, ALL, PASSED, TAKEN = 1, 2, 3, 4
"""Phases in which something is taken, as above."""
UNDIVIDED = 1 << 16
"""Elements that are added up by one peer, however many there are: 256 KB in fp32; those of a part,
where these are fewer."""

Signed = tuple[int, PeerId]
"""Hop and signer of what is sent."""


def kind_of(hop: Hop) -> int:
    """Return which hop of frames it is."""
    return RESULT if hop.total else GATHER if hop.given else GIVE


class Giver(NamedTuple):
    """weight: of a contribution."""

    peer: PeerId
    weight: int


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


@dataclass(frozen=True)
class VectorSegment:
    """As `RoundSegment` of the wire. versions: (source, destination)."""

    span: Span
    aggregator: PeerId
    givers: tuple[Giver, ...] = ()
    takers: tuple[PeerId, ...] = ()
    versions: tuple[tuple[PeerId, PeerId], ...] = ()
    places: tuple[Place, ...] = ()

    @cached_property
    def hops(self) -> tuple[Hop, ...]:
        """The messages of a part, as far as they are known: a place's sum is added up in the place
        of its first giver."""
        return (*self._sums(), *self._results())

    def _sums(self) -> Iterator[Hop]:
        near, by = {p: place for place in self.places for p in place.givers}, self.aggregator
        told = set[Place]()
        for giver in self.givers:
            place = near.get(giver.peer)
            if place is None:
                yield Hop(0, ALL, giver.peer, by, weight=giver.weight)
            elif place not in told:
                told.add(place)
                inside = [g for g in self.givers if g.peer in place.givers]
                weight = sum(g.weight for g in inside)
                yield Hop(NEAR, ALL, place.gatherer, by, weight=weight)
                for near_by in inside:
                    yield Hop(0, NEAR, near_by.peer, place.gatherer, weight=near_by.weight)

    def _results(self) -> Iterator[Hop]:
        near = {p: place.gatherer for place in self.places for p in place.takers}
        passing = {place.gatherer for place in self.places if {*place.takers} - {place.gatherer}}
        for taker in self.takers:
            if taker in passing:
                yield Hop(ALL, PASSED, self.aggregator, taker, total=True)
                yield Hop(PASSED, TAKEN, taker, taker, total=True)
            elif near.get(taker, taker) == taker:
                yield Hop(ALL, TAKEN, self.aggregator, taker, total=True)
            else:
                yield Hop(PASSED, TAKEN, near[taker], taker, total=True)

    def takes_from(self, peer: PeerId) -> PeerId:
        """From whom the result comes to a taker."""
        sources = (h.source for h in self.hops if h.total and h.destination == peer)
        return next(sources, self.aggregator)

    # ------------------------------------------------------------ what can be said of it

    def claims(self, peer: PeerId) -> Claims:
        """Return what a peer, which knows of it what it has to, can tell of it."""
        parts = [h for h in self.hops if not h.total]
        gave = sorted({(kind_of(h), peer) for h in parts if h.source == peer})
        heard = [h for h in parts if h.destination == peer]
        heard.sort(key=lambda h: -h.taken)
        got = [(RESULT, self.aggregator)] if peer in self.takers else []
        return Claims(gave, [(kind_of(h), h.source) for h in heard], got)

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
At = tuple[Span, PeerId, int]
"""Where something is given or taken: part, member, and phase."""


def blocks_of(part: Span, rows: int) -> list[range]:
    """Return which of so many rows of a part go in one frame each: all in one where they have no
    more elements than the largest part, else as many as do, at least one."""
    most = max(1, PIECE // (part[1] - part[0]))
    return [range(at, min(at + most, rows)) for at in range(0, rows, most)]


@dataclass
class RoundWiring:
    """All of one peer. What it gives to itself makes no frame.

    takes, gives: by part, member and phase. The member is the peer; where sums are made `again`, it
    does as well what others did behind their giving. adders: who adds up all of a part. sends,
    gets: versions. by_client: as in RoundPlan; then results are made of all that comes, and none
    before.
    """

    takes: dict[At, list[Hop]] = field(default_factory=dict)
    gives: dict[At, list[Hop]] = field(default_factory=dict)
    adders: dict[Span, PeerId] = field(default_factory=dict)
    sends: list[Share] = field(default_factory=list)
    gets: list[Share] = field(default_factory=list)
    by_client: bool = False
    again: bool = False

    def given_here(self, part: Span, hop: Hop) -> bool:
        """Whether what is taken here is given here as well."""
        return (part, hop.source, hop.given) in self.gives

    def taken_here(self, part: Span, hop: Hop) -> bool:
        """Whether what is given here is taken here as well."""
        return (part, hop.destination, hop.taken) in self.takes

    def blocks(self, part: Span, hop: Hop) -> list[range]:
        """Return which rows of a giver are in each frame of a part."""
        return blocks_of(part, hop.weight if self.by_client and not hop.total else 1)

    @cached_property
    def comes(self) -> dict[RoundFrame, Hop | None]:
        """The frames that come, each by its source; None: of a version."""
        far = [(at[0], h) for at, of in self.takes.items() for h in of]
        far = [(part, h) for part, h in far if not self.given_here(part, h)]
        parts = {f: h for part, h in far for f in self._frames(part, h, h.source)}
        return parts | dict.fromkeys((VERSION, *s) for s in self.gets)

    @cached_property
    def goes(self) -> dict[RoundFrame, Hop | None]:
        """The frames that leave, each by its destination; None: of a version."""
        far = [(at[0], h) for at, of in self.gives.items() for h in of]
        far = [(part, h) for part, h in far if not self.taken_here(part, h)]
        parts = {f: h for part, h in far for f in self._frames(part, h, h.destination)}
        return parts | dict.fromkeys((VERSION, *s) for s in self.sends)

    def _frames(self, part: Span, hop: Hop, other: PeerId) -> Iterator[RoundFrame]:
        for block, _ in enumerate(self.blocks(part, hop)):
            yield kind_of(hop), part, other, block

    @property
    def counterparts(self) -> tuple[PeerId, ...]:
        """Return the members that it exchanges frames with, in order of first use."""

        def of(frames: Iterable[RoundFrame], *kinds: int) -> list[PeerId]:
            return [f[2] for kind in kinds for f in frames if f[0] == kind]

        goes, comes = self.goes, self.comes
        near = (*of(goes, GIVE, GATHER, RESULT), *of(comes, RESULT), *of(goes, VERSION))
        return tuple(dict.fromkeys((*near, *of(comes, VERSION, GIVE, GATHER))))


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
    found = RoundWiring(by_client=by_client, again=again)
    spans = vector.spans(fragment)
    for segment in segments:
        by, (start, stop) = segment.aggregator, segment.span
        hops = segment.hops if segment.givers or by != peer else ()
        if again and by == peer:
            hops = tuple(h for h in hops if not h.total)
        elif again:  # contributions, straight to it
            hops = tuple(h._replace(destination=by, taken=ALL) for h in hops if not h.given)
        inside = ((max(start, a), min(stop, b)) for a, b in spans if a < stop and start < b)
        for part in (p for span in inside for p in vector.parts(*span, most)):
            for hop in hops:
                if peer == (by if again else hop.destination):
                    found.takes.setdefault((part, hop.destination, hop.taken), []).append(hop)
                    found.adders[part] = by
                if peer == (by if again and hop.given else hop.source):
                    found.gives.setdefault((part, hop.source, hop.given), []).append(hop)
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
