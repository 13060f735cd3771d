"""Which frames a round's exchange has for one peer, by the plan that it got.

    hop GIVE     a member's contribution to a part, to who adds it up
    hop RESULT   the mean of a part, encoded once, to who takes it
    hop VERSION  the whole new version of a part, with shared state, to who has another one

A frame's identity is that of its part: run, round (as its step), attempt (as its term), and the
elements (as its port).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from ..plan.plan import PeerId
from .vector import RunVector, Span

__all__ = [
    "GIVE",
    "RESULT",
    "UNDIVIDED",
    "VERSION",
    "Giver",
    "RoundFrame",
    "RoundWiring",
    "Share",
    "VectorSegment",
    "port_of",
    "span_of",
    "wiring",
]

GIVE, RESULT, VERSION = 0, 1, 2
UNDIVIDED = 1 << 16
"""Elements that are added up by one peer, however many there are: 256 KB in fp32."""


class Giver(NamedTuple):
    peer: PeerId
    weight: int


@dataclass(frozen=True, slots=True)
class VectorSegment:
    """As `RoundSegment` of the wire. versions: (source, destination)."""

    span: Span
    aggregator: PeerId
    givers: tuple[Giver, ...] = ()
    takers: tuple[PeerId, ...] = ()
    versions: tuple[tuple[PeerId, PeerId], ...] = ()


class Share(NamedTuple):
    """One part with another peer: to whom it goes, or from whom it comes."""

    part: Span
    peer: PeerId


RoundFrame = tuple[int, Span, PeerId]
"""Hop, part, and the other peer of a frame."""


@dataclass
class RoundWiring:
    """All of one peer. Shares with itself are in `gives` and `takes`, and make no frame.

    gives: contributions, and who adds them up. adds: parts that it adds up, of whom; results: to
    whom each goes. takes: results, and from whom. sends, gets: versions.
    """

    gives: list[Share] = field(default_factory=list)
    adds: dict[Span, tuple[Giver, ...]] = field(default_factory=dict)
    results: list[Share] = field(default_factory=list)
    takes: list[Share] = field(default_factory=list)
    sends: list[Share] = field(default_factory=list)
    gets: list[Share] = field(default_factory=list)

    def comes(self, peer: PeerId) -> set[RoundFrame]:
        """Return the frames that come to `peer`, whose wiring this is, each by its source."""
        found = {(GIVE, part, g.peer) for part, givers in self.adds.items() for g in givers}
        found |= {(RESULT, *s) for s in self.takes} | {(VERSION, *s) for s in self.gets}
        return {frame for frame in found if frame[2] != peer}

    def goes(self) -> set[RoundFrame]:
        """Return the frames that leave, each by its destination."""
        hops = (GIVE, self.gives), (RESULT, self.results), (VERSION, self.sends)
        return {(hop, *share) for hop, shares in hops for share in shares}

    @property
    def counterparts(self) -> tuple[PeerId, ...]:
        """Return the members that it exchanges frames with, itself perhaps among them, in order of
        first use."""
        shares = (*self.gives, *self.results, *self.takes, *self.sends, *self.gets)
        added = (g.peer for givers in self.adds.values() for g in givers)
        return tuple(dict.fromkeys((*(s.peer for s in shares), *added)))


def wiring(
    vector: RunVector, segments: Iterable[VectorSegment], peer: PeerId, fragment: int = 0
) -> RoundWiring:
    """What `peer` does, by the segments that name it. Of the fragment (0: all) contributions are
    added up; versions are given whole."""
    found, spans = RoundWiring(), vector.spans(fragment)
    for segment in segments:
        by, (start, stop) = segment.aggregator, segment.span
        inside = ((max(start, a), min(stop, b)) for a, b in spans if a < stop and start < b)
        for part in (p for span in inside for p in vector.parts(*span)):
            if any(giver.peer == peer for giver in segment.givers):
                found.gives.append(Share(part, by))
            if by == peer and segment.givers:
                found.adds[part] = segment.givers
                found.results += (Share(part, t) for t in segment.takers if t != peer)
            if peer in segment.takers:
                found.takes.append(Share(part, by))
        for part in vector.parts(start, stop) if segment.versions else ():
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
