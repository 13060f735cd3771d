"""The actions S, T, N and V of a peer, on the tensors of its stages; who gives what to whom stands
in `dag/flow.py`, the arithmetic in `sync/`. Also what every transfer must look like: both ends of a
transfer know its spec from the plan and the graph alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from ..dag.cut import Stage
from ..dag.execute import StageExecutor
from ..dag.flow import Flow, Role, Transfer
from ..dag.graph import Graph, TensorSpec
from ..dag.plan import PeerId
from ..dag.schedule import Action, Kind, shares_gradient
from .optimizer import StageOptimizer
from .sync import norm
from .sync.ahead import Ahead
from .sync.allreduce import (
    Layout,
    add,
    gathered,
    grads_of,
    scattered,
    set_grads,
    shards_of,
    vector_of,
)
from .sync.statistics import Statistics

__all__ = ["Echo", "Exchange", "Held", "Taken", "Wire"]

Echo = Callable[[Transfer, Tensor], Tensor]
"""What the destination of a transfer will have of a tensor: it loses what the codec loses."""

Taken = Sequence[tuple[Transfer, "Tensor | None"]]
"""What an action takes, in the order of reductions."""

Made = dict[str, "Tensor | Mapping[PeerId, Tensor]"]
"""What an action gives, by port: one tensor for all destinations, or one for each."""

_SYNC = re.compile(
    r"S(?P<stage>\d+)(?P<part>[>+]grad|>ahead|[>=+*]row|>stats)|[Ttu](?P<group>\d+)(>\d+|\+)|[NV]>|N\+"
)


@dataclass(eq=False)
class Held:
    """A stage on this peer with what trains it."""

    stage: Stage
    executor: StageExecutor
    optimizer: StageOptimizer
    collected: dict[int, Mapping[str, Tensor]] = field(default_factory=dict)
    """Batch statistics of this step by microbatch, from here and from other holders."""
    ahead: Ahead | None = None
    """Where holders exchange updates in place of gradients."""

    def parameters(self) -> dict[str, Tensor]:
        """The weights by name, as all holders have them, wherever this one is training."""
        whole: dict[str, Tensor] = dict(self.executor.parameters)
        return whole if self.ahead is None else whole | dict(self.ahead.weights())


class Wire:
    """The spec of every transfer of a plan. `graph` is bound and full."""

    def __init__(self, flow: Flow, graph: Graph) -> None:
        self.flow, self.graph = flow, graph
        self.metrics = len(graph.metrics)
        self.loss_stage = next(s.index for s in flow.stages if s.makes_loss)
        updates = {b.name: b.update for b in graph.buffers}
        self._layouts = [
            Layout(tuple((n, graph.spec[f"param:{n}"]) for n in s.trainable)) for s in flow.stages
        ]
        self._statistics = [
            Statistics(
                tuple(
                    (name, graph.spec[rule.value])
                    for name in s.updates
                    if (rule := updates[name]) is not None and rule.rule == "ema"
                )
            )
            for s in flow.stages
        ]

    def layout(self, stage: int) -> Layout:
        return self._layouts[stage]

    def tied_layout(self, group: int) -> Layout:
        name = self.flow.tied[group].parameter
        return Layout(((name, self.graph.spec[f"param:{name}"]),))

    def statistics(self, stage: int) -> Statistics:
        return self._statistics[stage]

    def microbatches(self, peer: str, stage: int, *, training: bool = True) -> tuple[int, ...]:
        """Those that this peer runs through the stage, ascending."""
        return tuple(self._run[training].get((peer, stage), ()))

    @cached_property
    def _run(self) -> dict[bool, dict[tuple[str, int], list[int]]]:
        """By training or not: by peer and stage, the microbatches that are run through it there."""
        plan = self.flow.plan
        found: dict[bool, dict[tuple[str, int], list[int]]] = {}
        for training, routes in ((True, plan.routes), (False, plan.evaluation_routes)):
            mine = found[training] = {}
            for m, route in enumerate(routes):
                for visit in dict.fromkeys(route):
                    mine.setdefault((visit.peer, visit.stage), []).append(m)
        return found

    def spec(self, transfer: Transfer) -> TensorSpec:
        """What must be sent for a transfer of this plan, before encoding."""
        if transfer.role in (Role.ACTIVATION, Role.ACTIVATION_GRAD):
            return self.graph.spec[transfer.value]
        match = _SYNC.fullmatch(transfer.port)
        assert match is not None, f"{transfer.port} is no port of an exchange"
        if match["group"]:
            return self.tied_layout(int(match["group"])).shard_spec(1)
        if match["stage"]:
            k = int(match["stage"])
            if match["part"] == ">stats":
                return self.statistics(k).spec(len(self.microbatches(transfer.source, k)))
            if match["part"] == ">ahead":
                return self.layout(k).shard_spec(1)
            shard = self.layout(k).shard_spec(len(self.flow.plan.stages[k].holders))
            if (grid := self.flow.grids[k]) is None:
                return shard
            shards = grid.shards(match["part"], transfer.source, transfer.destination)
            return TensorSpec((shards * shard.elements,), shard.dtype)
        if transfer.port == "N+":
            return norm.total_spec(self.metrics)
        training = transfer.port == "N>"
        ran = self.microbatches(transfer.source, self.loss_stage, training=training)
        return norm.scores_spec(len(ran), self.metrics, squares=training)


class Exchange:
    """Carries out the exchanges of one peer. Owns what lies between two actions of a step."""

    def __init__(
        self, peer: PeerId, wire: Wire, held: Mapping[int, Held], device: torch.device
    ) -> None:
        self.peer, self.wire, self.held, self.device = peer, wire, held, device
        self._echo: Echo = lambda _, tensor: tensor
        self.flow = wire.flow
        self.total: norm.Total | None = None
        """Of the last N or V that came to an end here."""
        self._shards: dict[int, Tensor] = {}
        """This peer's own shard of each stage's sum, between S+ and S<; where it steps ahead, its
        own update, from S> on."""
        self._reported: dict[tuple[bool, int], dict[str, Tensor]] = {}
        """Loss, weight and metrics by (training, microbatch) and value."""

    def run(
        self, action: Action, taken: Taken, echo: Echo | None = None
    ) -> dict[Transfer, Tensor | None]:
        """Carries the action out; returns what it gives. `echo`: of this step; None: no codec loses
        anything."""
        if echo is not None:
            self._echo = echo
        made = _RUN[action.kind](self, action, taken)
        found: dict[Transfer, Tensor | None] = {}
        for transfer in self.flow.gives(self.peer, action):
            given = made[transfer.port]
            found[transfer] = given if isinstance(given, Tensor) else given[transfer.destination]
        return found

    def report(self, training: bool, microbatch: int, values: Mapping[str, Tensor]) -> None:
        """Remembers those of the values that are loss, weight or metrics of the microbatch."""
        graph = self.wire.graph
        wanted = {graph.loss, graph.weight, *(v for _, v in graph.metrics)}
        mine = self._reported.setdefault((training, microbatch), {})
        mine.update({name: value for name, value in values.items() if name in wanted})

    def weight_of(self, microbatch: int) -> float:
        """The weight of a training microbatch; 1 for a model that gives none."""
        name = self.wire.graph.weight
        return float(self._reported[True, microbatch][name]) if name else 1.0

    def clear(self) -> None:
        """Forgets everything of the step or evaluation that ended."""
        self._shards.clear()
        self._reported.clear()

    # ------------------------------------------------------------ S

    def _holders(self, stage: int) -> tuple[PeerId, ...]:
        return self.flow.plan.stages[stage].holders

    def _sync_give(self, action: Action, taken: Taken) -> Made:
        k, held = action.stage, self.held[action.stage]
        holders, grid = self._holders(k), self.flow.grids[k]
        n, made = len(holders), Made()
        if held.ahead is not None:
            vector = vector_of(self.wire.layout(k), _grads(held), self.device)
            self._shards[k] = made[f"S{k}>ahead"] = vector
        elif shares_gradient(held.stage):
            vector = vector_of(self.wire.layout(k), _grads(held), self.device, n)
            if grid is None:
                made[f"S{k}>grad"] = dict(zip(holders, shards_of(vector, n), strict=True))
            else:
                members = grid.row(self.peer)
                made[f"S{k}>row"] = {m: gathered(vector, n, grid.answers[m]) for m in members}
        if held.stage.statistics:
            found = [held.collected[m] for m in self.wire.microbatches(self.peer, k)]
            made[f"S{k}>stats"] = self.wire.statistics(k).pack(found, self.device)
        return made

    def _sync_row(self, action: Action, taken: Taken) -> Made:
        grid = self.flow.grids[action.stage]
        assert grid is not None, f"{action} in a stage without rows"
        answers = grid.answers[self.peer]
        sums = shards_of(add([_there(t, v) for t, v in taken]), len(answers))
        owners = [grid.holders[shard] for shard in answers]
        return {f"S{action.stage}=row": dict(zip(owners, sums, strict=True))}

    def _sync_relay(self, action: Action, taken: Taken) -> Made:
        totals = [_there(t, v).to(self.device) for t, v in taken]
        return {f"S{action.stage}*row": torch.cat(totals)}

    def _sync_combine(self, action: Action, taken: Taken) -> Made:
        k = action.stage
        if self.flow.grids[k] is not None:
            return {f"S{k}+row": add([_there(t, v) for t, v in taken])}
        by_holder = {t.source: _there(t, v) for t, v in taken}
        self._shards[k] = add([by_holder[h] for h in self._holders(k)])
        return {f"S{k}+grad": self._shards[k]}

    def _sync_take(self, action: Action, taken: Taken) -> Made:
        k, held = action.stage, self.held[action.stage]
        shards = {t.source: _there(t, v) for t, v in taken if t.port == f"S{k}+grad"}
        if held.ahead is not None:
            vectors = {t.source: _there(t, v) for t, v in taken if t.port == f"S{k}>ahead"}
            gives = self.flow.gives(self.peer, Action(Kind.SYNC_GIVE, stage=k))
            mine = next(t for t in gives if t.port == f"S{k}>ahead")
            vectors[self.peer] = self._echo(mine, self._shards.pop(k))
            vector = add([vectors[h].to(self.device) for h in self._holders(k)])
            set_grads(held.executor.parameters, grads_of(self.wire.layout(k), vector))
        elif k in self._shards:
            # What it sent, as the others have it: all holders end with the same bits.
            others = self.flow.gives(self.peer, Action(Kind.SYNC_COMBINE, stage=k))
            shards[self.peer] = self._echo(others[0], self._shards.pop(k))
            vector = torch.cat([shards[h].to(self.device) for h in self._holders(k)])
            set_grads(held.executor.parameters, grads_of(self.wire.layout(k), vector))
        rows = {t.source: _there(t, v) for t, v in taken if t.port == f"S{k}*row"}
        if rows and (grid := self.flow.grids[k]):
            totals = [(grid.answers[m], total.to(self.device)) for m, total in rows.items()]
            vector = scattered(totals, len(grid.holders))
            set_grads(held.executor.parameters, grads_of(self.wire.layout(k), vector))
        for transfer, vector_ in taken:
            if transfer.port == f"S{k}>stats":
                ran = self.wire.microbatches(transfer.source, k)
                unpacked = self.wire.statistics(k).unpack(_there(transfer, vector_), len(ran))
                held.collected.update(zip(ran, unpacked, strict=True))
        return {}

    # ------------------------------------------------------------ T

    def _pair_give(self, action: Action, taken: Taken) -> Made:
        group, layout = self.flow.tied[action.stage], self.wire.tied_layout(action.stage)
        return {
            f"t{group.index}>{s}": vector_of(layout, _grads(self.held[s]), self.device)
            for s in group.stages
            if s in self.held
        }

    def _pair_combine(self, action: Action, taken: Taken) -> Made:
        group, by_port = self.flow.tied[action.stage], {t.port: _there(t, v) for t, v in taken}
        total = add([by_port[f"t{group.index}>{s}"] for s in group.stages])
        self._set_tied(group.index, total)
        return {f"t{group.index}+": total}

    def _tied_give(self, action: Action, taken: Taken) -> Made:
        group, port = self.flow.tied[action.stage], self.flow.tied_port(action.stage)
        layout = self.wire.tied_layout(group.index)
        return {
            f"{port}>{s}": vector_of(layout, _grads(self.held[s]), self.device)
            for s in group.stages
            if self._holders(s)[0] == self.peer
        }

    def _tied_combine(self, action: Action, taken: Taken) -> Made:
        group, port = self.flow.tied[action.stage], self.flow.tied_port(action.stage)
        by_port = {t.port: _there(t, v) for t, v in taken}
        total = add([by_port[f"{port}>{s}"] for s in group.stages])
        if self.flow.steps_ahead(group.index):
            total /= len(group.stages)  # each is of the whole gradient
        others = self.flow.gives(self.peer, action)
        self._set_tied(group.index, self._echo(others[0], total) if others else total)
        return {f"{port}+": total}

    def _tied_take(self, action: Action, taken: Taken) -> Made:
        ((transfer, total),) = taken
        self._set_tied(action.stage, _there(transfer, total))
        return {}

    def _set_tied(self, index: int, total: Tensor) -> None:
        """Each copy gets a gradient of its own, since the update divides it in place."""
        layout = self.wire.tied_layout(index)
        for stage in self.flow.tied[index].stages:
            if stage in self.held:
                own = total.to(self.device, copy=True)
                set_grads(self.held[stage].executor.parameters, grads_of(layout, own))

    # ------------------------------------------------------------ N and V

    def _norm_give(self, action: Action, taken: Taken) -> Made:
        self._report_late(True, taken)
        lowest = {g.parameter: g.stages[0] for g in self.flow.tied}
        mine = [h for k, h in self.held.items() if self._holders(k)[0] == self.peer]
        grads = [
            grad
            for h in mine
            if h.ahead is None
            for name, grad in _grads(h).items()
            if lowest.get(name, h.stage.index) == h.stage.index
        ]
        squares = norm.squares_of(grads, self.device)
        for h in mine:
            if h.ahead is not None:
                counted = [
                    n for n in h.stage.trainable if lowest.get(n, h.stage.index) == h.stage.index
                ]
                squares += h.ahead.square(counted).to(self.device)
        return {"N>": norm.pack(squares, self._scores(True), self.device)}

    def _norm_combine(self, action: Action, taken: Taken) -> Made:
        self.total = norm.combine(self._parts(True, taken), self.wire.metrics, squares=True)
        return {"N+": self.total.pack(self.device)}

    def _norm_take(self, action: Action, taken: Taken) -> Made:
        ((transfer, vector),) = taken
        self.total = norm.Total.unpack(_there(transfer, vector))
        return {}

    def _eval_give(self, action: Action, taken: Taken) -> Made:
        self._report_late(False, taken)
        return {"V>": norm.pack(None, self._scores(False), self.device)}

    def _eval_combine(self, action: Action, taken: Taken) -> Made:
        self.total = norm.combine(self._parts(False, taken), self.wire.metrics, squares=False)
        return {}

    def _report_late(self, training: bool, taken: Taken) -> None:
        for transfer, value in taken:
            self.report(training, transfer.microbatch, {transfer.value: _there(transfer, value)})

    def _scores(self, training: bool) -> list[norm.Score]:
        graph, found = self.wire.graph, list[norm.Score]()
        for m in self.wire.microbatches(self.peer, self.wire.loss_stage, training=training):
            values = self._reported[training, m]
            weight = values[graph.weight] if graph.weight else 1.0
            found.append((values[graph.loss], weight, *(values[v] for _, v in graph.metrics)))
        return found

    def _parts(self, training: bool, taken: Taken) -> list[tuple[Sequence[int], Tensor]]:
        """In the order of the plan's peers, whatever order they came in."""
        by_peer = {t.source: _there(t, v) for t, v in taken}
        stage = self.wire.loss_stage
        return [
            (self.wire.microbatches(p, stage, training=training), by_peer[p])
            for p in self.flow.plan.peers
            if p in by_peer
        ]


_RUN: dict[Kind, Callable[[Exchange, Action, Taken], Made]] = {
    Kind.SYNC_GIVE: Exchange._sync_give,
    Kind.SYNC_ROW: Exchange._sync_row,
    Kind.SYNC_COMBINE: Exchange._sync_combine,
    Kind.SYNC_RELAY: Exchange._sync_relay,
    Kind.SYNC_TAKE: Exchange._sync_take,
    Kind.PAIR_GIVE: Exchange._pair_give,
    Kind.PAIR_COMBINE: Exchange._pair_combine,
    Kind.PAIR_TAKE: Exchange._tied_take,
    Kind.TIED_GIVE: Exchange._tied_give,
    Kind.TIED_COMBINE: Exchange._tied_combine,
    Kind.TIED_TAKE: Exchange._tied_take,
    Kind.NORM_GIVE: Exchange._norm_give,
    Kind.NORM_COMBINE: Exchange._norm_combine,
    Kind.NORM_TAKE: Exchange._norm_take,
    Kind.EVAL_GIVE: Exchange._eval_give,
    Kind.EVAL_COMBINE: Exchange._eval_combine,
}
"""Not by instance: one that held its own methods would keep its tensors until a garbage
collection."""


def _grads(held: Held) -> dict[str, Tensor | None]:
    return {n: held.executor.parameters[n].grad for n in held.stage.trainable}


def _there(transfer: Transfer, value: Tensor | None) -> Tensor:
    assert value is not None, f"{transfer} must not be absent"
    return value
