"""SkipPipe's twelve places without skipping: their rules of time and memory, their full-pipeline
baseline, and a plan of ours under the same rules.

Rules (Blagoev et al. 2025, arXiv 2502.19913, and the code published with it):

- an edge takes latency + activation bytes / bandwidth + `edge_s`; edges never wait for each other;
- a node does one job at a time, first come first served, and rests `job_s` behind each (`first_s`
  behind the first forward of a microbatch); a forward takes `layer_s` per layer, a backward
  `backward` times that, the loss as long as `loss_layers` layers;
- a microbatch goes forward along its route, to the first node of the route for the loss, back to
  the last one and backward along the route;
- a node keeps at most MEMORY layers · microbatches between forward and backward (3 microbatches of
  4 layers) and the parameters of at most LAYERS_HELD layers; a forward without room waits, backward
  and loss never do.

Their simulation looks at a waiting forward every 0.1 s; here it begins at once.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal.sim.scenario.topologies import Topology

__all__ = ["LAYERS_HELD", "MEMORY", "Delays", "Route", "baseline_routes", "delays", "ends_s"]

LAYERS_HELD = 4
MEMORY = 12

Route = tuple[tuple[int, int], ...]
"""By stage, its node and the number of its layers."""


@dataclass(frozen=True, eq=False)
class Delays:
    """Seconds of everything, for microbatches of the experiment's size."""

    edge: tuple[tuple[float, ...], ...]
    """(N, N): of an activation from node to node."""
    layer_s: float
    backward: float
    loss_layers: float
    job_s: float
    first_s: float


def delays(topology: Topology, *, overheads: bool = True) -> Delays:
    """Of a topology with SkipPipe's experiment. Without `overheads`: only what network and layers
    take, not their fixed seconds per transfer and job."""
    e, network = topology.experiment, topology.network()
    edge: NDArray[np.float64] = network.latency_s + e["activation_bytes"] / network.bandwidth
    edge += e["fixed_overhead_s_per_transfer"] * overheads
    np.fill_diagonal(edge, 0.0)
    return Delays(
        tuple(map(tuple, edge.tolist())),
        e["forward_s_per_layer_per_sample"] * e["samples_per_microbatch"],
        e["backward_factor"],
        e["loss_head_factor"] * e["layers_per_stage"],
        e["fixed_overhead_s_per_job"] * overheads,
        (e["fixed_overhead_s_per_job"] - 0.04) * overheads,
    )


def ends_s(
    d: Delays,
    routes: Sequence[Route],
    *,
    loss_at_first: bool = True,
    backward_first: bool = False,
) -> list[float]:
    """When each microbatch is through, its last backward included. Microbatches are on hand at the
    first nodes of their routes from the beginning, and begin in the order of `routes`.

    `loss_at_first`: theirs; otherwise the last node of the route computes the loss.
    `backward_first`: a node prefers losses and backwards to forwards that came before them.
    """
    edge, job_s, layer_s = d.edge, d.job_s, d.layer_s
    loss_s, backward_s = d.loss_layers * layer_s, d.backward * layer_s
    room = [MEMORY] * len(edge)
    free = [0.0] * len(edge)
    ends = [0.0] * len(routes)
    # A job is microbatch · steps + step: S forwards, the loss, S backwards. Jobs that have arrived
    # by node, and what happens: (second, node, job that arrives or -1: the node is free).
    steps = 2 * max(map(len, routes)) + 1
    waiting: list[list[int]] = [[] for _ in edge]
    events = [(0.0, route[0][0], m * steps) for m, route in enumerate(routes)]
    heapq.heapify(events)

    def later(job: int) -> int:
        m, step = divmod(job, steps)
        # Whatever is under way goes before a new microbatch.
        return 2 * (step == 0) + (backward_first and step < len(routes[m]))

    while events:
        now, node, job = heapq.heappop(events)
        queue = waiting[node]
        if job >= 0:
            queue.append(job)
            if len(queue) > 1:
                queue.sort(key=later)
        if free[node] > now:
            continue
        for job in queue:
            m, step = divmod(job, steps)
            route = routes[m]
            stages = len(route)
            if step >= stages or room[node] >= route[step][1]:
                break
        else:
            continue
        queue.remove(job)
        rest_s, to = job_s, -1
        if step < stages:
            layers = route[step][1]
            room[node] -= layers
            took = layers * layer_s
            if step == 0:
                rest_s = d.first_s
            head = route[0 if loss_at_first else -1]
            to = (route[step + 1] if step + 1 < stages else head)[0]
        elif step == stages:
            took, to = loss_s, route[-1][0]
        else:
            k = 2 * stages - step
            layers = route[k][1]
            room[node] += layers
            took = layers * backward_s
            if k:
                to = route[k - 1][0]
        end = now + took
        free[node] = end + rest_s
        if to < 0:
            ends[m] = end
        else:
            heapq.heappush(events, (end + edge[node][to], to, job + 1))
        heapq.heappush(events, (free[node], node, -1))
    return ends


def baseline_routes(groups: Sequence[Sequence[int]], each: int) -> list[Route]:
    """Their full pipeline: as many routes as the smallest stage has nodes, the d-th nodes of all
    stages after each other, `each` microbatches on each of them, in turn."""
    width = min(map(len, groups))
    rows = [tuple((g[d], LAYERS_HELD) for g in groups) for d in range(width)]
    return [row for _ in range(each) for row in rows]
