"""Routes to begin a search with: equal visits of stages and nodes, blind to the network."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from .route_rules import LanePath, Order, RouteRules

__all__ = ["even_orders", "first_paths", "placed"]


def placed(sizes: Sequence[int], nodes: int) -> tuple[int, ...]:
    """The stage of each node when they are dealt out by number; `sizes`: nodes by stage. Nodes that
    are left over have stage -1."""
    found = tuple(stage for stage, size in enumerate(sizes) for _ in range(size))
    return found + (-1,) * (nodes - len(found))


def even_orders(rules: RouteRules, lanes: int) -> list[Order]:
    """An ascending order for each lane, so that every stage but the first gets the same number of
    visits, or one less. Raises ValueError when the look-ahead allows none."""
    counts = [0] * rules.stages
    most = rules.visits_per_stage(lanes)
    found: list[tuple[int, ...]] = []
    for _ in range(lanes):
        order = _rarest(rules, counts)
        found.append(order)
        for stage in order[1:]:
            counts[stage] += 1
    # What is left uneven goes from stages with too many visits to others, one visit at a time.
    for _ in range(lanes * rules.length * rules.stages):
        high = max(range(1, rules.stages), key=lambda s: counts[s])
        if counts[high] <= most:
            return found
        if not _relieved(rules, found, counts, high):
            break
    raise ValueError(
        f"no equal visits of {rules.stages} stages by {lanes} microbatches of {rules.length} "
        f"visits, each at most {rules.look_ahead} stages further: expected more microbatches, "
        "longer routes, or a longer look-ahead"
    )


def _rarest(rules: RouteRules, counts: Sequence[int]) -> Order:
    """The ascending order whose stages have fewest visits so far, summed up."""
    best: dict[int, tuple[int, Order]] = {0: (0, (0,))}
    for _ in range(rules.length - 1):
        after: dict[int, tuple[int, Order]] = {}
        for last, (cost, order) in best.items():
            for stage in range(last + 1, min(rules.stages, last + rules.look_ahead + 1)):
                known = after.get(stage)
                # Squares, so that no single stage is far above the others.
                now = (cost + (counts[stage] + 1) ** 2, (*order, stage))
                if known is None or now < known:
                    after[stage] = now
        best = after
    return min(best.values())[1]


def _relieved(
    rules: RouteRules, orders: list[tuple[int, ...]], counts: list[int], high: int
) -> bool:
    """Whether some order visits a rarer stage in place of `high` now."""
    for low in sorted(range(1, rules.stages), key=lambda s: counts[s]):
        if counts[low] >= counts[high] - 1:
            return False
        for i, order in enumerate(orders):
            if high in order and low not in order:
                changed = tuple(sorted({*order, low} - {high}))
                if all(b - a <= rules.look_ahead for a, b in pairwise(changed)):
                    orders[i] = changed
                    counts[high] -= 1
                    counts[low] += 1
                    return True
    return False


def first_paths(rules: RouteRules, sizes: Sequence[int]) -> list[LanePath]:
    """The paths of one wave over nodes that are dealt out by number. Raises ValueError when its
    nodes have not enough places for it."""
    if len(sizes) != rules.stages:
        raise ValueError(f"nodes of {len(sizes)} stages: expected those of {rules.stages}")
    lanes = sizes[0] * rules.memory
    most = rules.visits_per_stage(lanes)
    for stage, size in enumerate(sizes[1:], 1):
        if size * rules.memory < most:
            raise ValueError(
                f"stage {stage} has {size} nodes for {most} visits of a wave: expected at least "
                f"{-(-most // rules.memory)}, with {rules.memory} microbatches in memory each"
            )
    first = [sum(sizes[:stage]) for stage in range(rules.stages)]
    turn = [0] * rules.stages
    paths = []
    for lane, order in enumerate(even_orders(rules, lanes)):
        visits = [(0, lane // rules.memory)]
        for stage in order[1:]:
            visits.append((stage, first[stage] + turn[stage] % sizes[stage]))
            turn[stage] += 1
        paths.append(tuple(visits))
    return paths
