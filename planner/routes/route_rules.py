"""What a route that skips and reorders may do (SkipPipe, arXiv 2502.19913), and the proof of it.

    order       stages of one microbatch in the order of its visits; stage 0 comes first
    frontier    the furthest stage that was visited so far
    swap        a visit of a stage below the frontier; it has to be the one just below
    lane        one microbatch on its way through a first node at a time; a node of stage 0 has as
                many lanes as it keeps microbatches
    wave        one microbatch of each lane; in every wave each stage gets the same number of visits

After its last stage a microbatch goes back to its first node for the loss, and the backward takes
the same way in reverse.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

__all__ = ["LanePath", "Order", "RouteRules", "broken_rules", "orders_of", "stage_sets"]

Order = tuple[int, ...]
LanePath = tuple[tuple[int, int], ...]
"""The visits of one microbatch: (stage, node)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteRules:
    """The rules of a search; those of SkipPipe's experiment, with 6 stages and 4 visits, as
    defaults. Raises ValueError for rules that no route can keep."""

    stages: int = 6
    length: int = 4
    """Stages that a microbatch visits, the first one included."""
    swaps: int = 2
    """The most swaps of a route; 0: stages in order."""
    look_ahead: int = 4
    """The most stages that the next visit is away from the frontier."""
    memory: int = 3
    """Microbatches that a node takes in one wave."""

    def __post_init__(self) -> None:
        if not 2 <= self.length <= self.stages:
            raise ValueError(
                f"routes of {self.length} stages: expected 2 to {self.stages}, which there are"
            )
        if self.memory < 1 or self.swaps < 0 or self.look_ahead < 1:
            raise ValueError(
                f"memory {self.memory}, swaps {self.swaps}, look-ahead {self.look_ahead}: expected "
                "at least 1, 0 and 1"
            )
        if self.look_ahead * (self.length - 1) < self.stages - 1:
            raise ValueError(
                f"stage {self.stages - 1} is never visited: {self.length - 1} visits, each at most "
                f"{self.look_ahead} stages further, end at {self.look_ahead * (self.length - 1)}"
            )

    def visits_per_stage(self, lanes: int) -> int:
        """Visits of each stage but the first in one wave of so many microbatches: the same for all,
        rounded up."""
        return -(-lanes * (self.length - 1) // (self.stages - 1))


def stage_sets(rules: RouteRules) -> Iterator[tuple[int, ...]]:
    """Sets of stages that an order may visit, ascending, 0 included."""

    def longer(found: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(found) == rules.length:
            yield found
            return
        for stage in range(found[-1] + 1, min(rules.stages, found[-1] + rules.look_ahead + 1)):
            yield from longer((*found, stage))

    return longer((0,))


@lru_cache(maxsize=100_000)
def orders_of(rules: RouteRules, stages: tuple[int, ...]) -> tuple[Order, ...]:
    """The permitted orders of a set of stages (ascending, 0 included); the ascending one, where it
    is permitted, comes first."""
    found: list[Order] = []

    def longer(order: Order, frontier: int, swaps: int, rest: tuple[int, ...]) -> None:
        if not rest:
            found.append(order)
        # Whatever is two or more below the frontier can never be visited any more.
        elif rest[0] >= frontier - 1:
            for stage in rest:
                swapped = stage < frontier
                if stage > frontier + rules.look_ahead or swaps + swapped > rules.swaps:
                    break
                left = tuple(s for s in rest if s != stage)
                longer((*order, stage), max(frontier, stage), swaps + swapped, left)

    longer((0,), 0, 0, stages[1:])
    return tuple(sorted(found, key=lambda order: (order != stages, order)))


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
