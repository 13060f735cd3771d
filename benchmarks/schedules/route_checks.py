"""What routes are checked by: every rule of SkipPipe's that they break, and a step time that no
routes on a network can be below, whatever they are.

With c(v) the cheapest round trip of a microbatch through L nodes, v among them (forward, loss and
backward, nobody in the way), W waves and K lanes:

    on average    lanes are busy for Σ of their round trips, and each visit of v is one of L of a
                  round trip of at least c(v):  step ≥ Σ visits(v) · c(v) / L / K, with every node
                  as often as it may be, the cheap ones first, and with the wait of lanes that begin
                  at one node
    farthest      where every place is needed, some microbatch of the last wave visits the farthest
                  v, and its lane has W - 1 round trips before that:  step ≥ (W - 1) · min c + c(v)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from shoal.planner.routes.route_rules import LanePath, RouteRules
from shoal.planner.routes.route_timing import RouteTimes

__all__ = ["broken_rules", "cheapest_round_trips", "stage_sets", "step_bound_s"]

Floats = NDArray[np.float64]


def cheapest_round_trips(times: RouteTimes, length: int) -> Floats:
    """(N,): at most the seconds of the cheapest round trip of `length` nodes with each node. Walks
    that turn back at once are left out, longer repetitions are not: exact up to 4 nodes."""
    hop = times.hop_s()
    visit = times.visit_s()
    n = len(visit)
    edge = hop + hop.T + visit[None, :]
    np.fill_diagonal(edge, np.inf)
    found = np.full(n, np.inf)
    for v in range(n):
        # walk[p, k]: the cheapest walk from v that ends with p -> k.
        walk = np.full((n, n), np.inf)
        walk[v] = edge[v]
        for _ in range(length - 2):
            walk = _without_return(walk) + edge
        # The last edge leads back to v, and not from where the first one led when L is 2.
        back = walk.min(0) + edge[:, v] if length == 2 else (_without_return(walk) + edge)[:, v]
        found[v] = float(back.min())
    return found + float(times.loss_s.min())


def _without_return(walk: Floats) -> Floats:
    """(k, t): the cheapest walk that ends in k and came there from another node than t."""
    n = len(walk)
    first = walk.argmin(0)
    least = walk[first, np.arange(n)]
    others = walk.copy()
    others[first, np.arange(n)] = np.inf
    second = others.min(0)
    found: Floats = np.repeat(least[:, None], n, axis=1)
    found[np.arange(n), first] = second
    return found


def step_bound_s(rules: RouteRules, times: RouteTimes, sizes: Sequence[int], waves: int) -> float:
    """Seconds that a step takes at least. `sizes`: nodes by stage."""
    lanes = sizes[0] * rules.memory
    trips = cheapest_round_trips(times, rules.length)
    # Node by node as many visits as it may have, the cheapest first.
    left, most, total = waves * lanes * rules.length, waves * rules.memory, 0.0
    for trip in np.sort(trips):
        visits = min(left, most)
        total += visits * float(trip)
        left -= visits
    between = float(times.forward_s.min()) + times.rest_s
    waits = between * (rules.memory - 1) / 2
    average = total / rules.length / lanes + waits
    farthest = float(trips.min()) * waves
    if waves * lanes * rules.length > most * (len(trips) - 1):
        farthest += float(trips.max() - trips.min())
    return max(average, farthest)


def stage_sets(rules: RouteRules) -> Iterator[tuple[int, ...]]:
    """Sets of stages that an order may visit, ascending, 0 included."""

    def longer(found: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(found) == rules.length:
            yield found
            return
        for stage in range(found[-1] + 1, min(rules.stages, found[-1] + rules.look_ahead + 1)):
            yield from longer((*found, stage))

    return longer((0,))


def broken_rules(
    rules: RouteRules,
    stage_of: Sequence[int],
    paths: Sequence[LanePath],
    intervals: Iterable[tuple[int, float, float, int, bool]] = (),
) -> list[str]:
    """Each rule that the routes of one wave break, in words, with the visit; none: they keep all.

    `stage_of`: by node. `intervals`: (node, begin, end, microbatch, whether forward) of everything
    that is done, in seconds: two microbatches on one node at a time break the last rule, backward
    with backward excepted.
    """
    found: list[str] = []
    for m, path in enumerate(paths):
        found += [f"microbatch {m} {words}" for words in _broken_order(rules, path)]
        for stage, node in path:
            if stage_of[node] != stage:
                found.append(
                    f"microbatch {m} visits node {node} for stage {stage}: it holds stage "
                    f"{stage_of[node]}"
                )
    by_stage = Counter(stage for path in paths for stage, _ in path[1:])
    most = rules.visits_per_stage(len(paths))
    for stage in range(1, rules.stages):
        if by_stage[stage] > most:
            found.append(f"stage {stage} has {by_stage[stage]} visits: expected at most {most}")
    for node, visits in sorted(Counter(node for path in paths for _, node in path).items()):
        if visits > rules.memory:
            found.append(f"node {node} has {visits} visits: expected at most {rules.memory}")
    found += _collisions(intervals)
    return found


def _broken_order(rules: RouteRules, path: LanePath) -> Iterator[str]:
    order = [stage for stage, _ in path]
    if not order or order[0] != 0:
        yield f"begins with stage {order[0] if order else None}: expected 0"
        return
    if len(order) != rules.length:
        yield f"visits {len(order)} stages: expected {rules.length}"
    if len(set(order)) < len(order):
        yield f"visits a stage twice: {order}"
    frontier, swaps = 0, 0
    for stage in order[1:]:
        if stage < frontier:
            swaps += 1
            if stage < frontier - 1:
                yield f"visits stage {stage} after {frontier}: expected neighbours to swap"
        elif stage > frontier + rules.look_ahead:
            yield f"goes from stage {frontier} to {stage}: expected at most {rules.look_ahead} on"
        frontier = max(frontier, stage)
    if swaps > rules.swaps:
        yield f"swaps {swaps} times: expected at most {rules.swaps}"


def _collisions(intervals: Iterable[tuple[int, float, float, int, bool]]) -> Iterator[str]:
    by_node: dict[int, list[tuple[float, float, int, bool]]] = {}
    for node, begin, end, microbatch, forward in intervals:
        by_node.setdefault(node, []).append((begin, end, microbatch, forward))
    for node, jobs in by_node.items():
        jobs.sort()
        for k, (begin, end, m, forward) in enumerate(jobs):
            for other, _, n, other_forward in jobs[k + 1 :]:
                if other >= end - 1e-9:
                    break
                if n != m and (forward or other_forward):
                    yield (
                        f"microbatches {m} and {n} are on node {node} at once, from second "
                        f"{max(begin, other):.3f}"
                    )
