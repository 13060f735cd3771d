"""What a ghost keeps of one assignment: its stages' hashes, the values between actions, its part of
the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ...dag.exchange.collective import Hop
from ...dag.exchange.wiring import Exchange
from ...dag.execute.neighbour import Rebuild
from ...dag.plan.action import Action, ExchangeContent
from ...dag.plan.visit_lists import halved
from ...dag.schedule.flow import Flow, Role, Transfer
from ...peer.compute.order import BuildOrder
from ...peer.compute.rebuilt import recipe
from ...peer.rounds.local import LocalSteps
from ...peer.rounds.work import RoundWork
from .ghost_clients import GhostClients
from .hashes import Hash
from .plan import IN_SHARDS, GhostPlan, Weighed
from .rounds import GhostVector
from .stage_hash import HeldHash

__all__ = ["NOTHING", "ActionTransfers", "GhostAssignment", "Local", "Store"]

Local = tuple[int, int, str, str, str]
"""Microbatch, hop, port, source and destination of a transfer: `transfer[1:]`, or of its frame
`key[4:]`."""

Store = dict[Local, Hash]
"""The values of one step."""


class ActionTransfers(NamedTuple):
    """An action's transfers, with where each lies in the store."""

    takes: tuple[tuple[Transfer, Local], ...]
    gives: tuple[tuple[Transfer, Local], ...]
    exchange: Exchange | None = None
    """That of an action of an exchange."""
    came: tuple[tuple[Hop, Local], ...] = ()
    """In place of `takes`, what came of it."""
    goes: tuple[tuple[Hop, Local], ...] = ()


NOTHING = ActionTransfers((), ())
"""The transfers of an action that moves nothing."""


class GhostAssignment:
    """One assignment on one peer."""

    def __init__(self, order: BuildOrder, shared: GhostPlan) -> None:
        self.order, self.shared = order, shared
        flow, peer = shared.flow, order.peer
        self.held = {k: HeldHash(shared.linear(k)) for k in shared.plan.stages_of(peer)}
        self.coming: dict[Local, Weighed] = {}
        self.going: dict[Local, Weighed] = {}
        self.parts = self._parts(flow)
        self._in_full = {} if flow.full is None else self._parts(flow.full)
        self.store: dict[int, Store] = {}
        """By step."""
        self.reported: dict[tuple[bool, int], dict[str, int]] = {}
        """Results by (training, microbatch)."""
        self.words = frozenset(
            at
            for part in (*self.parts.values(), *self._in_full.values())
            for _, at in part.came
            if part.exchange is not None and part.exchange.content in _IN_WORDS
        )
        """What comes as words, not as one number."""
        self.total = 0
        self.clips = order.training.train.clip > 0 and not shared.plan.without_norm
        """Whether updates go by the totals of the step."""
        ran = {t: shared.wire.microbatches(peer, shared.wire.loss_stage, training=t) for t in _BOTH}
        self.ran = ran if shared.wire.loss_stage in self.held else dict.fromkeys(_BOTH, ())
        lowest = {g.parameter: g.stages[0] for g in shared.tied}
        self.answers = {
            k: tuple(p for p in held.linear.trained if lowest.get(p, k) == k)
            for k, held in self.held.items()
            if shared.plan.stages[k].holders[0] == peer
        }
        """By stage that it answers for in the norm: the parameters."""
        memory, states = [shared.memory[k] for k in self.held], order.training.train.state_bytes
        self.standing_bytes = sum(stage.standing(states) for stage in memory)
        self.apart = halved(flow.actions(peer))
        """The stages whose weights' gradients are apart."""
        self._kept = [
            (shared.memory[k].kept, shared.waiting_bytes(k) if k in self.apart else 0, held)
            for k, held in self.held.items()
        ]
        """What a microbatch that went forward keeps in each stage, and one whose weights' gradients
        wait, bytes."""
        self.snapshot_bytes = sum(stage.snapshot(states) for stage in memory)
        self.rounds: RoundWork[Hash] | None = None
        """What it does between replicas, where the run has rounds."""

    def _parts(self, flow: Flow) -> dict[Action, ActionTransfers]:
        """The transfers of this peer's actions in one kind of step; notes what comes and goes."""
        found: dict[Action, ActionTransfers] = {}
        peer = self.order.peer
        for action in flow.involved(peer):
            takes = tuple((t, t[1:]) for t in flow.takes(peer, action))
            gives = tuple((t, t[1:]) for t in flow.gives(peer, action))
            if action.content is None:
                found[action] = ActionTransfers(takes, gives)
            else:
                late = tuple((t, at) for t, at in takes if t.role is not Role.SYNC)
                came = tuple((flow.hops[t][1], at) for t, at in takes if t.role is Role.SYNC)
                goes = tuple((flow.hops[t][1], at) for t, at in gives)
                exchange = flow.exchange_of(action)
                found[action] = ActionTransfers(late, gives, exchange, came, goes)
            self.coming |= {at: self.shared.weighed(t) for t, at in takes if not t.is_local}
            self.going |= {at: self.shared.weighed(t) for t, at in gives if not t.is_local}
        return found

    def part(self, step: int, action: Action) -> ActionTransfers:
        """The transfers of an action of a step."""
        full = self.shared.flow.at(step).is_full
        return (self._in_full if full else self.parts).get(action, NOTHING)

    def resume(self, states: Mapping[str, int], vector: GhostVector | None) -> None:
        """Goes on from what snapshots have, or begins. `vector`: of a run with rounds."""
        for held in self.held.values():
            held.resume(states)
        if vector is not None:
            training, plan = self.order.training, self.shared.plan
            of_run = training.train.batch // plan.microbatch_size
            local = LocalSteps(len(plan.routes), of_run)
            if vector.settings.cohorts:
                values = frozenset(e.value for e in vector.vector.entries)
                local = GhostClients(training, self.held, values)
            self.rounds = vector.rounds(local, self.order.peer, self.held)
            self.rounds.load(states)
            self.standing_bytes += self.rounds.size_bytes

    def place(self, step: int, microbatch: int) -> tuple[int, int]:
        """(step, microbatch) of the run that a microbatch here is."""
        return self.rounds.local.place(step, microbatch) if self.rounds else (step, microbatch)

    def position(self, step: int) -> float:
        """Steps of the run before this one, in the learning rate's schedule."""
        return self.rounds.local.position(step) if self.rounds else step

    def first_of(self, stage: int) -> bool:
        return self.shared.plan.stages[stage].holders[0] == self.order.peer

    def recipe(self, lost: Sequence[int]) -> Rebuild:
        """How lost stages are made anew."""
        shared, order = self.shared, self.order
        return recipe(shared.graph, shared.stages, shared.plan, order.rebuilt, lost)

    def live_bytes(self) -> int:
        total = self.standing_bytes
        for kept_bytes, waiting_bytes, held in self._kept:
            total += kept_bytes * len(held.live) + waiting_bytes * len(held.waiting)
        return total


_BOTH = (True, False)
_IN_WORDS = frozenset({*IN_SHARDS, ExchangeContent.STATISTICS})
