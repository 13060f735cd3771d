"""What crosses stages, also for a microbatch that visits some of them in another order.

Two neighbouring stages a and a + 1 may change places on a microbatch's route where they are links
of a chain: one value goes into a, one from a to a + 1, one out of a + 1, all of one spec, and each
with a gradient that comes back. CheckFree+ (arXiv 2506.15461, section 4.3) lets the first two and
the last two stages of blocks change places in half the microbatches, so that they learn each
other's part. With x, y and z for the three values, and e.g. `y as z` for a value that is made under
the one name and taken under the other:

    in order     x -> a      y -> a + 1     z -> a + 2
    swapped      x as y -> a + 1     z as x -> a     y as z -> a + 2

Whatever else a or a + 1 takes has to come from a stage before both.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from .cut import Port, Stage
from .plan import Plan, PlanError, Route, swapped_pairs

__all__ = [
    "Crossing",
    "Segment",
    "crossings",
    "segments",
    "swapped_operators",
    "swaps",
    "why_not_swapped",
]


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


def swaps(plan: Plan) -> tuple[tuple[int, int], ...]:
    """The pairs of stages that change places in some microbatch, ascending."""
    return tuple(sorted({pair for route in plan.routes for pair in swapped_pairs(route)}))


def swapped_operators(plan: Plan) -> tuple[tuple[int, int, int], ...]:
    """The swaps of a plan as operators of the graph: [a, b) and [b, c) change places."""
    slots = plan.stages
    return tuple((slots[a].start, slots[a].stop, slots[b].stop) for a, b in swaps(plan))


def crossings(stages: Sequence[Stage], route: Route) -> tuple[Crossing, ...]:
    """What crosses stages for a microbatch on this route, by source and value, chains last. Raises
    PlanError where its stages cannot be visited in that order."""
    order, links = [v.stage for v in route], dict[int, Port]()
    for a, b in swapped_pairs(route):
        if why := why_not_swapped(stages, a):
            raise PlanError(f"a microbatch visits stage {b} before stage {a}, which {why}")
        links |= {k: link for k in (a - 1, a, b) if (link := _link(stages, k))}
    chained = {link.value for link in links.values()}
    found = [
        Crossing(k.index, p.value, t, p.value, t in p.grad_targets, t < k.index)
        for k in stages
        for p in k.sends
        if p.value not in chained
        for t in p.targets
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


def why_not_swapped(stages: Sequence[Stage], a: int) -> str:
    """Why stages a and a + 1 cannot change places; empty: they can."""
    b = a + 1
    if a < 1 or b > len(stages) - 2:
        return "is no pair with a stage before and a stage behind it"
    if stages[a].makes_loss or stages[b].makes_loss:
        return "makes the loss: what follows needs it"
    links = [_link(stages, k) for k in (a - 1, a, b)]
    for k, link in zip((a - 1, a, b), links, strict=True):
        if link is None:
            return f"cannot be, as not one value alone, with a gradient, goes from {k} to {k + 1}"
    specs = {link.spec for link in links if link is not None}
    if len(specs) > 1:
        return f"cannot be, as what goes in and out differs: {', '.join(map(repr, specs))}"
    for k, link in zip((a, b), links[1:], strict=True):
        if others := [p.value for p in stages[k].sends if p != link]:
            return f"cannot be, as stage {k} also makes {others[0]} for others"
    return ""


def _link(stages: Sequence[Stage], k: int) -> Port | None:
    """What goes from stage k to k + 1 and to nobody else, with a gradient, if it is one value."""
    found = [p for p in stages[k].sends if p.targets == (k + 1,) == p.grad_targets]
    return found[0] if len(found) == 1 else None
