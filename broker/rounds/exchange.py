"""What each peer has to do in the exchange of a round, and who dials whom for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...dag.plan.plan import PeerId
from ...proto.broker_pb2 import DialOrder, RoundMember, RoundPlan
from ..membership.member import dial
from ..membership.membership import Membership
from ..records.rounds import RoundRecord
from ..runs.run import Run
from .disputes import Disputes
from .segments import Replicated, segments, sliced

__all__ = ["ExchangePlanner"]

_FINER = 8
"""Slices of a replica's share of the vector, among which the blocks of a fragment lie."""
_EXCHANGE_S, _SLOW_BYTES_PER_S = 60.0, 1.25e6
"""An attempt has so long, and what the vector takes over a link of 10 Mbit/s four times."""


class ExchangePlanner:
    """Plans the exchanges of one run. Links stay from round to round: the same pair dials the same
    way, unless one of the two has begun a term since."""

    def __init__(
        self, run: Run, record: RoundRecord, members: Membership, disputes: Disputes
    ) -> None:
        self._run, self._record, self._members = run, record, members
        self._disputes = disputes
        self._dials: dict[frozenset[PeerId], tuple[tuple[int, ...], PeerId, DialOrder]] = {}

    @property
    def inside(self) -> list[int]:
        """Numbers of the replicas in the present attempt: members, then joiners."""
        return [*(m.replica for m in self._record.members), *self._record.joiners]

    @property
    def attempt_s(self) -> float:
        """How long an attempt may take."""
        plan = self._run.replicas[min(self._record.work)].record.plan
        elements = sum(s.elements for s in plan.outline.stages) if plan else 0
        return _EXCHANGE_S + 16 * elements / _SLOW_BYTES_PER_S

    def plans(self, sources: Mapping[int, int] | None = None) -> dict[PeerId, RoundPlan]:
        """By peer, what it does in the present attempt. `sources`: of gossip, by joiner the first
        member of the group that it is with; then plans are those of groups that are new."""
        record, groups = self._record, dict[int, list[RoundMember]]()
        for m in record.members:
            if sources is None or m.attempt == record.attempt:
                groups.setdefault(m.group, []).append(m)
        made: dict[PeerId, RoundPlan] = {}
        here = {p for r in self._run.replicas for p in r.record.peers}
        self._dials = {pair: known for pair, known in self._dials.items() if pair <= here}
        for members in groups.values():
            inside = [(m.replica, m.weight) for m in members]
            joiners = record.joiners
            if sources is not None:
                inside = [(n, 1) for n, _ in inside]
                joiners = tuple(j for j in joiners if sources.get(j) == inside[0][0])
            made |= self._planned(inside, joiners, alike=sources is None)
        return made

    def _planned(
        self,
        inside: Sequence[tuple[int, int]],
        joiners: Sequence[int],
        *,
        alike: bool,
    ) -> dict[PeerId, RoundPlan]:
        """Plans for replicas, with their weights, who exchange with each other."""
        record, everybody = self._record, [*(n for n, _ in inside), *joiners]
        plans = {n: self._run.replicas[n].record.plan for n in everybody}
        found = segments(
            [Replicated(p, w, n) for n, w in inside if (p := plans[n]) is not None],
            [Replicated(p, 0, n) for n in joiners if (p := plans[n]) is not None],
            alike=alike,
            finer=_FINER if record.fragment else 1,
            disputes=self._disputes.between(everybody) if alike else (),
        )
        mine = sliced(found)
        patience = self.attempt_s / 2
        weight = sum(w for _, w in inside)
        made: dict[PeerId, RoundPlan] = {}
        for number in everybody:
            replica = self._run.replicas[number]
            for peer in replica.record.peers:
                made[peer] = RoundPlan(
                    run=replica.id,
                    term=replica.record.term,
                    round=record.round,
                    attempt=record.attempt,
                    weight=weight,
                    members=len(inside),
                    exponent=record.exponent,
                    segments=mine.get(peer, ()),
                    patience_s=patience,
                    fragment=record.fragment,
                    final=record.final,
                )
        for peer, plan in made.items():
            for other in _counterparts(plan, peer):
                if other in made:
                    self._dial(peer, other, made)
        return made

    def _dial(self, peer: PeerId, other: PeerId, made: dict[PeerId, RoundPlan]) -> None:
        """One of the two dials, the same way as before unless a term has begun since."""
        pair, terms = frozenset((peer, other)), tuple(made[p].term for p in sorted((peer, other)))
        known = self._dials.get(pair)
        if known is None or known[0] != terms:
            members = self._members.members
            a, b = members[min(pair)], members[max(pair)]
            way = dial(a, b, self._run.submitted.options.relays)
            if way is None:
                return
            source, target, address = way
            order = DialOrder(peer=target.id, address=address, generation=self._members.next_dial())
            known = self._dials[pair] = (terms, source.id, order)
        _, source_id, order = known
        if source_id == peer:
            made[peer].dials.append(order)


def _counterparts(plan: RoundPlan, peer: PeerId) -> list[PeerId]:
    found: dict[str, None] = {}
    for s in plan.segments:
        found[s.aggregator] = None
        if s.aggregator == peer:
            found |= dict.fromkeys([*(g.peer for g in s.givers), *s.takers])
        for v in s.versions:
            found[v.source] = found[v.destination] = None
    found.pop(peer, None)
    return [PeerId(p) for p in found]
