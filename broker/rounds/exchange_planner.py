"""What each peer has to do in the exchange of a round, and who dials whom for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ...dag.plan.plan import PeerId
from ...dag.rounds.vector import part_elements
from ...dag.rounds.wiring import claims_due, segment_of
from ...proto.broker_pb2 import DialOrder, RoundAudit, RoundPlan, RoundSegment
from ..membership.membership import Membership
from ..policies.round_view import ExchangeGroup
from ..policies.segments import Replicated, provable, segments, sliced
from ..runs.run import Run

__all__ = ["ExchangePlanner"]

MOST_CLAIMS = 1024
"""Of one peer about one attempt: they are 34 bytes each, and a message has room for 64 KB."""
_FINER = 8
"""Slices of a replica's share of the vector, among which the blocks of a fragment lie."""
_EXCHANGE_S, _USUAL_BYTES_PER_S, _LEAST_BYTES_PER_S = 60.0, 1.25e6, 2.5e4
"""An attempt has so long, and what the vector takes over a link of 10 Mbit/s four times, for each
client whose contribution comes by itself. It goes on as long as something of it comes, but not for
longer than over a link of 0.2 Mbit/s."""


class ExchangePlanner:
    """Plans the exchanges of one run. Links stay from round to round: the same pair dials the same
    way, unless one of the two has begun a term since."""

    def __init__(self, run: Run, members: Membership) -> None:
        self._run, self._rounds, self._members = run, run.rounds, members
        self._dials: dict[frozenset[PeerId], tuple[tuple[int, ...], PeerId, DialOrder]] = {}

    @property
    def attempt_s(self) -> float:
        """How long an attempt may take, whatever comes of it."""
        return self._within_s(_USUAL_BYTES_PER_S)

    @property
    def longest_s(self) -> float:
        """How long an attempt may take of which something comes all the time."""
        return self._within_s(_LEAST_BYTES_PER_S)

    @property
    def quiet_s(self) -> float:
        """How long nothing may come of an attempt that has had its time: a peer has said by then
        what it lacks."""
        return (self.attempt_s + _EXCHANGE_S) / 2

    def _within_s(self, bytes_per_s: float) -> float:
        plan = self._run.replicas[min(self._rounds.work.given)].record.plan
        elements = sum(s.elements for s in plan.outline.stages) if plan else 0
        cohorts = self._run.submitted.requirements.cohorts
        rows = cohorts.per_round if cohorts and cohorts.by_client else 1
        return _EXCHANGE_S + 16 * elements * rows / bytes_per_s

    def plans(self, exchanges: Iterable[ExchangeGroup]) -> dict[PeerId, RoundPlan]:
        """By peer, what it does in the present attempt."""
        here = {p for r in self._run.replicas for p in r.record.peers}
        self._dials = {pair: known for pair, known in self._dials.items() if pair <= here}
        made: dict[PeerId, RoundPlan] = {}
        for exchange in exchanges:
            made |= self._planned(exchange)
        return made

    def _planned(self, exchange: ExchangeGroup) -> dict[PeerId, RoundPlan]:
        versions, work = self._rounds.versions, self._rounds.work
        everybody = [*exchange.weights, *exchange.joiners]
        weights = [*exchange.weights.items(), *((n, 0) for n in exchange.joiners)]
        whole = {
            n: Replicated(p, w, n, exchange.lines.get(n, 1.0))
            for n, w in weights
            if (p := self._run.replicas[n].record.plan)
        }
        vector = max((r.bounds[-1] for r in whole.values()), default=0)
        by_numbers = self._run.submitted.requirements.goes_whole
        part = part_elements(vector, len(exchange.weights)) if by_numbers else 0
        found = segments(
            [whole[n] for n in exchange.weights if n in whole],
            [whole[n] for n in (*exchange.behind, *exchange.joiners) if n in whole],
            alike=exchange.alike,
            finer=_FINER if work.fragment else 1,
            disputes=exchange.apart,
            whole=exchange.whole,
            places=exchange.places,
            part=part,
        )
        mine, part = sliced(found), provable(found, part)
        patience = self.attempt_s / 2
        weight = sum(exchange.weights.values())
        made: dict[PeerId, RoundPlan] = {}
        for number in everybody:
            replica = self._run.replicas[number]
            for peer in replica.record.peers:
                made[peer] = RoundPlan(
                    run=replica.id,
                    term=replica.record.term,
                    round=versions.round,
                    attempt=versions.attempt,
                    weight=weight,
                    members=len(exchange.weights),
                    part=part,
                    exponent=versions.exponent,
                    segments=mine.get(peer, ()),
                    patience_s=patience,
                    fragment=work.fragment,
                    final=work.final,
                    scale=exchange.scale,
                    share=exchange.share,
                    by_client=exchange.by_client,
                    together=exchange.together,
                )
        if any(sum(claims_due(plan, peer)) > MOST_CLAIMS for peer, plan in made.items()):
            for plan in made.values():
                plan.unclaimed = True
        for peer, plan in made.items():
            about = dict[str, None]()
            for s in plan.segments:
                about |= dict.fromkeys((s.aggregator, *(g.peer for g in s.givers), *s.takers))
                about |= dict.fromkeys(p for v in s.versions for p in (v.source, v.destination))
                about |= dict.fromkeys(place.gatherer for place in s.places)
            for other in map(PeerId, about):
                if other != peer and other in made:
                    self._dial(peer, other, made)
        return made

    def audits(
        self, plans: Mapping[PeerId, RoundPlan], segments: Iterable[RoundSegment], turn: int
    ) -> dict[PeerId, RoundAudit]:
        """Return by peer what it does so that `segments` are added up again, by their aggregators.
        plans: of the attempt."""
        found = [*map(segment_of, segments)]
        made: dict[PeerId, RoundAudit] = {}
        for peer, mine in sliced(found).items():
            plan = plans[peer]
            made[peer] = RoundAudit(run=plan.run, term=plan.term, segments=mine, turn=turn)
            made[peer].round, made[peer].attempt = plan.round, plan.attempt
        pairs = {(g.peer, s.aggregator) for s in found for g in s.givers if g.peer != s.aggregator}
        for peer, other in sorted(pairs | {(b, a) for a, b in pairs}):
            self._dial(peer, other, made)
        return made

    def _dial(
        self,
        peer: PeerId,
        other: PeerId,
        made: Mapping[PeerId, RoundPlan] | Mapping[PeerId, RoundAudit],
    ) -> None:
        """One of the two dials, the same way as before unless a term has begun since."""
        pair, terms = frozenset((peer, other)), tuple(made[p].term for p in sorted((peer, other)))
        known = self._dials.get(pair)
        if known is None or known[0] != terms:
            if (way := self._members.dial(min(pair), max(pair))) is None:
                return
            known = self._dials[pair] = (terms, *way)
        _, source_id, order = known
        if source_id == peer:
            made[peer].dials.append(order)
