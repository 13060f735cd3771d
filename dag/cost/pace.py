"""How long each action of a plan takes on each peer, and how many bytes each transfer has.

    F, E   forward(stage)
    B      backward(stage) [+ forward(stage) when it recomputes] + 3 · trainable bytes · (m-1)/m
           (from the second of m microbatches on, gradients are added up: two reads, one write)
    W      where weights' gradients are apart: their part of the backward, what having them apart
           costs (`weight_costs.py`), and the sum; B is what is left
    >      2 · vector                             flattened; of one that is cut, 2 · what is put
                                                  together of several shards besides
    + *    what is taken and what comes of it     added up, or put together
    <      2 · vector                             written back; where whole vectors come,
           (participants + 3) · vector            added up before
    >@norm trainable bytes                        squares; what else it exchanges is small
    U      (3 + 2 · slots + 2) · trainable bytes  weight, gradient, slots; scaled by weight and clip

in classes of work (`speed.py`) over the speeds of the peer. Trainable bytes are fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from ..exchange.collective import Hop
from ..exchange.wiring import Exchange, Exchanges
from ..ir.graph import Graph, TensorSpec
from ..plan.action import TRAITS, ExchangeContent
from ..plan.cut import Stage, TiedGroup
from ..plan.plan import PeerId, Plan
from ..schedule.schedule import VISITS, Action, Kind
from .cost import OperatorCost
from .speed import Speeds, Work, work_array
from .weight_costs import weight_work

__all__ = [
    "UPDATE_CALLS",
    "IntervalWork",
    "Vectors",
    "action_work",
]

UPDATE_CALLS = 20
"""Kernels of an optimizer update and the scaling before it, per trainable parameter."""
NORM_CALLS = 4
"""Calls for the squares of the gradients, likewise."""
VISIT_CALLS = 100
"""Kernels' fixed times that a forward or backward costs besides its operators: finding what it
takes, checking, keeping, leaving what it gives. This and the others as one CPU core's seconds of
every kind of action of a GPT of 2 layers of width 32, whose operators cost next to nothing."""
ENCODING = 4
"""Passes over what is trained in which a strategy encodes it, and as many in which it decodes."""
ACTION_CALLS = 30
"""Calls of any other action."""


class IntervalWork:
    """Work of any interval of a bound graph, from prefix sums; shared by all cuts of a search."""

    def __init__(self, costs: Sequence[OperatorCost]) -> None:
        self.costs = costs
        self._apart: dict[tuple[int, int], tuple[Work, Work]] = {}
        zero = np.zeros((1, len(Work._fields)))
        self.forward = np.concatenate([zero, np.cumsum(work_array([c.forward for c in costs]), 0)])
        self.backward = np.concatenate(
            [zero, np.cumsum(work_array([c.backward for c in costs]), 0)]
        )

    def seconds(self, speeds: Sequence[Speeds]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """(F, B), each of shape (peers, operators + 1): F[p, j] - F[p, i] are the forward seconds
        of [i, j) on p."""
        per_unit = np.array([s.per_unit for s in speeds]).reshape(len(speeds), len(Work._fields))
        return _products(per_unit, self.forward), _products(per_unit, self.backward)

    def weight_work(self, graph: Graph, start: int, stop: int) -> tuple[Work, Work]:
        """`weight_work` of [start, stop) of the graph whose costs these are."""
        if (start, stop) not in self._apart:
            self._apart[start, stop] = weight_work(graph, self.costs, start, stop)
        return self._apart[start, stop]

    def work(self, start: int, stop: int) -> tuple[Work, Work]:
        """Forward and backward of [start, stop) for one microbatch."""
        return (
            Work(*map(float, self.forward[stop] - self.forward[start])),
            Work(*map(float, self.backward[stop] - self.backward[start])),
        )


def _products(per_unit: NDArray[np.float64], work: NDArray[np.float64]) -> NDArray[np.float64]:
    """`per_unit @ work.T` without BLAS, whose last digits, and so the plan, are those of a
    processor."""
    found = np.zeros((len(per_unit), len(work)))
    for seconds, amounts in zip(per_unit.T, work.T, strict=True):
        found += np.multiply.outer(seconds, amounts)
    return found


class Vectors:
    """What exchanges carry of the stages and tied groups of a plan: bytes and specs."""

    def __init__(
        self, plan: Plan, stages: Sequence[Stage], tied: Sequence[TiedGroup], graph: Graph
    ) -> None:
        self._stages, self._tied, self.graph = stages, tied, graph
        self._trainable = [_bytes(graph, s.trainable) for s in stages]
        self._messages = {
            (e.stage, which): choice.elements(specs, which) * (8 if wide else 4)
            for e in plan.exchanges
            for choice in [plan.strategy(e.stage)]
            if choice.traits.elements is not None
            for specs in [self._specs(stages[e.stage].trainable)]
            for wide in [any(s.dtype == "float64" for s in specs)]
            for which in range(choice.traits.sums)
        }
        updates = {b.name: b.update.value for b in graph.buffers if b.update and b.update.value}
        self._statistics = [
            sum(graph.spec[updates[n]].size_bytes for n in s.updates if n in updates)
            for s in stages
        ]
        self._scores = 8 * (4 + len(graph.metrics))
        self._ran: dict[tuple[PeerId, int], int] = {}
        for route in plan.routes:
            for v in route:
                self._ran[v.peer, v.stage] = self._ran.get((v.peer, v.stage), 0) + 1

    def _specs(self, names: Sequence[str]) -> list[TensorSpec]:
        return [self.graph.spec[f"param:{name}"] for name in names]

    def visits(self, peer: PeerId, stage: int) -> int:
        """How many microbatches the peer runs through the stage in a step."""
        return self._ran.get((peer, stage), 0)

    def trainable(self, stage: int) -> int:
        """Bytes of what is trained there."""
        return self._trainable[stage]

    def whole(self, content: ExchangeContent, index: int) -> int:
        """Bytes of the gradients or updates that are exchanged, before they are cut; 0 for what is
        small."""
        match content:
            case ExchangeContent.GRADIENT | ExchangeContent.DELTA:
                return self._messages.get((index, 0), self._trainable[index])
            case ExchangeContent.SECOND:
                return self._messages[index, 1]
            case ExchangeContent.TIED | ExchangeContent.TIED_DELTA | ExchangeContent.TIED_PAIR:
                return _bytes(self.graph, (self._tied[index].parameter,))
            case _:
                return 0

    def size(self, exchange: Exchange, hop: Hop) -> int:
        """Bytes of a message of an exchange before encoding."""
        content, index = exchange.content, exchange.index
        if content is ExchangeContent.STATISTICS:
            return self._statistics[index] * self.visits(hop.source, index)
        whole = self.whole(content, index)
        return exchange.elements(hop, whole) if whole else self._scores

    def tensor(self, exchange: Exchange, hop: Hop) -> tuple[TensorSpec, int]:
        """The tensor of a message that is coded, and how many elements at its end are sent as they
        are when a codec loses something. Gradients are the flat vectors of
        `peer/sync/gradient_vector.py`: all elements, then one flag for each parameter, which stays
        exact."""
        content, index = exchange.content, exchange.index
        stage_wise = content in (ExchangeContent.GRADIENT, ExchangeContent.DELTA)
        names = self._stages[index].trainable if stage_wise else (self._tied[index].parameter,)
        specs = self._specs(names)
        wide = any(s.dtype == "float64" for s in specs)
        elements = sum(s.elements for s in specs)
        (shard,) = hop.shards  # of several, put together, none is coded
        start, stop = exchange.bounds(elements + len(specs))[shard : shard + 2]
        exact = min(stop - start, max(0, stop - elements))
        return TensorSpec((stop - start,), "float64" if wide else "float32"), exact


def action_work(
    plan: Plan,
    stages: Sequence[Stage],
    exchanges: Exchanges,
    vectors: Vectors,
    totals: IntervalWork,
    *,
    optimizer_slots: int,
    halved: Collection[tuple[PeerId, int]] = (),
) -> Callable[[PeerId, Action], Work]:
    """The work of every action of a plan, asked for by peer and action. `halved`: peers and stages
    where weights' gradients are apart."""
    held = {p: plan.stages_of(p) for p in plan.peers}
    known: dict[tuple[PeerId, Action], Work] = {}

    def apart(k: int) -> tuple[Work, Work]:
        return totals.weight_work(vectors.graph, stages[k].start, stages[k].stop)

    def find(peer: PeerId, action: Action) -> Work:
        kind, k = action.kind, action.stage
        extra = Work(calls=VISIT_CALLS if kind in VISITS else ACTION_CALLS)
        traits = TRAITS[kind]
        if traits.work:
            forward, backward = totals.work(stages[k].start, stages[k].stop)
            own = forward if traits.work == "forward" else backward
            if not traits.adds_up:
                return own + extra
            m = vectors.visits(peer, k) or 1
            sums = Work(memory=3 * vectors.trainable(k) * (m - 1) / m)
            if traits.work == "weight":
                return sum(apart(k), sums + extra)
            if (peer, k) in halved:
                own, sums = own + apart(k)[0].times(-1), Work()
            again = forward if plan.stages[k].recompute and traits.recomputes else Work()
            return own + again + sums + extra
        if kind is Kind.UPDATE:
            size = sum(vectors.trainable(i) for i in held[peer])
            count = sum(len(stages[i].trainable) for i in held[peer])
            moved = (5 + 2 * optimizer_slots) * size
            return Work(memory=moved, calls=ACTION_CALLS + UPDATE_CALLS * count)
        if action.content is ExchangeContent.NORM and kind is Kind.GIVE:
            first = [i for i in held[peer] if plan.stages[i].holders[0] == peer]
            count = sum(len(stages[i].trainable) for i in first)
            size = sum(vectors.trainable(i) for i in first)
            return extra + Work(memory=size, calls=NORM_CALLS * count)
        if kind in VISITS:  # that computes none of the stage's operators
            return extra
        assert action.content is not None, f"{action} is no action of a step"
        exchange = exchanges[action.content, k]
        return extra + Work(memory=exchange_bytes(vectors, exchange, peer, action))

    def work(peer: PeerId, action: Action) -> Work:
        # What visits of one stage take does not depend on the microbatch.
        key = peer, action if action.content is not None else action._replace(microbatch=0)
        if key not in known:
            known[key] = find(*key)
        return known[key]

    return work


def exchange_bytes(vectors: Vectors, exchange: Exchange, peer: PeerId, action: Action) -> float:
    """Bytes that an action of an exchange moves in memory; nothing counts of what is small."""
    whole = vectors.whole(exchange.content, exchange.index)
    if not whole:
        return 0.0
    phase = exchange.phases(peer)[action.phase]
    taken = sum(exchange.elements(hop, whole) for hop in phase.takes)
    selected = ENCODING * vectors.trainable(exchange.index) if exchange.encoded else 0
    if action.kind is Kind.GIVE:
        several = [hop for hop in phase.gives if len(hop.shards) > 1]
        return selected + 2 * whole + 2 * sum(exchange.elements(hop, whole) for hop in several)
    if action.kind is Kind.TAKE:
        parts = sum(exchange.elements(h, whole) for h in phase.takes if not h.total)
        return selected + 2 * whole + (parts + whole if parts else 0)
    results = {hop.shards: hop for hop in phase.gives}
    return taken + sum(exchange.elements(hop, whole) for hop in results.values())


def _bytes(graph: Graph, names: Sequence[str]) -> int:
    return sum(graph.parameter_bytes[name] for name in names)
