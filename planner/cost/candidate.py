"""A point of the space that planners search: who runs which interval, in which pipeline.

Each pipeline cuts the graph for itself. The stages of the plan are the intervals between all cuts
of all pipelines; a peer whose share spans several of them holds each. So unequal pipelines (four
weak peers beside one strong) are an ordinary plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ...dag.plan.plan import (
    PeerId,
    Plan,
    Route,
    ScheduleName,
    StageExchange,
    StageSlot,
    Visit,
    Visits,
    in_pipelines,
    swapped_pairs,
)
from ...dag.plan.strategies import TRAITS, parse_strategy
from ...dag.schedule.orders.schedules import first_of

__all__ = [
    "Candidate",
    "Exchanging",
    "GradientSum",
    "Pipeline",
    "StageShare",
    "all_to_all",
    "from_plan",
    "share_out",
    "to_plan",
]


@dataclass(frozen=True, slots=True)
class StageShare:
    """Operators [start, stop) on one peer (its index in the request's offers)."""

    peer: int
    start: int
    stop: int
    recompute: bool = False


Pipeline = tuple[StageShare, ...]
"""Shares that follow each other and cover all operators. A peer may have several."""


@dataclass(frozen=True, slots=True)
class GradientSum:
    """By which collective the holders of stages add up gradients: a `StageExchange` for all stages
    that have just these holders, in this order, by number."""

    holders: tuple[int, ...]
    collective: str
    groups: tuple[tuple[int, ...], ...] = ()
    weights: tuple[int, ...] = ()
    chunks: int = 1

    def of(self, stage: int, names: Sequence[PeerId]) -> StageExchange:
        groups = tuple(tuple(names[p] for p in group) for group in self.groups)
        return StageExchange(stage, self.collective, groups, self.weights, self.chunks)


@dataclass(frozen=True, slots=True)
class Candidate:
    """`microbatches[p]` of a step go through `pipelines[p]`; each has at least one."""

    pipelines: tuple[Pipeline, ...]
    microbatches: tuple[int, ...]
    schedule: ScheduleName = "1f1b"
    swaps: bool = False
    """Whether the first two and the last two inner stages change places for microbatches of the
    second pipeline (`planner/schedulers/swapped.py`)."""
    sums: tuple[GradientSum, ...] = ()
    """Where the collective is not the one that plans are searched with; one whose holders no stage
    has says nothing."""
    ratios: tuple[float, ...] = ()
    """By stage the option `ratio` of a strategy that has one for each; empty: the request's."""
    visits: Visits = ()
    """Those of each of `peers`, where they are not as the schedule lists them."""

    @property
    def peers(self) -> tuple[int, ...]:
        """Every peer once, in the order of the plan's stages, and of the pipelines in each: that of
        `Plan.peers`."""
        if len(self.pipelines) == 1:
            return tuple(dict.fromkeys(s.peer for s in self.pipelines[0]))
        # A peer comes where one of its shares starts. The sort is stable: pipelines in order.
        shares = sorted((s for p in self.pipelines for s in p), key=lambda s: s.start)
        return tuple(dict.fromkeys(s.peer for s in shares))

    def with_peers(self, other: Mapping[int, int]) -> Candidate:
        """Return the candidate with others in the places of some peers, but for its sums."""
        return replace(
            self,
            pipelines=tuple(
                tuple(
                    StageShare(other.get(s.peer, s.peer), s.start, s.stop, s.recompute) for s in p
                )
                for p in self.pipelines
            ),
        )

    def recomputing(self, value: bool) -> Candidate:
        """Return the candidate with all shares computing their forward again, or none."""
        return replace(
            self,
            pipelines=tuple(tuple(replace(s, recompute=value) for s in p) for p in self.pipelines),
        )

    def slots(self) -> list[tuple[int, int, tuple[int, ...], bool]]:
        """The stages: (start, stop, holders, recompute), the latter when any holder wants it."""
        cuts = sorted({s.stop for p in self.pipelines for s in p})
        at = [0] * len(self.pipelines)
        found, start = [], 0
        for stop in cuts:
            holders: dict[int, None] = {}
            recompute = False
            for p, pipeline in enumerate(self.pipelines):
                while pipeline[at[p]].stop <= start:
                    at[p] += 1
                share = pipeline[at[p]]
                holders[share.peer] = None
                recompute |= share.recompute
            found.append((start, stop, tuple(holders), recompute))
            start = stop
        return found


def share_out(weights: Sequence[int], count: int) -> list[int]:
    """For each of `count` microbatches its pipeline, spread so that every stretch has about the
    weights' proportions; with count = Σ weights each pipeline gets its weight exactly."""
    total, given = sum(weights), [0] * len(weights)
    found = []
    for m in range(count):
        # The pipeline that is furthest behind what it should have by now; the first of equals.
        p = max(
            range(len(weights)),
            key=lambda i: ((m + 1) * weights[i] - given[i] * total, weights[i], -i),
        )
        given[p] += 1
        found.append(p)
    return found


def from_plan(plan: Plan, index: Mapping[PeerId, int]) -> Candidate:
    """The candidate whose plan this is, but for the order in which its microbatches take the
    pipelines, and without visits of its own. `index[peer]` is the peer's number."""
    counts: dict[Route, int] = {}
    for route in plan.routes:
        counts[route] = counts.get(route, 0) + 1
    pipelines = []
    for route in counts:
        shares: list[StageShare] = []
        for visit in sorted(route, key=lambda v: v.stage):
            stage, peer = plan.stages[visit.stage], index[visit.peer]
            last = shares[-1] if shares else None
            if last and (last.peer, last.recompute) == (peer, stage.recompute):
                shares[-1] = StageShare(peer, last.start, stage.stop, stage.recompute)
            else:
                shares.append(StageShare(peer, stage.start, stage.stop, stage.recompute))
        pipelines.append(tuple(shares))
    swaps = any(map(swapped_pairs, counts))
    return Candidate(tuple(pipelines), tuple(counts.values()), first_of(plan.schedule), swaps)


Exchanging = Callable[[int, Sequence[int], Sequence[PeerId]], StageExchange]
"""How a stage's holders (peers by number, in order; names of all peers) exchange gradients."""


def all_to_all(stage: int, holders: Sequence[int], names: Sequence[PeerId]) -> StageExchange:
    """Each with each, in equal shares."""
    return StageExchange(stage)


def _swapped(route: Route) -> Route:
    """Return the route with its second and third visit the other way round, and so at its
    end."""
    first, a, b, *rest, y, z, last = route
    return (first, b, a, *rest, z, y, last)


def to_plan(
    candidate: Candidate,
    names: Sequence[PeerId],
    microbatch_size: int,
    evaluation_microbatches: int = 0,
    *,
    exchange: Exchanging = all_to_all,
    strategy: str = "mean",
    head_parts: int = 0,
) -> Plan:
    """The plan of a candidate. `names[i]` is the id of peer i. `exchange`: how the holders of a
    stage exchange gradients; `strategy`: by which, where one that exchanges updates in their place
    takes a plan of whole pipelines."""
    slots = candidate.slots()
    word, traits, _ = parse_strategy(strategy)
    if traits.updates and not in_pipelines(holders for _, _, holders, _ in slots):
        strategy, traits = "mean", TRAITS["mean"]
    sums = {s.holders: s for s in candidate.sums}

    def strategy_of(stage: int) -> str:
        own = candidate.ratios and traits.by_stage
        return f"{word}:ratio={candidate.ratios[stage]:g}" if own else strategy

    routes: list[Route] = []
    for pipeline in candidate.pipelines:
        at, route = 0, []
        for k, (start, _, _, _) in enumerate(slots):
            while pipeline[at].stop <= start:
                at += 1
            route.append(Visit(k, names[pipeline[at].peer]))
        routes.append(tuple(route))
    order = share_out(candidate.microbatches, sum(candidate.microbatches))
    held_out = share_out(candidate.microbatches, evaluation_microbatches)
    trained = [*routes[:1], *map(_swapped, routes[1:])] if candidate.swaps else routes
    return Plan(
        stages=tuple(
            StageSlot(
                start,
                stop,
                tuple(names[p] for p in holders),
                recompute,
            )
            for start, stop, holders, recompute in slots
        ),
        exchanges=tuple(
            found
            for k, (_, _, holders, _) in enumerate(slots)
            if len(holders) > 1 or traits.alone
            for by in [
                StageExchange(k)
                if traits.collective or len(holders) == 1
                else sums[holders].of(k, names)
                if holders in sums
                else exchange(k, holders, names)
            ]
            for named in [strategy_of(k)]
            if (found := replace(by, strategy=named)) != StageExchange(k)
        ),
        routes=tuple(trained[p] for p in order),
        microbatch_size=microbatch_size,
        schedule=candidate.schedule,
        evaluation_routes=tuple(routes[p] for p in held_out),
        head_parts=head_parts,
        visits=candidate.visits,
    )
