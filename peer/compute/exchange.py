"""The exchanges of a peer, on the tensors of its stages; who gives what to whom stands in
`dag/exchange/` and `dag/schedule/flow.py`, the arithmetic in `sync/`. Also what every transfer must
look like: both ends of a transfer know its spec from the plan and the graph alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from ...dag.exchange import engine
from ...dag.exchange.collective import Hop
from ...dag.exchange.engine import VectorSpace
from ...dag.exchange.wiring import Exchange
from ...dag.execute.execute import Forwarded, StageExecutor
from ...dag.execute.stage_visits import Grads, StageVisits
from ...dag.ir.graph import Graph, TensorSpec
from ...dag.plan.action import Action, ExchangeContent, Kind
from ...dag.plan.cut import Stage
from ...dag.plan.full_steps import FullSteps
from ...dag.plan.plan import PeerId
from ...dag.schedule.flow import Flow, Role, Transfer
from ..optimizers.loss_scaler import LossScaler
from ..sync import norm
from ..sync.gradient_vector import Layout, TensorSpace, add, grads_of, set_grads, vector_of
from ..sync.statistics import Statistics
from ..sync.strategy import Strategy

__all__ = ["Echo", "Exchanges", "LocalStage", "Taken", "TransferSpecs", "present"]

Echo = Callable[[Transfer, Tensor], Tensor]
"""What the destination of a transfer will have of a tensor: it loses what the codec loses."""

Taken = Sequence[tuple[Transfer, "Tensor | None"]]
"""What an action takes, in the order of reductions."""

Inputs = Mapping[str, Tensor]


@dataclass(eq=False)
class LocalStage:
    """A stage on this peer with what trains it."""

    stage: Stage
    executor: StageExecutor
    strategy: Strategy
    visits: StageVisits
    in_full: StageVisits | None = None
    """In `full_steps`; None: there are none."""
    full_steps: FullSteps | None = None
    collected: dict[int, Mapping[str, Tensor]] = field(default_factory=dict)
    """Batch statistics of this step by microbatch, from here and from other holders."""

    def visits_at(self, step: int) -> StageVisits:
        """Return the visits of a step of the run."""
        full = self.full_steps is not None and self.full_steps.has(step)
        return self.in_full if full and self.in_full is not None else self.visits

    def forward(
        self, place: tuple[int, int], microbatch: int, ports: Inputs, inputs: Inputs
    ) -> Forwarded:
        """Run the stage on a microbatch. `place`: its step and number in the run."""
        found = self.executor.forward(*place, ports, inputs)
        if self.stage.statistics:
            self.collected[microbatch] = found.updates
        if (scaled := self.visits_at(place[0]).scaled) is None:
            return found
        return Forwarded(scaled.forward(ports, found.ports), found.results, found.updates)

    def backward(
        self, place: tuple[int, int], microbatch: int, grads: Grads, weight: float
    ) -> Mapping[str, Tensor | None]:
        """Return the gradients of what came in; those of weights are added up, or left for
        `backward_weight`."""
        executor, scaled = self.executor, self.visits_at(place[0]).scaled
        seeds = scaled.seeds(grads) if scaled else grads
        backward = executor.backward_input if executor.split else executor.backward
        back = backward(*place, seeds, weight)
        if not executor.split:
            self._renormalise(place[0], microbatch)
        return scaled.back(grads, back) if scaled else back

    def backward_weight(self, place: tuple[int, int], microbatch: int) -> None:
        self.executor.backward_weight(*place)
        self._renormalise(place[0], microbatch)

    def apply_statistics(self, step: int) -> None:
        """Let buffers take the batch statistics of the step, in the order of microbatches."""
        visited = self.visits_at(step).visited
        self.executor.apply_updates([self.collected.get(m, {}) for m in visited])

    def _renormalise(self, step: int, microbatch: int) -> None:
        """Once the last microbatch is through, its weights' gradients included."""
        visits = self.visits_at(step)
        if microbatch == visits.last and visits.gradients != 1:
            for parameter in self.executor.parameters.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(visits.gradients)

    def parameters(self) -> dict[str, Tensor]:
        """The weights by name, as all holders have them, wherever this one is training."""
        return {**self.executor.parameters, **self.strategy.weights()}

    def exported(self) -> dict[str, Tensor]:
        """The weights by name as they are evaluated and exported: with `train.ema`, their mean."""
        return self.parameters() | self.strategy.holder.optimizer.averages()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Has what is exported in the parameters meanwhile."""
        means = self.strategy.holder.optimizer.averages()
        kept = {name: self.executor.parameters[name].data for name in means}
        try:
            for name, mean in means.items():
                self.executor.parameters[name].data = mean
            yield
        finally:
            for name, tensor in kept.items():
                self.executor.parameters[name].data = tensor


_SUMS = {ExchangeContent.GRADIENT: 0, ExchangeContent.DELTA: 0, ExchangeContent.SECOND: 1}
"""What strategies exchange, and which of their sums in a step it is."""


class TransferSpecs:
    """The spec of every transfer of a plan. `graph` is bound and full."""

    def __init__(self, flow: Flow, graph: Graph) -> None:
        self.flow, self.graph = flow, graph
        self.metrics = len(graph.metrics)
        self.loss_stage = next(s.index for s in flow.stages if s.makes_loss)
        updates = {b.name: b.update for b in graph.buffers}
        self.layouts = [
            Layout(tuple((n, graph.spec[f"param:{n}"]) for n in s.trainable)) for s in flow.stages
        ]
        """By stage."""
        self.statistics = [
            Statistics(
                tuple(
                    (name, graph.spec[rule.value])
                    for name in s.updates
                    if (rule := updates[name]) is not None and rule.rule == "ema"
                )
            )
            for s in flow.stages
        ]

    def tied_layout(self, group: int) -> Layout:
        name = self.flow.tied[group].parameter
        return Layout(((name, self.graph.spec[f"param:{name}"]),))

    def microbatches(
        self, peer: str, stage: int, *, training: bool = True, full: bool = False
    ) -> tuple[int, ...]:
        """Return the microbatches that this peer runs through the stage, ascending; `full`: in a
        full step."""
        return tuple(self._run[training, full].get((peer, stage), ()))

    @cached_property
    def _run(self) -> dict[tuple[bool, bool], dict[tuple[str, int], list[int]]]:
        """By training or not and full or not: by peer and stage, the microbatches that are run
        through it there."""
        plan = self.flow.plan
        full = plan if self.flow.full is None else self.flow.full.plan
        found: dict[tuple[bool, bool], dict[tuple[str, int], list[int]]] = {}
        for kind, routes in (
            ((True, False), plan.routes),
            ((True, True), full.routes),
            ((False, False), plan.evaluation_routes),
        ):
            mine = found[kind] = {}
            for m, route in enumerate(routes):
                for visit in dict.fromkeys(route):
                    mine.setdefault((visit.peer, visit.stage), []).append(m)
        return found

    def spec(self, transfer: Transfer) -> TensorSpec:
        """What must be sent for a transfer of this plan, before encoding."""
        if transfer.role in (Role.ACTIVATION, Role.ACTIVATION_GRAD):
            return self.graph.spec[transfer.value]
        exchange, hop = self.flow.hops[transfer]
        k, content = exchange.index, exchange.content
        if content is ExchangeContent.STATISTICS:
            ran = self.microbatches(hop.source, k, full=transfer.hop > 0)
            return self.statistics[k].spec(len(ran))
        if content in (ExchangeContent.NORM, ExchangeContent.SCORES):
            if hop.total:
                return norm.total_spec(self.metrics)
            training = content is ExchangeContent.NORM
            ran = self.microbatches(hop.source, self.loss_stage, training=training)
            return norm.scores_spec(len(ran), self.metrics, squares=training)
        return self.exchanged(exchange).spec(exchange.elements(hop, self.elements(exchange)))

    def exchanged(self, exchange: Exchange) -> Layout:
        """Where each parameter lies in what an exchange of gradients or updates carries."""
        if exchange.content in _SUMS:
            return self.layouts[exchange.index]
        return self.tied_layout(exchange.index)

    def elements(self, exchange: Exchange) -> int:
        """How many numbers it carries: of a stage as many as the strategy makes of them."""
        layout = self.exchanged(exchange)
        if exchange.content not in _SUMS:
            return layout.elements
        choice = self.flow.plan.strategy(exchange.index)
        return choice.elements([s for _, s in layout.parameters], _SUMS[exchange.content])


class Exchanges:
    """Carries out the exchanges of one peer. Owns what lies between two actions of a step."""

    def __init__(
        self,
        peer: PeerId,
        wire: TransferSpecs,
        held: Mapping[int, LocalStage],
        device: torch.device,
        counts: Callable[[int, int], float] = lambda step, microbatch: 1.0,
        scaler: LossScaler | None = None,
    ) -> None:
        """`counts`: what a microbatch of a step counts for, times the weight that the model gives
        it. `scaler`: of losses; None: they are not scaled."""
        self.peer, self.wire, self.held, self.device = peer, wire, held, device
        self.flow, self._counts, self._step = wire.flow, counts, 0
        self.scaler = scaler
        self.total: norm.ScoreTotals | None = None
        """The totals of the last norm or evaluation that came to an end here."""
        self._full = False
        """Whether the newest action was of a full step."""
        self._reported: dict[tuple[bool, int], dict[str, Tensor]] = {}
        """Loss, weight and metrics by (training, microbatch) and value."""

    def run(
        self, action: Action, taken: Taken, echo: Echo | None = None, step: int = 0
    ) -> dict[Transfer, Tensor | None]:
        """Carries the action out; returns what it gives. `echo`: of this step; None: no codec loses
        anything."""
        flow = self.flow.at(step)
        self._full, exchange, self._step = flow.is_full, flow.exchange_of(action), step
        hops = []
        for transfer, value in taken:
            if transfer.role is Role.SYNC:
                hops.append((self.flow.hops[transfer][1], present(transfer, value)))
            else:  # a result made behind the loss
                training = exchange.content is ExchangeContent.NORM
                late = {transfer.value: present(transfer, value)}
                self.report(training, transfer.microbatch, late)
        space = self._space(exchange)
        if action.kind is Kind.TAKE:
            self._take(exchange, hops, space)
            return {}
        if action.kind is Kind.GIVE:
            given = engine.give(exchange, lambda hop: self._own(exchange, hop), space)
        else:
            given = engine.pass_on(hops, space)
        found: dict[Transfer, Tensor | None] = {}
        for transfer in flow.gives(self.peer, action):
            found[transfer] = given(self.flow.hops[transfer][1])
        if echo is not None:
            self._hear(exchange, found, echo)
        return found

    def _hear(self, exchange: Exchange, found: dict[Transfer, Tensor | None], echo: Echo) -> None:
        """What a peer keeps of what goes to others as well is what the codec leaves of it: so all
        end with the same bits."""
        if not exchange.coded:
            return
        for transfer, value in found.items():
            if transfer.is_local and (others := self.flow.alike(transfer)):
                found[transfer] = echo(others[0], present(transfer, value))

    def report(self, training: bool, microbatch: int, values: Mapping[str, Tensor]) -> None:
        """Remembers those of the values that are loss, weight or metrics of the microbatch."""
        graph = self.wire.graph
        wanted = {graph.loss, graph.weight, *(v for _, v in graph.metrics)}
        mine = self._reported.setdefault((training, microbatch), {})
        mine.update({name: value for name, value in values.items() if name in wanted})

    @property
    def scale(self) -> float:
        """What losses are multiplied with before the backward pass."""
        return 1.0 if self.scaler is None else self.scaler.scale

    def seed_of(self, step: int, microbatch: int) -> float:
        """The gradient that the loss of a training microbatch is given: its weight, 1 for a model
        that gives none, times the scale."""
        name, counts = self.wire.graph.weight, self._counts(step, microbatch)
        if name:
            counts *= float(self._reported[True, microbatch][name])
        return counts * self.scale

    def totals_of_update(self, step: int) -> tuple[float, float]:
        """What sums of gradients are divided by in the update, Σ weight times the scale, and the
        norm of what that gives. Without the norm every microbatch weighs what it counts for, and
        nothing is clipped."""
        if self.flow.plan.without_norm:
            return sum(self._counts(step, m) for m in range(len(self.flow.plan.routes))), 0.0
        assert self.total is not None, "an update before the norm"
        return self.total.weight * self.scale, self.total.norm

    @property
    def overflowed(self) -> bool:
        """Whether scaled gradients of the step are not finite, so that nobody makes its update."""
        if self.scaler is None or self.total is None or not self.total.weight:
            return False
        return not math.isfinite(self.total.norm)

    def end_step(self) -> None:
        """Forget everything of the step that ended; the scale goes on to the next one."""
        if self.scaler is not None and self.total is not None and self.total.weight:
            self.scaler.update(overflowed=self.overflowed)
        self.clear()

    def clear(self) -> None:
        """Forgets everything of the step or evaluation that ended."""
        self._reported.clear()

    # ------------------------------------------------------------ what this peer gives

    def _own(self, exchange: Exchange, hop: Hop) -> Tensor:
        k, device = exchange.index, self.device
        match exchange.content:
            case ExchangeContent.GRADIENT | ExchangeContent.DELTA | ExchangeContent.SECOND:
                return self.held[k].strategy.message(_SUMS[exchange.content])
            case ExchangeContent.STATISTICS:
                ran = self.wire.microbatches(self.peer, k, full=self._full)
                collected = [self.held[k].collected[m] for m in ran]
                return self.wire.statistics[k].pack(collected, device)
            case ExchangeContent.TIED | ExchangeContent.TIED_DELTA | ExchangeContent.TIED_PAIR:
                stages = self.flow.tied[k].stages
                held = self.held[stages[hop.part % len(stages)]]
                grads = {n: held.executor.parameters[n].grad for n in held.stage.trainable}
                return vector_of(self.wire.tied_layout(k), grads, device)
            case ExchangeContent.NORM:
                return norm.pack(self._square(), self._scores(True), device)
            case ExchangeContent.SCORES:
                return norm.pack(None, self._scores(False), device)

    def _square(self) -> Tensor:
        """The sum of squares of the gradients that this peer answers for, without the scale."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        plan = self.flow.plan
        lowest = {g.parameter: g.stages[0] for g in self.flow.tied}
        for k, held in self.held.items():
            if plan.stages[k].holders[0] == self.peer:
                names = [n for n in held.stage.trainable if lowest.get(n, k) == k]
                total += held.strategy.square(names).to(self.device)
        return total / self.scale**2

    def _scores(self, training: bool) -> list[norm.Score]:
        graph, found = self.wire.graph, list[norm.Score]()
        for m in self.wire.microbatches(self.peer, self.wire.loss_stage, training=training):
            values = self._reported[training, m]
            weight = values[graph.weight] if graph.weight else 1.0
            weight = weight * self._counts(self._step, m) if training else weight
            found.append((values[graph.loss], weight, *(values[v] for _, v in graph.metrics)))
        return found

    # ------------------------------------------------------------ what becomes of it

    def _space(self, exchange: Exchange) -> VectorSpace[Tensor]:
        content = exchange.content
        if content in (ExchangeContent.NORM, ExchangeContent.SCORES):
            return _Scores(self.wire, exchange, self.device)
        if content is ExchangeContent.STATISTICS:
            return TensorSpace((0, 0), self.device)
        bounds = exchange.bounds(self.wire.elements(exchange))
        if content in _SUMS:
            return self.held[exchange.index].strategy.space(bounds)
        adds = _mean if content is ExchangeContent.TIED_DELTA else add
        return TensorSpace(bounds, self.device, adds)

    def _take(
        self, exchange: Exchange, hops: Sequence[tuple[Hop, Tensor]], space: VectorSpace[Tensor]
    ) -> None:
        k = exchange.index
        match exchange.content:
            case ExchangeContent.GRADIENT | ExchangeContent.DELTA | ExchangeContent.SECOND:
                total = engine.take(hops, space)
                self.held[k].strategy.take(_SUMS[exchange.content], total)
            case ExchangeContent.STATISTICS:
                for hop, vector in hops:
                    ran = self.wire.microbatches(hop.source, k, full=self._full)
                    unpacked = self.wire.statistics[k].unpack(vector, len(ran))
                    self.held[k].collected.update(zip(ran, unpacked, strict=True))
            case ExchangeContent.TIED | ExchangeContent.TIED_DELTA | ExchangeContent.TIED_PAIR:
                self._set_tied(k, engine.take(hops, space))
            case ExchangeContent.NORM | ExchangeContent.SCORES:
                self.total = norm.ScoreTotals.unpack(engine.take(hops, space))

    def _set_tied(self, index: int, total: Tensor) -> None:
        """Each copy gets a gradient of its own, since the update divides it in place."""
        layout = self.wire.tied_layout(index)
        for stage in self.flow.tied[index].stages:
            if stage in self.held:
                own = total.to(self.device, copy=True)
                set_grads(self.held[stage].executor.parameters, grads_of(layout, own))


class _Scores(TensorSpace):
    """Adding up what peers sent to the hub of a norm or an evaluation."""

    def __init__(self, wire: TransferSpecs, exchange: Exchange, device: torch.device) -> None:
        super().__init__((0, 0), device)
        self._wire, self._exchange, self._to = wire, exchange, device

    def add(self, parts: Sequence[Tensor]) -> Tensor:
        training = self._exchange.content is ExchangeContent.NORM
        peers = self._exchange.members.participants
        ran = [self._wire.microbatches(p, self._wire.loss_stage, training=training) for p in peers]
        found = list(zip(ran, parts, strict=True))
        return norm.combine(found, self._wire.metrics, squares=training).pack(self._to)


def _mean(parts: Sequence[Tensor]) -> Tensor:
    """Each stage of a tied parameter has the updates of all holders, as codecs left them."""
    return add(parts).div_(len(parts))


def present(transfer: Transfer, value: Tensor | None) -> Tensor:
    """The value of a transfer that cannot be absent here."""
    assert value is not None, f"{transfer} must not be absent"
    return value
