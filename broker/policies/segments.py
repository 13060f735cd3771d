"""Who adds up which elements of a run's vector in a round, who contributes and who takes.

Segments are the common refinement of all replicas' cuts and tied parameters, divided further so
that every replica adds up as much as any other, or as its line carries. Aggregators are holders
themselves: each has the elements that it adds up. Pure functions.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from types import MappingProxyType

from ...dag.plan.plan import PeerId, Plan
from ...dag.rounds.vector import PIECE, Span
from ...dag.rounds.wiring import UNDIVIDED, Giver, Place, VectorSegment
from ...net.identity.receipts import MOST_RECEIPTS
from ...proto.broker_pb2 import RoundSegment

__all__ = ["Replicated", "adds_up", "meeting", "provable", "segments", "sliced"]

_MOST_SEGMENTS = 256
"""So many a segment for each gatherer comes to: a member makes about three claims of each, and has
1,024 to make (`exchange_planner.py`)."""
_MOST_NEAR = MOST_RECEIPTS // 2 * PIECE
"""Elements: whole pieces, of each of which there is a receipt, have half of PIECE at least, but for
the last."""


@dataclass(frozen=True)
class Replicated:
    """A replica's plan in a round. weight: of its contribution, samples. number: the replica's.
    line: bytes/s of what it gives to all others; it adds up as much as its share of all."""

    plan: Plan
    weight: int = 0
    number: int = 0
    line: float = 1.0

    @cached_property
    def bounds(self) -> list[int]:
        """Where its stages begin in the vector, and the end."""
        return [0, *accumulate(s.elements for s in self.plan.outline.stages)]

    @property
    def ties(self) -> Iterator[int]:
        """Where a parameter begins or ends that several stages have."""
        for group in self.plan.outline.tied:
            yield from (group.start, group.start + group.elements)

    def stage_at(self, element: int) -> int:
        """The stage that an element belongs to: the last of those that begin there, the others
        being empty."""
        return bisect_right(self.bounds, element) - 1

    def takers(self, start: int, stop: int) -> Iterable[PeerId]:
        """Holders of the stage that these elements belong to, and of its ties."""
        plan = self.plan
        yield from plan.stages[self.stage_at(start)].holders
        for group in plan.outline.tied:
            if group.start < stop and start < group.start + group.elements:
                for stage in group.stages:
                    yield from plan.stages[stage].holders


def adds_up(line: float, fastest: float) -> bool:
    """Return whether a member adds up parts, which all others wait for: its line has half of the
    fastest one at least."""
    return 2 * line >= fastest


def meeting(a: Replicated, b: Replicated) -> list[tuple[PeerId, PeerId]]:
    """Holders who exchange when these two meet: the first of stages that have elements in
    common."""
    found: dict[tuple[PeerId, PeerId], None] = {}
    for start in sorted({*a.bounds[:-1], *b.bounds[:-1]}):
        if start < a.bounds[-1]:
            one, other = (r.plan.stages[r.stage_at(start)].holders[0] for r in (a, b))
            found[one, other] = None
    return list(found)


def segments(
    members: Sequence[Replicated],
    joiners: Sequence[Replicated] = (),
    *,
    alike: bool = True,
    finer: int = 1,
    disputes: Collection[frozenset[int]] = (),
    whole: bool = False,
    places: Mapping[PeerId, int] = MappingProxyType({}),
    part: int = 0,
) -> list[VectorSegment]:
    """The segments of a round, ascending; `finer` times as many as it takes to divide them evenly,
    where a round exchanges strided parts of them. Where members do not come to one version
    (`alike`), all joiners take that of the first. A member that is among the joiners as well gives
    its contribution, and takes the version from those that make it. `disputes`: pairs of replicas
    of which neither gives the other a sum or a version, as long as there is another who can.
    `whole`: the first who may adds up all. `places`: by peer, the number of its place, if it has
    one; who is at the place of who adds up gives to that one, and of each other place with several
    one gives the sum. `part`: as in RoundPlan. Raises ValueError when the replicas' vectors differ
    in length, or there is no member that makes the version."""
    apart = {n for pair in disputes if pair <= {m.number for m in members} for n in pair}
    makers = [m for m in members if not any(m is j for j in joiners)]
    adders = [m for m in makers if m.number not in apart] or makers
    fastest = max((m.line for m in adders), default=0.0)
    adders = adders[:1] if whole else [m for m in adders if adds_up(m.line, fastest)]
    everybody = (*members, *joiners)
    lengths = {replica.bounds[-1] for replica in everybody}
    if len(lengths) != 1 or not makers:
        raise ValueError(
            f"vectors of {sorted(lengths)} elements: expected one length, and a member"
        )
    free = [
        [m for m in makers if frozenset((m.number, joiner.number)) not in disputes] or makers
        for joiner in joiners
    ]
    cuts = sorted({at for replica in everybody for at in (*replica.bounds, *replica.ties)})
    apart_peers = {p for m in members if m.number in apart for p in m.plan.peers}
    near = {p: at for p, at in places.items() if p not in apart_peers}
    most = max(Counter(near.values()).values(), default=1)  # so each of a place gives some sums
    finer *= max(1, min(most, _MOST_SEGMENTS // len(adders)))
    least, found = min(part or UNDIVIDED, UNDIVIDED), list[VectorSegment]()
    for start, stop in pairwise(cuts):
        slices = min(len(adders) * finer, max(1, (stop - start) // least))
        slices -= slices % len(adders) if slices > len(adders) else 0
        turn = [adders[(len(found) + i) % len(adders)] for i in range(slices)]
        for adder, (first, last) in zip(turn, _divided((start, stop), turn), strict=True):
            firsts = [(len(found) + i) * alike for i, _ in enumerate(joiners)]
            sources = [s[at % len(s)] for at, s in zip(firsts, free, strict=True)]
            versions = [*zip(joiners, sources, strict=True)]
            made = _segment(members, makers, versions, (first, last), adder)
            at = sum(divmod(len(found), len(adders)))
            found.append(replace(made, places=_near(made, near, at)) if near else made)
    return found


def provable(found: Sequence[VectorSegment], part: int) -> int:
    """Return the length of parts, as in RoundPlan: `part`, or longer where few add up long
    segments, of whose parts members have MOST_RECEIPTS at most to show."""
    longest = max((s.span[1] - s.span[0] for s in found), default=0)
    return min(PIECE, max(part, -(-longest // (MOST_RECEIPTS // 2)))) if part else 0


def _divided(span: Span, adders: Sequence[Replicated]) -> Iterator[Span]:
    """Yield a part of the span for each, by their lines; each is one element at least."""
    start, stop = span
    spare = stop - start - len(adders)
    lines = [a.line for a in adders]
    if len({*lines}) == 1 or spare < 0:
        edges = [start + (stop - start) * i // len(adders) for i in range(len(adders) + 1)]
    else:
        ends, total = [*accumulate(lines)], sum(lines)
        inner = (start + i + int(spare * ends[i - 1] / total) for i in range(1, len(adders)))
        edges = [start, *inner, stop]
    yield from pairwise(edges)


def _segment(
    members: Sequence[Replicated],
    makers: Sequence[Replicated],
    joiners: Sequence[tuple[Replicated, Replicated]],
    span: Span,
    adder: Replicated,
) -> VectorSegment:
    """`makers`: members that take the result; `joiners`: each with who makes its version; `adder`:
    the maker that adds it up."""
    start, stop = span

    def first(replica: Replicated) -> PeerId:
        return replica.plan.stages[replica.stage_at(start)].holders[0]

    givers = tuple(Giver(first(m), m.weight) for m in members)
    takers = dict.fromkeys(p for r in makers for p in r.takers(start, stop))
    versions = tuple(
        (first(source), peer)
        for joiner, source in joiners
        for peer in dict.fromkeys(joiner.takers(start, stop))
    )
    return VectorSegment(span, first(adder), givers, tuple(takers), versions)


def _near(made: VectorSegment, places: Mapping[PeerId, int], turn: int) -> tuple[Place, ...]:
    """Return the places of a segment whose peers give by one of them, who takes its result; none
    of one that is so long that its receipts are too many for a claim."""
    if made.span[1] - made.span[0] > _MOST_NEAR:
        return ()
    of = defaultdict[int, list[PeerId]](list)
    for giver in made.givers:
        if giver.peer in made.takers and giver.peer in places:
            of[places[giver.peer]].append(giver.peer)
    of.pop(places.get(made.aggregator, -1), None)
    takers = defaultdict[int, list[PeerId]](list)
    for taker in made.takers:
        takers[places.get(taker, -1)].append(taker)
    return tuple(
        Place(givers[turn % len(givers)], tuple(givers), tuple(takers[place]))
        for place, givers in of.items()
        if len(givers) > 1
    )


def sliced(found: Iterable[VectorSegment]) -> dict[PeerId, list[RoundSegment]]:
    """By peer, what it has to know of them: who adds up knows everybody, who gives the sum of a
    place those of the place, all others themselves."""
    mine = defaultdict[PeerId, list[RoundSegment]](list)
    for s in found:
        (start, stop), by = s.span, s.aggregator
        shares = defaultdict[PeerId, RoundSegment](RoundSegment)
        near = {p: place.gatherer for place in s.places for p in (*place.givers, *place.takers)}
        for giver in s.givers:
            for peer in {giver.peer, by, near.get(giver.peer, by)}:
                shares[peer].givers.add(peer=giver.peer, weight=giver.weight)
        for taker in s.takers:
            for peer in {taker, by, near.get(taker, by)}:
                shares[peer].takers.append(taker)
        for place in s.places:
            for peer in {by, place.gatherer, *place.givers, *place.takers}:
                all_ = peer in (by, place.gatherer)
                shares[peer].places.add(
                    gatherer=place.gatherer,
                    givers=place.givers if all_ else {peer} & {*place.givers},
                    takers=place.takers if all_ else {peer} & {*place.takers},
                )
        for source, destination in s.versions:
            for peer in {source, destination, by}:
                shares[peer].versions.add(source=source, destination=destination)
        for peer, share in shares.items():
            share.start, share.stop, share.aggregator = start, stop, by
            mine[peer].append(share)
    return mine
