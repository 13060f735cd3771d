"""Routes: what crosses stages for a microbatch that leaves some of them out, or visits neighbours
the other way round.

A stage may be left out, and two neighbours a and a + 1 may change places, where they are links of a
chain: one value goes in, one out of each, all of one spec and each with a gradient that comes back.
CheckFree+ (arXiv 2506.15461, section 4.3) lets stages change places so that they learn each other's
part, SkipPipe (arXiv 2502.19913, section 3) leaves some out in each microbatch. With x, y and z for
the values into a, from a to a + 1 and out of a + 1, and `y as z` for a value that is made under the
one name and taken under the other:

    in order     x -> a      y -> a + 1     z -> a + 2
    swapped      x as y -> a + 1     z as x -> a     y as z -> a + 2
    without a    x as y -> a + 1     z -> a + 2

Whatever else such a stage takes has to come from a stage before all of them.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from .cut import Port, Stage
from .plan import Plan, PlanError, Route, swapped_pairs

__all__ = [
    "IN_ORDER",
    "Crossing",
    "Segment",
    "crossings",
    "routes_digest",
    "segments",
    "swapped_digest",
    "swaps",
    "why_not_moved",
]

IN_ORDER = ""
"""`routes_digest` where every microbatch goes through the whole graph in order."""


class Crossing(NamedTuple):
    """One value on its way from the stage that makes it to one that takes it."""

    source: int
    made: str
    """Its name there."""
    target: int
    taken: str
    """Its name here; of one spec."""
    grad: bool
    """Whether its gradient comes back."""
    late: bool
    """Whether the target is the loss's stage and takes it with its backward."""


class Segment(NamedTuple):
    """Operators [start, stop) of the full graph, and by value that they read under another name
    than it was made: that name."""

    start: int
    stop: int
    renamed: tuple[tuple[str, str], ...]
    """(taken, made)."""


def moved(route: Route) -> tuple[tuple[int, int], ...]:
    """Steps of a route from a stage to another one than the next."""
    return tuple((a, b) for a, b in pairwise(v.stage for v in route) if b != a + 1)


def swaps(plan: Plan, share: float = 0.0) -> tuple[tuple[int, int], ...]:
    """Return the pairs of stages that change places in some microbatch, ascending; with a share, in
    at least that share of a step's microbatches."""
    times = Counter(pair for route in plan.routes for pair in swapped_pairs(route))
    return tuple(sorted(pair for pair, n in times.items() if n >= share * len(plan.routes)))


def routes_digest(plan: Plan, until: int | None = None) -> str:
    """Say in one word through which operators each microbatch goes, in which order, in all steps,
    or in those below `until`: steps of two plans of one graph have the same loss if and only if the
    words are equal. 16 hex digits, or `IN_ORDER`, besides the numbers of full steps."""
    full = plan.full
    if full is None or until == 0:
        return _routes_digest(plan)
    last = full.since if until is None else min(full.since, until)
    if full.before >= last or (own := _routes_digest(plan)) == IN_ORDER:
        return IN_ORDER
    ends = f"-{full.since}" if until is None or full.since < until else ""
    return f"{own}:{full.before}{ends}" if full.before or ends else own


def _routes_digest(plan: Plan) -> str:
    bounds = [(s.start, s.stop) for s in plan.stages]
    distinct = {id(route): route for route in plan.routes}
    known = {key: _joined(bounds[v.stage] for v in route) for key, route in distinct.items()}
    return _digest([known[id(route)] for route in plan.routes], plan.stages[-1].stop)


def swapped_digest(plan: Plan, swapped: Iterable[tuple[int, int, int]]) -> str:
    """`routes_digest` of a plan with as many microbatches and operators, in whose every second one
    operators [a, b) and [b, c) change places, in pairs that do not overlap: all that checkpoints
    said of routes once."""
    last, at, pieces = plan.stages[-1].stop, 0, list[tuple[int, int]]()
    for a, b, c in sorted(swapped):
        pieces += [(at, a), (b, c), (a, b)]
        at = c
    pieces = [(a, b) for a, b in (*pieces, (at, last)) if a < b]
    moved = _joined(pieces)
    return _digest([moved if m % 2 else ((0, last),) for m in range(len(plan.routes))], last)


_Pieces = tuple[tuple[int, int], ...]
"""Operators [start, stop) in the order in which a microbatch goes through them."""


def _joined(pieces: Iterable[tuple[int, int]]) -> _Pieces:
    found: list[tuple[int, int]] = []
    for start, stop in pieces:
        if found and found[-1][1] == start:
            start = found.pop()[0]
        found.append((start, stop))
    return tuple(found)


def _digest(orders: Sequence[_Pieces], operators: int) -> str:
    if {*orders} == {((0, operators),)}:
        return IN_ORDER
    return hashlib.sha256(repr(orders).encode()).hexdigest()[:16]


def crossings(stages: Sequence[Stage], route: Route) -> tuple[Crossing, ...]:
    """What crosses stages for a microbatch on this route, by source and value, chains last. Raises
    PlanError where its stages cannot be visited so."""
    order, links = [v.stage for v in route], dict[int, Port]()
    visited, steps = set(order), moved(route)
    for k in sorted({*range(len(stages))} - visited | {k for p in swapped_pairs(route) for k in p}):
        if why := why_not_moved(stages, k):
            how = "visits another order with" if k in visited else "leaves out"
            raise PlanError(f"a microbatch {how} stage {k}, which {why}")
        links |= {i: link for i in (k - 1, k) if (link := _link(stages, i))}
    for s, t in steps:
        if links[s].spec != links[t - 1].spec:
            raise PlanError(
                f"a microbatch goes from stage {s} to stage {t}, which cannot be, as "
                f"{links[s].spec} comes from the one and the other takes {links[t - 1].spec}"
            )
    chained = {link.value for link in links.values()}
    found = [
        Crossing(k.index, p.value, t, p.value, t in p.grad_targets, t < k.index)
        for k in stages
        if k.index in visited
        for p in k.sends
        if p.value not in chained
        for t in p.targets
        if t in visited
    ]
    for s, t in pairwise(order):
        if s in links:
            found.append(Crossing(s, links[s].value, t, links[t - 1].value, True, False))
    return tuple(found)


def segments(stages: Sequence[Stage], route: Route) -> tuple[Segment, ...]:
    """What a microbatch on this route computes, as pieces of the plain loop in their order."""
    crossed = crossings(stages, route)
    return tuple(
        Segment(
            stages[k].start,
            stages[k].stop,
            tuple((c.taken, c.made) for c in crossed if c.target == k and c.taken != c.made),
        )
        for k in (v.stage for v in route)
    )


def why_not_moved(stages: Sequence[Stage], k: int) -> str:
    """Why no microbatch may leave stage k out, or visit it in another order; empty: it may."""
    if not 0 < k < len(stages) - 1:
        return "has no stage before it and one behind it"
    if stages[k].makes_loss:
        return "makes the loss: what follows needs it"
    before, behind = _link(stages, k - 1), _link(stages, k)
    for i, link in ((k - 1, before), (k, behind)):
        if link is None:
            return f"cannot be, as not one value alone, with a gradient, goes from {i} to {i + 1}"
    assert before is not None
    assert behind is not None
    if before.spec != behind.spec:
        return f"cannot be, as what goes in and out differs: {before.spec}, {behind.spec}"
    if others := [p.value for p in stages[k].sends if p != behind]:
        return f"cannot be, as it also makes {others[0]} for others"
    return ""


def _link(stages: Sequence[Stage], k: int) -> Port | None:
    """What goes from stage k to k + 1 and to nobody else, with a gradient, if it is one value."""
    found = [p for p in stages[k].sends if p.targets == (k + 1,) == p.grad_targets]
    return found[0] if len(found) == 1 else None
