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
                                                               of the loss taken by N>
activation_grad  VALUE<TARGET  B m@TARGET          B m@source  its gradient from stage TARGET;
                                                               hop of the source's visit
activation       eval:VALUE    E m@source          E m@target  a value, held-out microbatch m
                               E m@source          V>          one made behind the loss
sync             Sk>grad       S>@k, each holder   S+@k        a shard of its gradient of stage
                                                               k, to each holder (itself too)
sync             Sk>stats      S>@k, each holder   S<@k        batch statistics of the
                               that ran some                   microbatches that it ran, to each
                                                               other holder
sync             Sk+grad       S+@k, each holder   S<@k        its shard's sum over the holders,
                                                               in their order, to each other one
sync             Sk>ahead      S>@k, each holder   S<@k        its update of stage k, to each other
                                                               holder; all add up
sync             Sk>row        S>@k, each holder   S=@k        in rows: its shards of which the
                                                               member of its row answers there,
                                                               to each of the row (itself too)
sync             Sk=row        S=@k, each holder   S+@k        the row's sum of a shard, to the
                                                               shard's owner
sync             Sk+row        S+@k, each holder   S*@k        its shard's sum over the rows, in
                                                               their order, to who answers for it
                                                               in each
sync             Sk*row        S*@k, each holder   S<@k        totals of the shards for which it
                                                               answers, to each of its row
sync             Tg>STAGE      T>@g, first holder  T+@g, the   its stage's gradient of the tied
                               of each stage       group hub   parameter, after S
sync             Tg+           T+@g                T<@g        the sum, to each other peer that
                                                               holds one of the group's stages
sync             tg>STAGE      t>@g, i-th holder   t+@g, i-th  where stages step ahead: its own
                               of each stage       of the      gradient of the tied parameter,
                                                   lowest      before S
sync             tg+           t+@g                t<@g        the sum, to the i-th holder of each
                                                               other of the group's stages
sync             ug>STAGE ug+  as Tg>STAGE Tg+                 where stages step ahead: the updates
                                                               of all holders; their mean
sync             N>            N>, each peer       N+, the     squares of the gradients that it
                                                   hub         answers for; loss, weight and
                                                               metrics of its microbatches
sync             N+            N+                  N<          norm, weight, loss and metrics of
                                                               the step, to each other peer
sync             V>            V>, each holder of  V+, the     loss, weight and metrics of its
                               the loss that       hub         held-out microbatches
                               evaluated some

The hub is the first holder of the loss's stage, a tied group's hub the first holder of its lowest
stage. A peer answers in N> for the stages whose first holder it is, for a tied parameter only the
group's hub. Transfers of S, T, N and V have microbatch 0 and hop 0. A stage that trains nothing has
no Sk>grad; its S+ is in no list then. A stage that exchanges in rows (`StageSlot.rows`) has the
four transfers named row in place of Sk>grad and Sk+grad; `grid.py` says who answers for what. One
that steps ahead (`StageSlot.ahead`) has those named ahead in their place, and no S+.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from .cut import Stage, TiedGroup
from .grid import grid_of
from .plan import PeerId, Plan, Route
from .schedule import Action, Kind, evaluation_actions, hub_of, shares_gradient, step_actions
from .swaps import Crossing, crossings

__all__ = ["Flow", "Role", "Transfer"]


class Role(StrEnum):
    """What a frame is for; credits and priorities are kept per role."""

    ACTIVATION = "activation"
    ACTIVATION_GRAD = "activation_grad"
    SYNC = "sync"
    SNAPSHOT = "snapshot"
    PROBE = "probe"

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
    """Answers what an action takes and gives. Everything is computed once, from the plan."""

    def __init__(self, plan: Plan, stages: Sequence[Stage], tied: Sequence[TiedGroup]) -> None:
        self.plan = plan
        self.stages = tuple(stages)
        self.tied = tuple(tied)
        self.hub = hub_of(plan, stages)
        self.grids = tuple(map(grid_of, plan.stages))
        """By stage; None: its holders exchange each with each."""
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
        for stage in self.stages:
            self._sync(stage)
        for group in self.tied:
            self._tied(group)
        self._norm()

    def takes(self, peer: PeerId, action: Action) -> tuple[Transfer, ...]:
        """What must be in the peer's store before the action runs, in the order of reductions."""
        return tuple(self._takes[peer].get(action, ()))

    def gives(self, peer: PeerId, action: Action) -> tuple[Transfer, ...]:
        """What the action leaves in the peer's store, for others and for itself."""
        return tuple(self._gives[peer].get(action, ()))

    def made(self, transfer: Transfer) -> str:
        """`Transfer.value` as the stage that gives it calls it: another name only where stages have
        changed places (`swaps.py`)."""
        return self._made.get(transfer) or transfer.value

    def involved(self, peer: PeerId) -> tuple[Action, ...]:
        """Every action of the peer, training and evaluation, that takes or gives something."""
        return tuple(dict.fromkeys((*self._takes[peer], *self._gives[peer])))

    def actions(self, peer: PeerId) -> tuple[Action, ...]:
        """The peer's list for one training step."""
        return self._training[peer]

    def evaluation_actions(self, peer: PeerId) -> tuple[Action, ...]:
        """The peer's list for one evaluation; empty when the plan has none."""
        return self._evaluation[peer]

    @cached_property
    def _training(self) -> Mapping[PeerId, tuple[Action, ...]]:
        return step_actions(self.plan, self.stages, self.tied)

    @cached_property
    def _evaluation(self) -> Mapping[PeerId, tuple[Action, ...]]:
        return evaluation_actions(self.plan, self.stages)

    def _add(self, transfer: Transfer, giver: Action, taker: Action) -> None:
        assert transfer not in self.taken_by, f"{transfer} is given twice"
        self.given_by[transfer] = giver
        self.taken_by[transfer] = taker
        self._gives[transfer.source].setdefault(giver, []).append(transfer)
        self._takes[transfer.destination].setdefault(taker, []).append(transfer)

    def _visits(self, m: int, route: Route, *, training: bool) -> None:
        """Values forward and gradients back, for one microbatch."""
        hop = {visit.stage: i for i, visit in enumerate(route)}
        peer = {visit.stage: visit.peer for visit in route}
        kind, prefix = (Kind.FORWARD, "") if training else (Kind.EVALUATE, "eval:")
        order = tuple(hop)
        if order not in self._crossings:
            self._crossings[order] = crossings(self.stages, route)
        for crossing in self._crossings[order]:
            s, made, t, taken, grad, _ = crossing
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
            return Action(Kind.EVAL_GIVE)
        if self.stages[target].has_backward:
            return Action(Kind.BACKWARD, m, target)
        return Action(Kind.NORM_GIVE)

    def _exchange(
        self, port: str, source: PeerId, destination: PeerId, giver: Action, taker: Action
    ) -> None:
        self._add(Transfer(Role.SYNC, 0, 0, port, source, destination), giver, taker)

    def _sync(self, stage: Stage) -> None:
        k = stage.index
        holders = self.plan.stages[k].holders
        if len(holders) < 2:
            return
        give, add, take = (
            Action(kind, stage=k) for kind in (Kind.SYNC_GIVE, Kind.SYNC_COMBINE, Kind.SYNC_TAKE)
        )
        others = [(a, b) for a in holders for b in holders if a != b]
        if (grid := self.grids[k]) and shares_gradient(stage):
            for port, a, b, giver, taker in grid.transfers():
                self._exchange(f"S{k}{port}", a, b, Action(giver, 0, k), Action(taker, 0, k))
        elif shares_gradient(stage) and self.plan.stages[k].ahead:
            for a, b in others:
                self._exchange(f"S{k}>ahead", a, b, give, take)
        elif shares_gradient(stage):
            for a in holders:
                for b in holders:
                    self._exchange(f"S{k}>grad", a, b, give, add)
            for a, b in others:
                self._exchange(f"S{k}+grad", a, b, add, take)
        if stage.statistics:
            ran = {visit.peer for route in self.plan.routes for visit in route if visit.stage == k}
            for a, b in others:
                if a in ran:
                    self._exchange(f"S{k}>stats", a, b, give, take)

    def _tied(self, group: TiedGroup) -> None:
        g = group.index
        holders = [self.plan.stages[i].holders for i in group.stages]
        hub = holders[0][0]
        give, add, take = (
            Action(kind, stage=g) for kind in (Kind.TIED_GIVE, Kind.TIED_COMBINE, Kind.TIED_TAKE)
        )
        port = self.tied_port(g)
        for stage, at in zip(group.stages, holders, strict=True):
            self._exchange(f"{port}>{stage}", at[0], hub, give, add)
        for peer in dict.fromkeys(p for at in holders for p in at):
            if peer != hub:
                self._exchange(f"{port}+", hub, peer, add, take)
        if self.steps_ahead(g):
            self._pairs(group, holders)

    def _pairs(self, group: TiedGroup, holders: Sequence[Sequence[PeerId]]) -> None:
        g = group.index
        give, add, take = (
            Action(kind, stage=g) for kind in (Kind.PAIR_GIVE, Kind.PAIR_COMBINE, Kind.PAIR_TAKE)
        )
        for stage, at in zip(group.stages, holders, strict=True):
            for peer, hub in zip(at, holders[0], strict=True):
                self._exchange(f"t{g}>{stage}", peer, hub, give, add)
        pairs = {(hub, peer) for at in holders for peer, hub in zip(at, holders[0], strict=True)}
        for hub, peer in sorted(pairs):
            if peer != hub:
                self._exchange(f"t{g}+", hub, peer, add, take)

    def steps_ahead(self, group: int) -> bool:
        """Whether the stages of a tied group exchange updates (`StageSlot.ahead`)."""
        return self.plan.stages[self.tied[group].stages[0]].ahead

    def tied_port(self, group: int) -> str:
        """What the ports of a tied group's exchange after S begin with."""
        return f"{'u' if self.steps_ahead(group) else 'T'}{group}"

    def _norm(self) -> None:
        give, add, take = map(Action, (Kind.NORM_GIVE, Kind.NORM_COMBINE, Kind.NORM_TAKE))
        for peer in self.plan.peers:
            self._exchange("N>", peer, self.hub, give, add)
            if peer != self.hub:
                self._exchange("N+", self.hub, peer, add, take)
        loss = next(s.index for s in self.stages if s.makes_loss)
        ran = {v.peer for route in self.plan.evaluation_routes for v in route if v.stage == loss}
        for peer in self.plan.stages[loss].holders:
            if peer in ran:
                self._exchange(
                    "V>", peer, self.hub, Action(Kind.EVAL_GIVE), Action(Kind.EVAL_COMBINE)
                )
