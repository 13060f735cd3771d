"""Random small cases of planning, the same for the same seed: what `auto` and `exact` are compared
on.

Up to 10 operators in a random graph with skips, up to 5 peers; speeds over 10x, bandwidths over
1,000x, latencies up to 50 ms, some uplinks narrower than their links, memory that is sometimes too
small for everything on one peer. Costs are drawn, not measured: no operator is ever tried.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from shoal.dag.cost.cost import OperatorCost
from shoal.dag.cost.memory import MemoryModel
from shoal.dag.cost.network import Network
from shoal.dag.cost.speed import Work
from shoal.dag.ir.graph import Graph, Input, Operator, Output, Parameter, Ref, TensorSpec
from shoal.dag.plan.plan import PeerId, ScheduleName
from shoal.planner.base.interface import PeerOffer, PlannerOptions, PlanRequest
from shoal.planner.cost.candidate import Candidate, StageShare

__all__ = ["chain", "random_case", "random_graph", "random_network"]

FLOPS = 1e9
"""Of a slow peer, per second."""


def random_graph(
    rng: random.Random, operators: int, tied: bool = False
) -> tuple[Graph, tuple[OperatorCost, ...]]:
    """A chain with skips in which every operator is differentiated; most have a parameter, and with
    `tied` the first and the last read the same one."""
    parameters: list[Parameter] = []
    found: list[Operator] = []
    costs: list[OperatorCost] = []
    made = ["in:x"]
    for i in range(operators):
        last = i == operators - 1
        size = 1 if last else int(10 ** rng.uniform(2.5, 4.5))  # floats: 1 kB to 126 kB
        spec = TensorSpec((size,), "float32")
        reads = [made[-1]]
        if len(made) > 2 and rng.random() < 0.25:
            reads.append(rng.choice(made[max(1, len(made) - 8) : -1]))
        held: tuple[tuple[str, int], ...] = ()
        if (tied and last) or rng.random() < 0.7 or i == 0:
            if tied and last:
                p = parameters[0]
            else:
                count = int(10 ** rng.uniform(3, 5.5))
                p = Parameter(f"w{i}", TensorSpec((count,), "float32"))
                parameters.append(p)
            reads.append(f"param:{p.name}")
            held = ((reads[-1], p.spec.size_bytes),)
        args = tuple(Ref(v) for v in reads)
        name = f"v{i}"
        found.append(Operator(name, "aten.add.Tensor", args, (), (Output(spec, True),)))
        work = 10 ** rng.uniform(7, 8.5)
        kept = spec.size_bytes * rng.randint(1, 4)
        costs.append(
            OperatorCost(
                Work(product=work, calls=3.0),
                Work(product=work * rng.uniform(1.5, 2.5), calls=5.0),
                sum(size for _, size in held),
                spec.size_bytes,
                held,
                ((i, kept),),
            )
        )
        made.append(name)
    graph = Graph(
        inputs=(Input("x", TensorSpec((8,), "float32")),),
        parameters=tuple(parameters),
        buffers=(),
        operators=tuple(found),
        loss=made[-1],
        batch=1,
    )
    return graph, tuple(costs)


def random_network(rng: random.Random, peers: tuple[PeerId, ...]) -> Network:
    """Each pair drawn for itself, or peers in places with fast links inside."""
    n = len(peers)
    places = (
        [rng.randrange(max(1, n // 2)) for _ in peers] if rng.random() < 0.5 else list(range(n))
    )
    rate: dict[tuple[int, int], tuple[float, float]] = {}
    bandwidth, latency = np.full((n, n), np.inf), np.zeros((n, n))
    for i in range(n):
        for j in range(n):
            a, b = places[i], places[j]
            key = (min(a, b), max(a, b))
            if key not in rate:
                fast = a == b
                rate[key] = (
                    10 ** (rng.uniform(7, 8) if fast else rng.uniform(5, 8)),  # bytes/s
                    rng.uniform(0, 0.002) if fast else rng.uniform(0, 0.05),
                )
            if i != j:
                bandwidth[i, j] = rate[key][0] * rng.uniform(0.7, 1.0)
                latency[i, j] = rate[key][1]
    up, down = np.full(n, np.inf), np.full(n, np.inf)
    for i in range(n):
        if rng.random() < 0.3:
            up[i] = 10 ** rng.uniform(5.5, 7.5)
            down[i] = up[i] * rng.choice([1.0, 4.0, 10.0])
    return Network(peers, latency, bandwidth, up, down)


def random_case(
    seed: int, *, operators: int = 10, peers: int = 5, held: bool = True
) -> PlanRequest:
    """At most so many operators and peers. `held`: to one pipeline, fixed microbatches and schedule
    and no recomputation, which is the space of `exact`; otherwise the planner chooses all that."""
    rng = random.Random(seed)
    n = rng.randint(min(4, operators), operators)
    count = rng.randint(2, peers)
    graph, costs = random_graph(rng, n, tied=rng.random() < 0.3)
    whole = MemoryModel(graph, costs).stage(0, n).peak(state_bytes=8, live=1)
    tight = rng.random() < 0.5
    offers = tuple(
        PeerOffer(
            PeerId(f"p{i}"),
            f"peer-{i}",
            device_memory_bytes=int(whole * (rng.uniform(0.3, 1.5) if tight else 3.0)),
            flops_per_s=FLOPS * 10 ** rng.uniform(0, 1),
        )
        for i in range(count)
    )
    request = PlanRequest(
        graph,
        offers,
        microbatches=rng.choice([1, 2, 4, 6, 8]),
        microbatch_size=1,
        links=random_network(rng, tuple(o.peer for o in offers)),
        known_costs=costs,
    )
    if not held:
        return request
    schedules: tuple[ScheduleName, ...] = ("gpipe", "1f1b")
    schedule = rng.choice(schedules)
    return replace(request, options=PlannerOptions(pipelines=1, schedule=schedule, recompute=False))


def chain(
    peers: Sequence[int],
    cuts: Sequence[int],
    microbatches: int,
    schedule: ScheduleName = "1f1b",
    recompute: Iterable[int] = (),
) -> Candidate:
    """One pipeline: peer i has the operators [cuts[i], cuts[i + 1]). `recompute`: positions."""
    again = frozenset(recompute)
    shares = tuple(
        StageShare(p, a, b, i in again)
        for i, (p, a, b) in enumerate(zip(peers, cuts[:-1], cuts[1:], strict=True))
    )
    return Candidate((shares,), (microbatches,), schedule)
