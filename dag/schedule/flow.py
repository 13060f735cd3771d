"""The wiring: which tensors each action takes and gives, for a plan and its stages.

This page is the whole data plane of a step. A transfer is one tensor for one visit or one part of
an exchange; a transfer whose source is its destination stays in that peer's own store and follows
the same rules. `hop` is the position of the receiving visit in the microbatch's route. Where an
action adds up, it does so in the order in which `takes` lists the parts.

role             port          given by            taken by    what it is
---------------  ------------  ------------------  ----------  ---------------------------------
activation       VALUE         F m@source          F m@target  a value; its spec is Port.spec, its
                                                               name that of the target (`made`)
                               F m@source          B m@loss    one made behind the loss
                                                               (Stage.late); without a backward
                                                               of the loss taken by >@norm
activation_grad  VALUE<TARGET  B m@TARGET          B m@source  its gradient from stage TARGET;
                                                               hop of the source's visit
activation       eval:VALUE    E m@source          E m@target  a value, held-out microbatch m
                               E m@source          >@eval      one made behind the loss
sync             NAME/A-B      phase A of NAME     phase B     a hop of the exchange NAME
                                                               (`exchange/wiring.py`), one to
                                                               itself for what a peer keeps

What the parts of an exchange are, by the name that it begins with:

grad STAGE    a holder's gradients of the stage
delta STAGE   in their place where a strategy exchanges updates, the one that each made of its own
second STAGE  what a strategy adds up next, where one sum is not all
stats STAGE   batch statistics of the microbatches that a holder ran
pair GROUP    where it does, a tied parameter's gradient of the i-th holder of each of its stages
tied GROUP    a tied parameter's gradient, of the first holder of each of its stages
both GROUP    in its place where holders exchange updates, the update of it
norm          squares of the gradients that a peer answers for; loss, weight and metrics of its
              microbatches
eval          loss, weight and metrics of its held-out microbatches

The hub of the norm is the first holder of the loss's stage, a tied group's hub the first holder of
its lowest stage. A peer answers in the norm for the stages whose first holder it is, for a tied
parameter only the group's hub. What an exchange carries has microbatch 0 and hop 0.

A plan with full steps (`dag/plan/full_steps.py`) has two such tables (`Flow.at`). What is another
tensor in these has another name: hops of visits begin at the number of stages, and batch statistics
have hop 1. What else is exchanged is the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from ..exchange.collective import Hop
from ..exchange.wiring import Exchange, exchanges_of, hub_of
from ..plan.action import VISITS, Action, ExchangeContent, Kind
from ..plan.cut import Stage, TiedGroup
from ..plan.plan import PeerId, Plan, PlanError, Route, Visit
from ..plan.plan_slice import PlanSlice
from ..plan.routes import Crossing, crossings
from .schedule import evaluation_actions, exchange_actions, step_actions, training_actions

__all__ = ["Flow", "Role", "Transfer"]


class Role(StrEnum):
    """What a frame is for; credits and priorities are kept per role."""

    ACTIVATION = "activation"
    ACTIVATION_GRAD = "activation_grad"
    SYNC = "sync"
    SNAPSHOT = "snapshot"
    PROBE = "probe"
    ROUND = "round"

    __hash__ = str.__hash__  # an enum's own is slow, and keys of frames are hashed all the time


class Transfer(NamedTuple):
    """One tensor on its way within a step; see the table of the module."""

    role: Role
    microbatch: int
    hop: int
    port: str
    source: PeerId
    destination: PeerId

    @property
    def is_local(self) -> bool:
        return self.source == self.destination

    @property
    def value(self) -> str:
        """Name of the graph's value that an activation or its gradient belongs to, as the stage
        that takes it calls it."""
        if self.role is Role.ACTIVATION_GRAD:
            return self.port.rpartition("<")[0]
        return self.port.removeprefix("eval:")

    def __str__(self) -> str:
        where = f" m{self.microbatch} hop {self.hop}" if self.role is not Role.SYNC else ""
        return f"{self.role.value} {self.port}{where} {self.source}->{self.destination}"


class Flow:
    """Answers what an action takes and gives. Everything is computed once, from the plan, or from
    the slice of one peer (`of_slice`): then the answers are about that peer's actions."""

    def __init__(
        self,
        plan: Plan,
        stages: Sequence[Stage],
        tied: Sequence[TiedGroup],
        mine: PlanSlice | None = None,
        *,
        is_full: bool = False,
    ) -> None:
        """`is_full`: it is the flow of the full steps of another plan."""
        self.plan = plan
        self.is_full = is_full
        self._mine = mine
        self.stages = tuple(stages)
        self.tied = tuple(tied)
        self.hub = hub_of(plan, stages)
        found = exchanges_of(plan, stages, tied, mine)
        self.exchanges = {(e.content, e.index): e for e in found}
        self.hops: dict[Transfer, tuple[Exchange, Hop]] = {}
        """By transfer: its exchange, and which of the exchange's messages it is."""
        self.taken_by: dict[Transfer, Action] = {}
        """The action that waits for a transfer, at its destination. What is not here is no transfer
        of this plan: a frame that claims to be one is refused."""
        self.given_by: dict[Transfer, Action] = {}
        """The action that makes it, at its source."""
        self._crossings: dict[tuple[int, ...], tuple[Crossing, ...]] = {}
        """By the order in which a microbatch visits the stages."""
        self._made: dict[Transfer, str] = {}
        """Where the stage that gives a transfer has another name for its value."""
        self._takes: dict[PeerId, dict[Action, list[Transfer]]] = {p: {} for p in plan.peers}
        self._gives: dict[PeerId, dict[Action, list[Transfer]]] = {p: {} for p in plan.peers}
        for m, route in enumerate(plan.routes):
            self._visits(m, route, training=True)
        for m, route in enumerate(plan.evaluation_routes):
            self._visits(m, route, training=False)
        for exchange in self.exchanges.values():
            self._exchange(exchange)
        self.full: Flow | None = None
        """Of the plan's full steps. Its transfers are in the tables here as well."""
        if plan.full is not None:
            other = plan.in_full if mine is None or mine.full is None else mine.full.plan
            self.full = full = Flow(other, stages, tied, mine and mine.full, is_full=True)
            self.hops = full.hops | self.hops
            self.taken_by = full.taken_by | self.taken_by
            self.given_by = full.given_by | self.given_by
            self._made |= full._made

    def at(self, step: int) -> Flow:
        """The flow of a step of the run."""
        full = self.plan.full
        return self.full if self.full is not None and full is not None and full.has(step) else self

    @classmethod
    def of_slice(cls, mine: PlanSlice, stages: Sequence[Stage], tied: Sequence[TiedGroup]) -> Flow:
        """Raises PlanError for a slice that leaves out whom its peer exchanges values with, or what
        the peer does with them."""
        found = cls(mine.plan, stages, tied, mine)
        for flow, part in ((found, mine), (found.full, mine.full)):
            listed = {*part.visits, *part.evaluations} if part else set()
            for action in flow.involved(mine.peer) if flow else ():
                if action.kind in VISITS and action not in listed:
                    raise PlanError(f"the slice of {mine.peer} has no {action}")
        return found

    def takes(self, peer: PeerId, action: Action) -> tuple[Transfer, ...]:
        """What must be in the peer's store before the action runs, in the order of reductions."""
        return tuple(self._takes.get(peer, {}).get(action, ()))

    def gives(self, peer: PeerId, action: Action) -> tuple[Transfer, ...]:
        """What the action leaves in the peer's store, for others and for itself."""
        return tuple(self._gives.get(peer, {}).get(action, ()))

    def visited(self, stage: int) -> tuple[int, ...]:
        """Microbatches of a step that visit a stage, wherever, ascending."""
        known = range(len(self.plan.routes)) if self._mine is None else self._mine.whole
        left_out = {m for m in known if all(v.stage != stage for v in self.plan.routes[m])}
        return tuple(m for m in range(len(self.plan.routes)) if m not in left_out)

    def made(self, transfer: Transfer) -> str:
        """`Transfer.value` as the stage that gives it calls it: another name only where stages have
        changed places (`dag/plan/routes.py`)."""
        return self._made.get(transfer) or transfer.value

    def involved(self, peer: PeerId) -> tuple[Action, ...]:
        """Every action of the peer, training and evaluation, that takes or gives something."""
        return tuple(dict.fromkeys((*self._takes.get(peer, ()), *self._gives.get(peer, ()))))

    def actions(self, peer: PeerId) -> tuple[Action, ...]:
        """The peer's list for one training step."""
        return self._training[peer]

    def evaluation_actions(self, peer: PeerId) -> tuple[Action, ...]:
        """The peer's list for one evaluation; empty when the plan has none."""
        return self._evaluation[peer]

    @cached_property
    def _training(self) -> Mapping[PeerId, tuple[Action, ...]]:
        if mine := self._mine:
            trained = [e for k, e in self.exchanges.items() if k[0] is not ExchangeContent.SCORES]
            return {mine.peer: training_actions(mine.peer, mine.visits, trained)}
        return step_actions(self.plan, self.exchanges.values())

    @cached_property
    def _evaluation(self) -> Mapping[PeerId, tuple[Action, ...]]:
        if mine := self._mine:
            scores = [e for k, e in self.exchanges.items() if k[0] is ExchangeContent.SCORES]
            return {mine.peer: (*mine.evaluations, *exchange_actions(mine.peer, scores))}
        return evaluation_actions(self.plan, self.exchanges.values())

    def _add(self, transfer: Transfer, giver: Action, taker: Action) -> None:
        assert transfer not in self.taken_by, f"{transfer} is given twice"
        self.given_by[transfer] = giver
        self.taken_by[transfer] = taker
        gives = self._gives.setdefault(transfer.source, {})
        gives.setdefault(giver, []).append(transfer)
        takes = self._takes.setdefault(transfer.destination, {})
        takes.setdefault(taker, []).append(transfer)

    def _visits(self, m: int, route: Route, *, training: bool) -> None:
        """Values forward and gradients back, for one microbatch."""
        peer = {visit.stage: visit.peer for visit in route}
        # A slice has a route whole, or those visits of one in order that its peer has to do with.
        whole = self._mine is None or (training and m in self._mine.whole)
        order = tuple(peer) if whole else tuple(range(len(self.stages)))
        # In full steps hops are counted from the number of stages on.
        first = len(self.stages) if self.is_full and training else 0
        hop = {stage: first + i for i, stage in enumerate(order)}
        kind, prefix = (Kind.FORWARD, "") if training else (Kind.EVALUATE, "eval:")
        if order not in self._crossings:
            made_up = tuple(Visit(k, PeerId("")) for k in order)
            self._crossings[order] = crossings(self.stages, made_up)
        for crossing in self._crossings[order]:
            s, made, t, taken, grad, _ = crossing
            if self._mine is not None:
                ends = peer.get(s), peer.get(t)
                if self._mine.peer not in ends:
                    continue
                if None in ends:
                    raise PlanError(f"the slice does not name both who runs stages {s} and {t}")
            there = Transfer(Role.ACTIVATION, m, hop[t], prefix + taken, peer[s], peer[t])
            self._add(there, Action(kind, m, s), self._taker(crossing, m, training=training))
            back = Transfer(Role.ACTIVATION_GRAD, m, hop[s], f"{made}<{t}", peer[t], peer[s])
            if grad and training:
                self._add(back, Action(Kind.BACKWARD, m, t), Action(Kind.BACKWARD, m, s))
            if made != taken:
                self._made |= {there: made, back: taken}

    def _taker(self, crossing: Crossing, m: int, *, training: bool) -> Action:
        """The action that takes a value in its target stage."""
        target = crossing.target
        if not crossing.late:
            return Action(Kind.FORWARD if training else Kind.EVALUATE, m, target)
        if not training:
            return Action(Kind.GIVE, content=ExchangeContent.SCORES)
        if self.stages[target].has_backward:
            return Action(Kind.BACKWARD, m, target)
        return Action(Kind.GIVE, content=ExchangeContent.NORM)

    def _exchange(self, exchange: Exchange) -> None:
        for hop in exchange.hops:
            # As many as there are microbatches that somebody ran: not as many in full steps.
            other = int(self.is_full and exchange.content is ExchangeContent.STATISTICS)
            port = exchange.port(hop)
            transfer = Transfer(Role.SYNC, 0, other, port, hop.source, hop.destination)
            self.hops[transfer] = exchange, hop
            self._add(
                transfer,
                exchange.action(hop.source, hop.given),
                exchange.action(hop.destination, hop.taken),
            )

    def exchange_of(self, action: Action) -> Exchange:
        """The exchange that an action has a part in."""
        assert action.content is not None, f"{action} is of no exchange"
        return self.exchanges[action.content, action.stage]

    def is_coded(self, transfer: Transfer) -> bool:
        """Whether the codec of its link and role carries a transfer, rather than raw: values, their
        gradients, and what an exchange gives each receiver once (`Exchange.coded`)."""
        if transfer.role is Role.SYNC:
            return self.hops[transfer][0].coded
        return transfer.role in (Role.ACTIVATION, Role.ACTIVATION_GRAD)

    def alike(self, transfer: Transfer) -> tuple[Transfer, ...]:
        """The transfers to other peers that carry the same tensor, of which all receivers are to
        have the same bits, in the plan's order; of anything else only itself."""
        if not self.is_shared(transfer):
            return (transfer,)
        gives = self.gives(transfer.source, self.given_by[transfer])
        return tuple(t for t in gives if t.port == transfer.port and not t.is_local)

    def is_shared(self, transfer: Transfer) -> bool:
        """Whether a codec carries a tensor that is meant to be the same for several receivers."""
        if transfer.role is not Role.SYNC:
            return False
        exchange, hop = self.hops[transfer]
        return exchange.coded and exchange.is_shared(hop)
