"""The exchanges of a step, found from a plan and its stages: who gives what, by which collective.

A plan names the collective of each stage with several holders (`Plan.exchanges`); everything else
follows: tied sums, batch statistics, the norm, the scores of an evaluation. Their order here is the
order in which peers carry them out, level after level.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from ..plan.action import Action, ExchangeContent, Kind, named
from ..plan.cut import Stage, TiedGroup
from ..plan.plan import PeerId, Plan, PlanError
from ..plan.plan_slice import PlanSlice
from .collective import Collective, Hop, Members
from .collectives import COLLECTIVES, SUMS

__all__ = [
    "LEVELS",
    "Exchange",
    "Exchanges",
    "exchanges_of",
    "hub_of",
    "level_of",
    "reports_only",
    "shares_gradient",
]

CODED = frozenset({ExchangeContent.GRADIENT, ExchangeContent.DELTA, ExchangeContent.TIED})
"""What a codec that loses something may carry. Norms, scores and statistics are small and exact;
the updates of a tied parameter have been through a codec already."""
LEVELS: tuple[frozenset[ExchangeContent], ...] = (
    frozenset({ExchangeContent.TIED_PAIR}),
    frozenset({ExchangeContent.GRADIENT, ExchangeContent.DELTA, ExchangeContent.STATISTICS}),
    frozenset({ExchangeContent.SECOND}),
    frozenset({ExchangeContent.TIED, ExchangeContent.TIED_DELTA}),
    frozenset({ExchangeContent.NORM}),
    frozenset({ExchangeContent.SCORES}),
)
"""What stands before what: an exchange makes use of what those of lower levels brought."""


def level_of(content: ExchangeContent) -> int:
    return next(i for i, level in enumerate(LEVELS) if content in level)


class _Phase(NamedTuple):
    """What a peer does in one phase: in the order of its reductions, and of the giving."""

    takes: tuple[Hop, ...]
    gives: tuple[Hop, ...]


@dataclass(frozen=True)
class Exchange:
    """One exchange: a content, that of a stage or tied group by `index`, among members."""

    content: ExchangeContent
    index: int
    members: Members
    collective: Collective
    encoded: bool = False
    """Whether a strategy has encoded what is exchanged."""

    @property
    def name(self) -> str:
        return named(self.content, self.index)

    @property
    def coded(self) -> bool:
        """Whether the codec of link and role carries it, rather than raw."""
        return self.content in CODED and self.collective.coded and not self.encoded

    @cached_property
    def hops(self) -> tuple[Hop, ...]:
        return tuple(self.collective.hops(self.members))

    @cached_property
    def last(self) -> int:
        """The phase of the taking."""
        return max(hop.taken for hop in self.hops)

    @cached_property
    def edges(self) -> tuple[int, ...]:
        """Where shards begin, in relative sizes, and where the last one ends."""
        return (0, *accumulate(self.collective.shards(self.members)))

    def bounds(self, elements: int) -> tuple[int, ...]:
        """Where the shards of a vector of so many elements begin, and where the last one ends:
        rounded, so that equal shards differ by one element at most."""
        whole = self.edges[-1]
        return tuple(edge * elements // whole for edge in self.edges)

    def elements(self, hop: Hop, elements: int) -> int:
        """How many a message has, of a vector of so many."""
        edges, whole = self.edges, self.edges[-1]
        return sum(
            edges[s + 1] * elements // whole - edges[s] * elements // whole for s in hop.shards
        )

    def is_shared(self, hop: Hop) -> bool:
        """Whether every destination in this phase gets the same tensor, to have the same bits of
        it: a total, or what a participant gives whole to all."""
        return hop.total or self.collective.name == "gather"

    def port(self, hop: Hop) -> str:
        """The name of a message of this exchange, for one source and destination."""
        part = f".{hop.part}" if hop.part else ""
        return f"{self.name}/{hop.given}-{hop.taken}{part}"

    def action(self, peer: PeerId, phase: int) -> Action:
        """The action of a peer in a phase."""
        if phase == 0:
            kind = Kind.GIVE
        elif phase == self.last:
            kind = Kind.TAKE
        else:
            adds = any(not hop.total for hop in self._phases[peer][phase].takes)
            kind = Kind.REDUCE if adds else Kind.RELAY
        return Action(kind, phase, self.index, self.content)

    def phases(self, peer: PeerId) -> Mapping[int, _Phase]:
        """What a peer takes and gives, by phase, ascending; empty for one that is no member."""
        return self._phases.get(peer, {})

    @cached_property
    def _phases(self) -> dict[PeerId, dict[int, _Phase]]:
        takes: dict[PeerId, dict[int, list[Hop]]] = {}
        gives: dict[PeerId, dict[int, list[Hop]]] = {}
        for hop in self.hops:
            gives.setdefault(hop.source, {}).setdefault(hop.given, []).append(hop)
            takes.setdefault(hop.destination, {}).setdefault(hop.taken, []).append(hop)
        found: dict[PeerId, dict[int, _Phase]] = {}
        for peer in dict.fromkeys((*gives, *takes)):
            mine, theirs = takes.get(peer, {}), gives.get(peer, {})
            found[peer] = {
                phase: _Phase(tuple(mine.get(phase, ())), tuple(theirs.get(phase, ())))
                for phase in sorted(mine.keys() | theirs.keys())
            }
        return found


Exchanges = Mapping[tuple[ExchangeContent, int], Exchange]
"""The exchanges of a plan by content and index."""


def hub_of(plan: Plan, stages: Sequence[Stage]) -> PeerId:
    """The peer that adds up norms and results: the first holder of the stage of the loss."""
    stage = next(s.index for s in stages if s.makes_loss)
    if not plan.stages[stage].holders:
        raise PlanError(f"nobody is named who holds stage {stage}, which makes the loss")
    return plan.stages[stage].holders[0]


def shares_gradient(stage: Stage) -> bool:
    """Whether several holders of the stage would have gradients to add up."""
    return stage.has_backward and bool(stage.trainable)


def exchanges_of(
    plan: Plan,
    stages: Sequence[Stage],
    tied: Sequence[TiedGroup],
    mine: PlanSlice | None = None,
) -> tuple[Exchange, ...]:
    """All exchanges of a plan, by level and index; with a slice, of whose plan this is, those that
    its peer takes part in. Raises PlanError for a collective that there is not, or that adds up no
    gradients."""
    own = range(len(stages)) if mine is None else plan.stages_of(mine.peer)
    groups = [g for g in tied if any(k in own for k in g.stages)]
    found = [
        *(_pairs(plan, group) for group in groups if plan.strategy(group.stages[0]).traits.updates),
        *(e for stage in stages if stage.index in own for e in _of_stage(plan, stage)),
        *(_tied(plan, group) for group in groups),
        _norm(plan, stages, mine),
    ]
    if plan.evaluation_routes and any(s.makes_loss and s.index in own for s in stages):
        found.append(_scores(plan, stages))
    return tuple(found)


def _of_stage(plan: Plan, stage: Stage) -> list[Exchange]:
    k, holders = stage.index, plan.stages[stage.index].holders
    if len(holders) < 2:
        return []
    found = []
    if shares_gradient(stage):
        chosen = plan.exchange_of(k)
        if chosen.collective not in SUMS:
            raise PlanError(
                f"stage {k} exchanges gradients by {chosen.collective!r}: expected one of "
                f"{', '.join(SUMS)}"
            )
        traits = plan.strategy(k).traits
        content = ExchangeContent.DELTA if traits.updates else ExchangeContent.GRADIENT
        by = COLLECTIVES[traits.collective or chosen.collective]
        members = Members(holders, holders, chosen.groups, chosen.weights, chosen.chunks)
        for also in (content, ExchangeContent.SECOND)[: traits.sums]:
            found.append(Exchange(also, k, members, by, traits.elements is not None))
    if stage.statistics:
        # Not every holder has to run microbatches.
        ran = {v.peer for route in plan.routes for v in route if v.stage == k}
        members = Members(tuple(h for h in holders if h in ran), holders)
        found.append(Exchange(ExchangeContent.STATISTICS, k, members, COLLECTIVES["gather"]))
    return found


def _pairs(plan: Plan, group: TiedGroup) -> Exchange:
    """The exchange of a tied parameter between the i-th holders of its stages, for each i."""
    pipelines = tuple(zip(*(plan.stages[k].holders for k in group.stages), strict=True))
    everybody = tuple(peer for one in pipelines for peer in one)
    members = Members(everybody, tuple(dict.fromkeys(everybody)), pipelines)
    return Exchange(ExchangeContent.TIED_PAIR, group.index, members, COLLECTIVES["stars"])


def _tied(plan: Plan, group: TiedGroup) -> Exchange:
    holders = [plan.stages[k].holders for k in group.stages]
    everybody = dict.fromkeys(peer for of_stage in holders for peer in of_stage)
    members = Members(tuple(of_stage[0] for of_stage in holders), tuple(everybody))
    updates = plan.strategy(group.stages[0]).traits.updates
    content = ExchangeContent.TIED_DELTA if updates else ExchangeContent.TIED
    return Exchange(content, group.index, members, COLLECTIVES["star"])


def _norm(plan: Plan, stages: Sequence[Stage], mine: PlanSlice | None) -> Exchange:
    hub = hub_of(plan, stages)
    # A slice says it of the plan: it has no routes but its peer's.
    alone = reports_only(plan, stages) if mine is None else plan.without_norm
    if mine is not None and mine.peer != hub:
        ends = (hub,) if alone else (hub, mine.peer)
        spoke = Members((mine.peer,), ends, first=mine.place)
        return Exchange(ExchangeContent.NORM, 0, spoke, COLLECTIVES["star"])
    others = () if alone else (p for p in plan.peers if p != hub)
    members = Members(plan.peers, (hub, *others))
    return Exchange(ExchangeContent.NORM, 0, members, COLLECTIVES["star"])


def reports_only(plan: Plan, stages: Sequence[Stage]) -> bool:
    """Whether nobody but the hub has to wait for the norm: no update needs it, and nobody ends a
    step before everybody has begun it, even so. Of that peers, slots and snapshots make use. It is
    so where each stage waits for its gradient, which comes from the loss, which waits for all who
    are on the route; and for that of all its holders, who are on all routes."""
    visits = {(v.stage, v.peer) for route in plan.routes for v in route}
    return plan.without_norm and all(
        s.has_backward
        and (len(holders) == 1 or bool(s.trainable))
        and all((s.index, h) in visits for h in holders)
        for s in stages
        for holders in [plan.stages[s.index].holders]
    )


def _scores(plan: Plan, stages: Sequence[Stage]) -> Exchange:
    loss = next(s.index for s in stages if s.makes_loss)
    ran = {v.peer for route in plan.evaluation_routes for v in route if v.stage == loss}
    participants = tuple(peer for peer in plan.stages[loss].holders if peer in ran)
    members = Members(participants, (hub_of(plan, stages),))
    return Exchange(ExchangeContent.SCORES, 0, members, COLLECTIVES["star"])
