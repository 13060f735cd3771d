"""How long each action of a plan takes on each peer, and how many bytes each transfer has.

    F, E   forward(stage)
    B      backward(stage) [+ forward(stage) when it recomputes] + 3 · trainable bytes · (m-1)/m
           (from the second of m microbatches on, gradients are added up: two reads, one write)
    S>     2 · trainable bytes                    flattened into shards
    S+     (holders + 1) · shard                  added up
    S<     2 · trainable bytes                    written back; where holders step ahead
           (holders + 3) · trainable bytes        added up, and written back
           in rows (`grid.py`), of n holders and R rows, where a peer answers for h shards:
    S>     4 · trainable bytes                    flattened, gathered by member of the row
    S=     (members of the row + 1) · h · shard   added up
    S+     (R + 1) · shard                        added up
    S*     2 · h · shard                          put together
    T> T+ T<   the same for the tied parameter; t> t+ t< likewise
    N>     trainable bytes                        squares
    U      (3 + 2 · slots + 2) · trainable bytes  weight, gradient, slots; scaled by weight and clip

in classes of work (`speed.py`) over the speeds of the peer. Trainable bytes are fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from .cost import OperatorCost
from .cut import Stage, TiedGroup
from .flow import Role, Transfer
from .graph import Graph, TensorSpec
from .grid import grid_of
from .plan import PeerId, Plan
from .schedule import VISITS, Action, Kind
from .speed import Speeds, Work, work_array

__all__ = [
    "UPDATE_CALLS",
    "Totals",
    "action_work",
    "is_coded",
    "is_sum",
    "sizes_of",
    "tensors_of",
]

UPDATE_CALLS = 20
"""Kernels of an optimizer update and the scaling before it, per trainable parameter."""
NORM_CALLS = 4
"""Of the squares of the gradients, likewise."""
VISIT_CALLS = 100
"""Kernels' fixed times that a forward or backward costs besides its operators: finding what it
takes, checking, keeping, leaving what it gives. This and the others as one CPU core's seconds of
every kind of action of a GPT of 2 layers of width 32, whose operators cost next to nothing."""
ACTION_CALLS = 30
"""The same of any other action."""


class Totals:
    """Work of any interval of a bound graph, from prefix sums; shared by all cuts of a search."""

    def __init__(self, costs: Sequence[OperatorCost]) -> None:
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


def action_work(
    plan: Plan,
    stages: Sequence[Stage],
    tied: Sequence[TiedGroup],
    graph: Graph,
    totals: Totals,
    *,
    optimizer_slots: int,
) -> Callable[[PeerId, Action], Work]:
    """The work of every action of a plan, asked for by peer and action."""
    trainable = [_bytes(graph, s.trainable) for s in stages]
    grids = [*map(grid_of, plan.stages)]
    visits: dict[tuple[PeerId, int], int] = {}
    for route in plan.routes:
        for v in route:
            visits[v.peer, v.stage] = visits.get((v.peer, v.stage), 0) + 1
    held = {p: plan.stages_of(p) for p in plan.peers}
    known: dict[tuple[PeerId, Kind, int], Work] = {}

    def moved(size: float) -> Work:
        return Work(memory=size, calls=ACTION_CALLS)

    def find(peer: PeerId, kind: Kind, k: int) -> Work:
        extra = Work(calls=VISIT_CALLS if kind in VISITS else ACTION_CALLS)
        match kind:
            case Kind.FORWARD | Kind.EVALUATE:
                return totals.work(stages[k].start, stages[k].stop)[0] + extra
            case Kind.BACKWARD:
                forward, backward = totals.work(stages[k].start, stages[k].stop)
                m = visits.get((peer, k), 1)
                sums = Work(memory=3 * trainable[k] * (m - 1) / m)
                again = forward if plan.stages[k].recompute else Work()
                return backward + again + sums + extra
            case Kind.SYNC_TAKE if plan.stages[k].ahead:
                return moved((len(plan.stages[k].holders) + 3) * trainable[k])
            case Kind.SYNC_GIVE | Kind.SYNC_TAKE:
                gathers = grids[k] is not None and kind is Kind.SYNC_GIVE
                return moved((4 if gathers else 2) * trainable[k])
            case Kind.SYNC_ROW | Kind.SYNC_COMBINE | Kind.SYNC_RELAY:
                n, grid = len(plan.stages[k].holders), grids[k]
                parts, shards = n + 1, 1
                if grid is not None:
                    parts, shards = {
                        Kind.SYNC_ROW: (len(grid.row(peer)) + 1, len(grid.answers[peer])),
                        Kind.SYNC_COMBINE: (len(grid.rows) + 1, 1),
                        Kind.SYNC_RELAY: (2, len(grid.answers[peer])),
                    }[kind]
                return moved(parts * shards * trainable[k] / n)
            case (
                Kind.TIED_GIVE
                | Kind.TIED_TAKE
                | Kind.TIED_COMBINE
                | Kind.PAIR_GIVE
                | Kind.PAIR_TAKE
                | Kind.PAIR_COMBINE
            ):
                size = _bytes(graph, (tied[k].parameter,))
                parts = (
                    len(tied[k].stages) + 1 if kind in (Kind.TIED_COMBINE, Kind.PAIR_COMBINE) else 2
                )
                return moved(parts * size)
            case Kind.NORM_GIVE:
                first = [i for i in held[peer] if plan.stages[i].holders[0] == peer]
                count = sum(len(stages[i].trainable) for i in first)
                return moved(sum(trainable[i] for i in first)) + Work(calls=NORM_CALLS * count)
            case Kind.UPDATE:
                size = sum(trainable[i] for i in held[peer])
                count = sum(len(stages[i].trainable) for i in held[peer])
                return Work(
                    memory=(5 + 2 * optimizer_slots) * size,
                    calls=ACTION_CALLS + UPDATE_CALLS * count,
                )
            case _:
                return extra

    def work(peer: PeerId, action: Action) -> Work:
        key = (peer, action.kind, action.stage)
        if key not in known:
            known[key] = find(*key)
        return known[key]

    return work


def sizes_of(
    plan: Plan, stages: Sequence[Stage], tied: Sequence[TiedGroup], graph: Graph
) -> Callable[[Transfer], int]:
    """Bytes of every transfer of a plan before encoding."""
    trainable = [_bytes(graph, s.trainable) for s in stages]
    updates = {b.name: b.update.value for b in graph.buffers if b.update and b.update.value}
    statistics = [
        sum(graph.spec[updates[n]].size_bytes for n in s.updates if n in updates) for s in stages
    ]
    scores = 8 * (4 + len(graph.metrics))
    grids = [*map(grid_of, plan.stages)]

    def size(transfer: Transfer) -> int:
        if transfer.role is not Role.SYNC:
            return graph.spec[transfer.value].size_bytes
        port = transfer.port
        if port[0] in "Ttu":
            group = int(port[1:].partition(">")[0].partition("+")[0])
            return _bytes(graph, (tied[group].parameter,))
        if port[0] == "S":
            k, part = stage_port(port)
            if part == ">stats":
                ran = sum(v == (k, transfer.source) for v in visited)
                return statistics[k] * ran
            if part == ">ahead":
                return trainable[k]
            grid = grids[k]
            shards = 1 if grid is None else grid.shards(part, transfer.source, transfer.destination)
            return shards * -(-trainable[k] // len(plan.stages[k].holders))
        return scores

    visited = [(v.stage, v.peer) for route in plan.routes for v in route]
    return size


def stage_port(port: str) -> tuple[int, str]:
    """(stage, the rest with its mark) of a port of S: (12, "+grad") for S12+grad."""
    digits = len(port) - len(port[1:].lstrip("0123456789"))
    return int(port[1:digits]), port[digits:]


def is_sum(transfer: Transfer) -> bool:
    """Whether every destination gets the same tensor, to be added up: a sum of gradients on its way
    back, or the update of a holder that steps ahead."""
    if transfer.role is not Role.SYNC:
        return False
    port = transfer.port
    return port.endswith(("+grad", ">ahead")) or (port[0] == "T" and port[-1] == "+")


def is_coded(transfer: Transfer) -> bool:
    """Whether the codec of its link and role carries it, rather than raw: values, their gradients,
    and the gradients that holders exchange each with each. Norms, losses and statistics are small
    and exact; what goes in rows (`grid.py`) would lose something twice on its way, and its totals
    at each of many peers differently."""
    if transfer.role is not Role.SYNC:
        return transfer.role in (Role.ACTIVATION, Role.ACTIVATION_GRAD)
    port = transfer.port
    return is_sum(transfer) or port.endswith(">grad") or (port[0] == "T" and ">" in port)


def tensors_of(
    plan: Plan, stages: Sequence[Stage], tied: Sequence[TiedGroup], graph: Graph
) -> Callable[[Transfer], tuple[TensorSpec, int]]:
    """The tensor of every transfer that `is_coded`, and how many elements at its end are sent as
    they are when a codec loses something. Gradients are the flat vectors of
    `peer/sync/allreduce.py`: all elements, then one flag per parameter, in equal shards; the flags
    and the padding stay exact."""

    def shard(names: Sequence[str], shards: int, at: int) -> tuple[TensorSpec, int]:
        specs = [graph.spec[f"param:{name}"] for name in names]
        wide = any(s.dtype == "float64" for s in specs)
        elements = sum(s.elements for s in specs)
        length = -(-(elements + len(specs)) // shards)
        gradients = min(length, max(0, elements - at * length))
        return TensorSpec((length,), "float64" if wide else "float32"), length - gradients

    def find(transfer: Transfer) -> tuple[TensorSpec, int]:
        if transfer.role is not Role.SYNC:
            return graph.spec[transfer.value], 0
        port = transfer.port
        number = int(port[1:].replace("+", ">").partition(">")[0])
        if port[0] == "T":
            return shard((tied[number].parameter,), 1, 0)
        holders = plan.stages[number].holders
        if port.endswith(">ahead"):
            return shard(stages[number].trainable, 1, 0)
        owner = transfer.source if is_sum(transfer) else transfer.destination
        return shard(stages[number].trainable, len(holders), holders.index(owner))

    return find


def _bytes(graph: Graph, names: Sequence[str]) -> int:
    return sum(graph.parameter_bytes[name] for name in names)
