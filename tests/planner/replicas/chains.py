"""Requests for forming replicas: a chain of equal operators, and peers in places."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shoal.dag.cost.cost import OperatorCost
from shoal.dag.cost.memory import MemoryModel
from shoal.dag.cost.network import Network
from shoal.dag.cost.speed import Work
from shoal.dag.ir.graph import Graph, Input, Operator, Output, Parameter, Ref, TensorSpec
from shoal.dag.plan.plan import PeerId
from shoal.planner.base.interface import PeerOffer, PlannerOptions, PlanRequest

__all__ = ["chain_graph", "request_in_places"]

FLOPS = 1e9
"""Of a peer of speed 1, per second."""
WORK = 1e8
"""FLOPs of an operator's forward."""
NUMBERS = 100_000
"""Of an operator's parameter."""
CROSSING = 2_500
"""Floats that a cut sends."""


def chain_graph(operators: int) -> tuple[Graph, tuple[OperatorCost, ...]]:
    """Each reads what the one before made, and a parameter of its own."""
    found, costs, parameters, last = [], [], [], "in:x"
    for i in range(operators):
        spec = TensorSpec((1 if i == operators - 1 else CROSSING,), "float32")
        p = Parameter(f"w{i}", TensorSpec((NUMBERS,), "float32"))
        parameters.append(p)
        reads = (Ref(last), Ref(f"param:{p.name}"))
        found.append(Operator(f"v{i}", "aten.add.Tensor", reads, (), (Output(spec, True),)))
        forward, backward = Work(product=WORK, calls=3.0), Work(product=2 * WORK, calls=5.0)
        size, kept = p.spec.size_bytes, spec.size_bytes
        held = ((f"param:{p.name}", size),)
        costs.append(OperatorCost(forward, backward, size, kept, held, ((i, kept),)))
        last = f"v{i}"
    inputs = (Input("x", TensorSpec((8,), "float32")),)
    return Graph(inputs, tuple(parameters), (), tuple(found), last, batch=1), tuple(costs)


def request_in_places(
    places: Sequence[int],
    rooms: Sequence[float],
    speeds: Sequence[float],
    *,
    fast: float = 1e9,
    slow: float = 1e6,
    microbatches: int = 8,
    operators: int = 12,
    options: PlannerOptions | None = None,
) -> PlanRequest:
    """Peer i is in `places[i]`, with `rooms[i]` of what the whole model needs; links inside a place
    carry `fast` bytes/s, others `slow`."""
    graph, costs = chain_graph(operators)
    whole = MemoryModel(graph, costs).stage(0, operators).peak(state_bytes=8, live=1)
    peers = tuple(PeerId(f"p{i}") for i in range(len(places)))
    here = np.array(places)[:, None] == np.array(places)
    free = np.full(len(peers), np.inf)
    network = Network(
        peers, np.where(here, 1e-4, 0.02), np.where(here, fast, slow), free, free.copy()
    )
    offers = tuple(
        PeerOffer(p, p, device_memory_bytes=int(whole * room), flops_per_s=FLOPS * speed)
        for p, room, speed in zip(peers, rooms, speeds, strict=True)
    )
    return PlanRequest(
        graph,
        offers,
        microbatches,
        1,
        options=options or PlannerOptions(),
        links=network,
        known_costs=costs,
    )
