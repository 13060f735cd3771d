"""The plan: who runs what, in which order, for one term of a run. Pure data, immutable. It holds
what is executed and nothing else; what is expected of it, and why it is so, stands in its report
(`report.py`).

Everything that looks like a mode elsewhere is data here: several holders of one stage (data
parallelism), two stages on one peer, one microbatch on another route than the rest.
`dag/schedule/schedule.py` turns a plan into action lists, `dag/schedule/flow.py` says which tensors
each action takes and gives.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from .full_steps import FullSteps
from .outline import Outline
from .strategies import StrategyChoice, parse_strategy
from .visit import PeerId, Route, Visit, Visits

__all__ = [
    "CodecChoice",
    "PeerId",
    "Plan",
    "PlanError",
    "Route",
    "ScheduleName",
    "SnapshotKeeper",
    "StageExchange",
    "StageSlot",
    "Visit",
    "Visits",
    "swapped_pairs",
]

ScheduleName = str
"""A name of `dag/schedule/orders/schedules.py`."""


NO_OUTLINE = Outline()

MOST_CHUNKS = 64
"""The most chunks of an exchange: each is a frame of its own."""


MOST_CHUNKED = 1 << 18
"""Chunks of an exchange times pairs of its holders, if it has several: all peers list them."""


class PlanError(ValueError):
    """A plan that breaks a rule; the message names the stage, route or peer and the rule."""


@dataclass(frozen=True, slots=True)
class StageSlot:
    """Operators [start, stop) of the full graph and the peers that execute them. The order of the
    holders is the order of every reduction among them."""

    start: int
    stop: int
    holders: tuple[PeerId, ...]
    recompute: bool = False
    """Whether its backward computes the forward again, so that only its inputs are kept."""


@dataclass(frozen=True, slots=True)
class StageExchange:
    """How the holders of a stage exchange its gradients; a stage without one: all-to-all."""

    stage: int
    collective: str = "all-to-all"
    """One of `dag/exchange/collectives.py` that adds up."""
    groups: tuple[tuple[PeerId, ...], ...] = ()
    """Its holders side by side, for collectives that ask (rows, places)."""
    weights: tuple[int, ...] = ()
    """By holder, how much of the sum it is to make, for collectives that ask; empty: as much as the
    others."""
    chunks: int = 1
    """Into how many parts each holder's share is cut, that follow each other, for collectives that
    ask."""
    strategy: str = "mean"
    """What they make of their gradients before and after (`dag/plan/strategies.py`)."""


def in_pipelines(holders: Iterable[Sequence[Hashable]]) -> bool:
    """Whether all stages have as many holders, more than one, and each peer has one and the same
    place among the holders of all its stages: so the i-th ones make up a pipeline."""
    all_of = [tuple(of) for of in holders]
    places = {(peer, i) for of in all_of for i, peer in enumerate(of)}
    return (
        len({len(of) for of in all_of}) == 1
        and len(all_of[0]) > 1
        and len(places) == len({peer for peer, _ in places})
    )


def swapped_pairs(route: Route) -> tuple[tuple[int, int], ...]:
    """Neighbouring stages (a, a + 1) that a route visits the other way round, ascending."""
    order = [v.stage for v in route]
    return tuple((b, a) for a, b in pairwise(order) if a == b + 1)


@dataclass(frozen=True, slots=True)
class CodecChoice:
    """Codec of one role on one link; links and roles without a choice use `raw/1`."""

    source: PeerId
    destination: PeerId
    role: str
    codec: str


@dataclass(frozen=True, slots=True)
class SnapshotKeeper:
    """`peer` keeps copies of the snapshots of `holder`."""

    holder: PeerId
    peer: PeerId


@dataclass(frozen=True)
class Plan:
    """What each peer runs. `routes[m]` are the visits of microbatch m, in the order of the stages
    but for inner ones that it leaves out and neighbours that change places (`routes.py`);
    `evaluation_routes[m]` those of held-out microbatch m (forward only, all stages in order)."""

    stages: tuple[StageSlot, ...]
    routes: tuple[Route, ...]
    microbatch_size: int
    schedule: ScheduleName = "1f1b"
    codecs: tuple[CodecChoice, ...] = ()
    evaluation_routes: tuple[Route, ...] = ()
    exchanges: tuple[StageExchange, ...] = ()
    """How the holders of stages exchange gradients, at most one for each; tied sums, statistics and
    the norm follow from the rest of the plan (`dag/exchange/wiring.py`)."""
    head_parts: int = 0
    """Column blocks that the vocabulary head is split into before the graph is cut; 0: whole."""
    without_norm: bool = False
    """Whether updates need no totals of the step: nothing is clipped by the global norm, and no
    loss has a weight. Then only the hub, which reports them, waits for them."""
    keepers: tuple[SnapshotKeeper, ...] = ()
    """Planners leave it empty; the broker fills it when the plan begins."""
    outline: Outline = NO_OUTLINE
    """What crosses between the stages; empty where nobody has looked at the graph yet."""
    visits: Visits = ()
    """Forwards and backwards of a training step. Empty in a plan that is not listed yet, which
    nobody can execute (`dag/schedule/schedule.py`)."""
    evaluations: Visits = ()
    """Those of an evaluation."""
    full: FullSteps | None = None
    """The steps in which `routes` and `visits` are others; None: they are the same in all."""

    @cached_property
    def in_full(self) -> Plan:
        """The plan in its full steps."""
        if self.full is None:
            return self
        return replace(self, routes=self.full.routes, visits=self.full.visits, full=None)

    def with_routes(self, moved: Callable[[tuple[Route, ...]], tuple[Route, ...]]) -> Plan:
        """The plan with all of its routes changed by `moved`, those of evaluations too."""
        full = self.full and replace(self.full, routes=moved(self.full.routes))
        return replace(
            self,
            routes=moved(self.routes),
            evaluation_routes=moved(self.evaluation_routes),
            full=full,
        )

    def with_peers(self, at: Callable[[PeerId], PeerId]) -> Plan:
        """The plan with other peers in the places of its own."""

        def moved(routes: tuple[Route, ...]) -> tuple[Route, ...]:
            return tuple(tuple(replace(v, peer=at(v.peer)) for v in route) for route in routes)

        return replace(
            self.with_routes(moved),
            stages=tuple(replace(s, holders=tuple(map(at, s.holders))) for s in self.stages),
            codecs=tuple(
                replace(c, source=at(c.source), destination=at(c.destination)) for c in self.codecs
            ),
        )

    @cached_property
    def peers(self) -> tuple[PeerId, ...]:
        """Every holder once, in order of the first stage that it holds."""
        return tuple(dict.fromkeys(p for s in self.stages for p in s.holders))

    @cached_property
    def hub(self) -> PeerId | None:
        """Peer that reports losses and evaluations: the first holder of the stage that makes
        the loss. None without an outline."""
        stage = next((s.index for s in self.outline.stages if s.makes_loss), None)
        return None if stage is None else next(iter(self.stages[stage].holders), None)

    @cached_property
    def warm(self) -> tuple[PeerId, ...]:
        """Peers that hold no stage and keep snapshots."""
        holders = set(self.peers)
        return tuple(dict.fromkeys(k.peer for k in self.keepers if k.peer not in holders))

    def exchange_of(self, stage: int) -> StageExchange:
        """How the holders of a stage exchange its gradients."""
        return self._exchanges.get(stage) or StageExchange(stage)

    def strategy(self, stage: int) -> StrategyChoice:
        """That of a stage's holders, and what it asks of the plan."""
        return parse_strategy(self.exchange_of(stage).strategy)

    @cached_property
    def exchanges_updates(self) -> bool:
        """Whether holders of some stage exchange updates in place of gradients."""
        return any(parse_strategy(e.strategy).traits.updates for e in self.exchanges)

    @cached_property
    def has_own_state(self) -> bool:
        """Whether a holder keeps something that nobody can go on without in its place."""
        return any(parse_strategy(e.strategy).traits.own_state for e in self.exchanges)

    @cached_property
    def _exchanges(self) -> dict[int, StageExchange]:
        return {e.stage: e for e in self.exchanges}

    def stages_of(self, peer: PeerId) -> tuple[int, ...]:
        return tuple(i for i, s in enumerate(self.stages) if peer in s.holders)

    def validate(self, operators: int) -> Plan:
        """Returns itself when it is a plan for a graph of `operators` operators.

        Raises PlanError when the stages are not consecutive non-empty intervals that cover all
        operators, a stage has no holder or one twice, an exchange is of no stage or not among all
        of its holders, a route visits stages out of order or a peer that does not hold the stage, a
        stage is on no route, there is no route, a microbatch has no sample, a link has two codecs
        for one role, or a keeper keeps what is its own, of no holder, or twice, or the outline is
        of other stages.
        """
        if not self.stages:
            raise PlanError("the plan has no stage: expected at least one")
        if self.microbatch_size < 1:
            raise PlanError(f"microbatches of {self.microbatch_size} samples: expected 1 or more")
        at = 0
        for i, stage in enumerate(self.stages):
            if stage.start != at or stage.stop <= stage.start:
                raise PlanError(
                    f"stage {i} is operators [{stage.start}, {stage.stop}): "
                    f"expected a non-empty interval that starts at {at}"
                )
            if not stage.holders or len(set(stage.holders)) != len(stage.holders):
                raise PlanError(f"stage {i} has holders {stage.holders}: expected distinct peers")
            at = stage.stop
        if at != operators:
            raise PlanError(f"the stages cover {at} operators, the graph has {operators}")
        self._check_exchanges()
        if problem := self.outline.problem(len(self.stages)):
            raise PlanError(problem)
        if self.exchanges_updates and not in_pipelines(s.holders for s in self.stages):
            raise PlanError(
                "stages that exchange updates have "
                f"{' and '.join(str(len(s.holders)) for s in self.stages)} holders: expected as "
                "many in each, more than one, and each peer at the same place of all"
            )
        if not self.routes:
            raise PlanError("the plan has no route: expected one per microbatch")
        kinds = (("microbatch", self.routes), ("held-out microbatch", self.evaluation_routes))
        for kind, routes in kinds:
            first: dict[int, int] = {}  # By route, which many microbatches take, the first of them.
            for m, route in enumerate(routes):
                if first.setdefault(id(route), m) < m:
                    continue
                self._check_order(f"{kind} {m}", route, training=routes is self.routes)
                for v in route:
                    if v.peer not in self.stages[v.stage].holders:
                        raise PlanError(
                            f"the route of {kind} {m} visits {v.peer} for stage {v.stage}, "
                            f"which is held by {', '.join(self.stages[v.stage].holders)}"
                        )
        visited = {v.stage for route in dict.fromkeys(self.routes) for v in route}
        if never := sorted({*range(len(self.stages))} - visited):
            raise PlanError(f"no microbatch visits stage {never[0]}: it would never be trained")
        if any(len(r) < len(self.stages) for r in self.routes):
            for breaks, what in (
                (self.exchanges_updates, "holders exchange updates"),
                (self.without_norm, "updates wait for no norm"),
            ):
                if breaks:
                    raise PlanError(
                        f"a microbatch leaves a stage out, and {what}: expected all stages on "
                        "every route"
                    )
        if self.full is not None and (problem := self.full.problem(len(self.stages), self.routes)):
            raise PlanError(problem)
        for lists in filter(None, (self.visits, self.evaluations, self.in_full.visits)):
            if len(lists) != len(self.peers):
                raise PlanError(
                    f"the plan lists the visits of {len(lists)} peers: expected those of "
                    f"{len(self.peers)}"
                )
        for keeper in self.keepers:
            if keeper.holder not in self.peers or keeper.peer == keeper.holder:
                raise PlanError(
                    f"{keeper.peer} keeps snapshots of {keeper.holder}: expected those of another "
                    "peer that holds a stage"
                )
        if len(set(self.keepers)) < len(self.keepers):
            raise PlanError("a peer keeps the snapshots of one holder twice")
        links = [(c.source, c.destination, c.role) for c in self.codecs]
        if len(set(links)) < len(links):
            source, destination, role = next(x for x in links if links.count(x) > 1)
            raise PlanError(f"the link {source} -> {destination} has two codecs for {role}")
        return self

    def _check_order(self, what: str, route: Route, *, training: bool) -> None:
        """In training, inner stages may be left out, and inner neighbours change places."""
        order, last = [v.stage for v in route], len(self.stages) - 1
        places = {stage: i for i, stage in enumerate(order)}
        ordered = list(order)
        for a, b in swapped_pairs(route) if training else ():
            if a > 0 and b < last:
                ordered[places[a]], ordered[places[b]] = b, a
        every = list(range(last + 1))
        wanted = [k for k in every if k in places] if training else every
        if ordered != wanted or not {0, last} <= set(order):
            raise PlanError(
                f"the route of {what} visits stages {order}: expected 0 to {last} in order"
                + (", but for inner ones that are left out or change places" * training)
            )

    def _check_exchanges(self) -> None:
        seen: set[int] = set()
        for e in self.exchanges:
            if e.stage >= len(self.stages) or e.stage in seen:
                raise PlanError(
                    f"an exchange is of stage {e.stage}: expected one of {len(self.stages)}, "
                    "each at most once"
                )
            seen.add(e.stage)
            try:
                only = parse_strategy(e.strategy).traits.collective
            except ValueError as error:
                raise PlanError(f"the strategy of stage {e.stage}: {error}") from None
            if only and (e.groups or e.weights):
                raise PlanError(
                    f"stage {e.stage} exchanges by {only}, as its strategy {e.strategy} does, with "
                    "groups or weights: expected neither"
                )
            holders = self.stages[e.stage].holders
            if e.groups and sorted(p for g in e.groups for p in g) != sorted(holders):
                raise PlanError(
                    f"the exchange of stage {e.stage} is among {e.groups}: expected groups that "
                    f"have each of its holders {holders} once"
                )
            if e.groups and not all(e.groups):
                raise PlanError(f"the exchange of stage {e.stage} has a group without a holder")
            if e.weights and (len(e.weights) != len(holders) or not any(e.weights)):
                raise PlanError(
                    f"the exchange of stage {e.stage} has weights {e.weights}: expected one for "
                    f"each of {len(holders)} holders, and one at least that is not 0"
                )
            if not 1 <= e.chunks <= MOST_CHUNKS:
                raise PlanError(
                    f"the exchange of stage {e.stage} has {e.chunks} chunks: expected 1 to "
                    f"{MOST_CHUNKS}"
                )
            if e.chunks > 1 and e.chunks * len(holders) ** 2 > MOST_CHUNKED:
                raise PlanError(
                    f"the exchange of stage {e.stage} has {e.chunks} chunks among "
                    f"{len(holders)} holders: expected at most "
                    f"{max(1, MOST_CHUNKED // len(holders) ** 2)}"
                )

    def __repr__(self) -> str:
        how = {
            e.stage: f" {e.strategy}" if e.strategy != "mean" else f" by {e.collective}"
            for e in self.exchanges
            if (e.strategy, e.collective) != ("mean", "all-to-all")
        }
        cuts = " ".join(
            f"[{s.start},{s.stop})@{'+'.join(s.holders)}{how.get(i, '')}"
            for i, s in enumerate(self.stages)
        )
        work = f"{len(self.routes)} microbatches of {self.microbatch_size}"
        return f"<Plan {cuts}, {work}, {self.schedule}>"
