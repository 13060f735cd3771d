"""Who adds up which elements of a run's vector in a round, who contributes and who takes.

Segments are the common refinement of all replicas' cuts and tied parameters, divided further so
that every replica adds up as much as any other. Aggregators are holders themselves: each has the
elements that it adds up. Pure functions.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from ...dag.plan.plan import PeerId, Plan
from ...dag.rounds.wiring import UNDIVIDED, Giver, VectorSegment
from ...proto.broker_pb2 import RoundSegment

__all__ = ["Replicated", "meeting", "segments", "sliced"]


@dataclass(frozen=True)
class Replicated:
    """A replica's plan in a round. weight: of its contribution, samples."""

    plan: Plan
    weight: int = 0

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
        """Whose own it is: the last of the stages that begin there, the others being empty."""
        return bisect_right(self.bounds, element) - 1

    def takers(self, start: int, stop: int) -> Iterable[PeerId]:
        """Who has these elements: holders of the stage whose own they are, and of its ties."""
        plan = self.plan
        yield from plan.stages[self.stage_at(start)].holders
        for group in plan.outline.tied:
            if group.start < stop and start < group.start + group.elements:
                for stage in group.stages:
                    yield from plan.stages[stage].holders


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
) -> list[VectorSegment]:
    """Those of a round, ascending; `finer` times as many as it takes to divide them evenly, where a
    round exchanges strided parts of them. Where members do not come to one version (`alike`), all
    joiners take that of the first. Raises ValueError when the replicas' vectors differ in length,
    or there is no member."""
    everybody = (*members, *joiners)
    lengths = {replica.bounds[-1] for replica in everybody}
    if len(lengths) != 1 or not members:
        raise ValueError(
            f"vectors of {sorted(lengths)} elements: expected one length, and a member"
        )
    cuts = sorted({at for replica in everybody for at in (*replica.bounds, *replica.ties)})
    found: list[VectorSegment] = []
    for start, stop in pairwise(cuts):
        slices = min(len(members) * finer, max(1, (stop - start) // UNDIVIDED))
        edges = [start + (stop - start) * i // slices for i in range(slices + 1)]
        for first, last in pairwise(edges):
            found.append(_segment(members, joiners, first, last, len(found), alike))
    return found


def _segment(
    members: Sequence[Replicated],
    joiners: Sequence[Replicated],
    start: int,
    stop: int,
    turn: int,
    alike: bool,
) -> VectorSegment:
    firsts = [r.plan.stages[r.stage_at(start)].holders[0] for r in members]
    givers = tuple(Giver(p, r.weight) for p, r in zip(firsts, members, strict=True))
    takers = dict.fromkeys(p for r in members for p in r.takers(start, stop))
    versions = tuple(
        (firsts[(turn + i) % len(firsts) if alike else 0], peer)
        for i, r in enumerate(joiners)
        for peer in dict.fromkeys(r.takers(start, stop))
    )
    aggregator = firsts[turn % len(firsts)]
    return VectorSegment((start, stop), aggregator, givers, tuple(takers), versions)


def sliced(found: Iterable[VectorSegment]) -> dict[PeerId, list[RoundSegment]]:
    """By peer, what it has to know of them."""
    mine: dict[PeerId, list[RoundSegment]] = {}
    for s in found:
        for peer, part in _shares(s).items():
            mine.setdefault(peer, []).append(part)
    return mine


def _shares(s: VectorSegment) -> dict[PeerId, RoundSegment]:
    """Who adds up knows everybody, all others know themselves."""
    (start, stop), by = s.span, s.aggregator
    found: dict[PeerId, RoundSegment] = {}

    def of(*peers: PeerId) -> Iterator[RoundSegment]:
        for peer in {*peers, by}:
            if peer not in found:
                found[peer] = RoundSegment(start=start, stop=stop, aggregator=by)
            yield found[peer]

    for giver in s.givers:
        for share in of(giver.peer):
            share.givers.add(peer=giver.peer, weight=giver.weight)
    for taker in s.takers:
        for share in of(taker):
            share.takers.append(taker)
    for source, destination in s.versions:
        for share in of(source, destination):
            share.versions.add(source=source, destination=destination)
    return found
