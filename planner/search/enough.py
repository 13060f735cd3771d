"""What would be enough where nothing fits: the smallest changes, each found to fit by the judge.

More memory on a peer, more peers like the largest, recomputation, smaller microbatches, an
optimizer without state, and training only a small part of the model (`model.freeze`, LoRA): each is
another request, for which a pipeline is looked for as `shortage.fitting` does. Of a large model it
may cut at MOST_OPERATORS places only, so what is said to be enough is enough, and a little less may
be as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ...job.words import count_of, size_text
from ..base.interface import NoPlan, PlanRequest
from ..cost.cost_model import CostModel
from ..cost.shortage import fitting, recomputes, shortage

__all__ = ["no_plan"]

MOST_LOOKED = 4
"""Peers with most memory whose memory is let grow."""
SMALL_PART = 0.1
"""Of the bytes of all parameters."""
MOST_JOINING = 256
"""Peers like the largest that are let come."""


def no_plan(judge: CostModel) -> NoPlan:
    """Say what is short, by how much, and the smallest changes that were found to help."""
    short = shortage(judge)
    helps, text = list(_helps(judge)), short.reason
    if helps:
        text += f"; what would be enough: {', or '.join(helps)}"
    size = judge.request.microbatch_size
    if size > 1 and not judge.request.others:
        text += f"; a smaller train.microbatch than {size} keeps less, too"
    return NoPlan(text, short.code, short.short_bytes)


def _helps(judge: CostModel) -> Iterator[str]:
    request, rooms = judge.request, [o.device_memory_bytes for o in judge.offers]
    yield from _more_memory(judge, rooms)
    if request.options.recompute is False and _enough(judge, rooms, (True,)):
        yield 'plan.recompute = "auto"'
    yield from _smaller(request, rooms)
    if request.options.optimizer_slots:
        options = replace(request.options, optimizer_slots=0, state_bytes=0)
        if _enough(CostModel(replace(request, options=options, known_costs=judge.costs)), rooms):
            yield 'train.optimizer = "sgd" with momentum = 0, which keeps no state'
    yield from _a_small_part(judge, rooms)


def _enough(judge: CostModel, rooms: Sequence[int], again: Sequence[bool] | None = None) -> bool:
    """Whether peers with so much memory could run it. `again`: whether stages may recompute."""
    tried = recomputes(judge) if again is None else again
    return any(fitting(judge, rooms, r) is not None for r in tried)


def _more_memory(judge: CostModel, rooms: list[int]) -> Iterator[str]:
    """The least on one peer, over the peers with most memory; and the fewest like the largest."""
    needed = judge.stage_bytes(0, judge.operators, judge.request.microbatches, 1)
    ranked = sorted(range(len(rooms)), key=lambda p: (-rooms[p], p))
    best: tuple[int, int] | None = None
    for p in ranked[:MOST_LOOKED]:

        def more(size: int, p: int = p) -> list[int]:
            return [r + size * (i == p) for i, r in enumerate(rooms)]

        if not _enough(judge, more(needed)):
            continue
        low, high = 0, needed
        while high - low > max(1, high // 256):
            middle = (low + high) // 2
            low, high = (low, middle) if _enough(judge, more(middle)) else (middle, high)
        if best is None or high < best[0]:
            best = (high, p)
    largest = judge.offers[ranked[0]]
    if best is not None:
        yield f"{size_text(best[0])} more memory on {judge.offers[best[1]]}"
    if judge.request.options.stages is None:
        count = _joining(judge, rooms, largest.device_memory_bytes)
        if count:
            yield (
                f"{count_of(count, 'more peer')} with the {size_text(largest.device_memory_bytes)} "
                f"of {largest}"
            )


def _joining(judge: CostModel, rooms: list[int], room: int) -> int:
    """The fewest more peers with so much memory that are enough; 0: not even MOST_JOINING."""
    high = 1
    while not _enough(judge, rooms + [room] * high):
        high *= 2
        if high > MOST_JOINING:
            return 0
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _enough(judge, rooms + [room] * middle) else (middle, high)
    return high


def _smaller(request: PlanRequest, rooms: list[int]) -> Iterator[str]:
    """Yield, in words, the largest smaller microbatch that would be enough."""
    for other in sorted(request.others, key=lambda o: -o.microbatch_size):
        smaller = other.microbatch_size < request.microbatch_size and other.head_parts == 0
        if smaller and _enough(CostModel(other), rooms):
            yield f"a microbatch of {other.microbatch_size} instead of {request.microbatch_size}"
            return


def _a_small_part(judge: CostModel, rooms: list[int]) -> Iterator[str]:
    """Frozen weights have no gradient and no optimizer state. What their operators keep for the
    gradients of others stays counted, so this is an upper bound of what such a run takes."""
    request, graph = judge.request, judge.request.graph
    trained = sum(p.spec.size_bytes for p in graph.parameters if p.trainable)
    if trained <= SMALL_PART * sum(p.spec.size_bytes for p in graph.parameters):
        return  # it does that already, as with LoRA
    frozen = tuple(replace(p, trainable=False) for p in graph.parameters)
    part = replace(request, graph=replace(graph, parameters=frozen), known_costs=judge.costs)
    if _enough(CostModel(part), rooms):
        size = sum(p.spec.size_bytes for p in graph.parameters)
        yield (
            "training a small part of the model only (model.freeze, or LoRA): its "
            f"{size_text(size)} of weights fit where they need no gradients and optimizer state"
        )
