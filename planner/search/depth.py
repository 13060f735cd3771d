"""Depth: how many microbatches a stage has on their way, where a message takes as long as a stage,
and whether gradients of weights wait for idle moments.

1F1B keeps K - i live in stage i of K, which is right where a hop costs nothing. On a WAN the first
gradient comes back later than that, and the stage waits. So the visits of a candidate are listed
anew with the real times of its peers and links, backward before forward, under deeper and deeper
bounds: each stage as deep as its memory allows at most. They are listed twice: with backwards as
they are, and with the gradients of weights apart (zero bubble), of which as many microbatches wait
as the rest of the memory has room for. What the step takes then, the judge says.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ...dag.plan.plan import PeerId, ScheduleName, Visits
from ...dag.schedule.orders import one_f_one_b, zero_bubble
from ...dag.schedule.orders.schedules import DEFAULT, TIMED, ZERO_BUBBLE
from ..cost.candidate import Candidate
from ..cost.cost_model import CostModel
from ..cost.plan_cost import RouteSeconds

__all__ = ["MOST_VISITS", "Deepened", "Lister", "deepened", "deeper", "listed_with", "rooms"]

MOST_VISITS = 20_000
"""Visits of a step up to which it is tried: each try compiles a program of its own."""
_NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class Deepened:
    """What depth makes of a candidate."""

    candidate: Candidate
    """With the visits listed that make its step shortest, with the fewest in flight among equals;
    None listed: its schedule's own are as good."""
    seconds: float
    """Of its step."""
    tried: tuple[tuple[int, float], ...] = ()
    """The most microbatches that a peer keeps at once, ascending, and seconds of the step with
    them; of what fits the memory."""
    undivided_s: float = _NEVER
    """Where gradients of weights are apart: seconds of the shortest step without."""


def deepened(
    judge: CostModel,
    candidate: Candidate,
    most_judged: int | None = None,
    under_s: float = _NEVER,
) -> Deepened:
    """The candidate, as deep as makes its step shortest; listed in any case where the request asks
    for that, with at most so many in flight where it says how many. Infinite seconds where memory
    has no room for so many. `most_judged`: of each schedule so many depths are judged, those with
    the shortest steps where no link is shared, and none that is not below `under_s` even then;
    None: all."""
    options = judge.request.options
    if options.in_flight is not None:
        return listed_with(judge, candidate, options.in_flight)
    asked = options.schedule
    plain = replace(candidate, schedule=asked) if asked in TIMED else candidate
    own = Deepened(plain, judge.seconds(plain))
    structure = judge.structure(candidate)
    visits = len(structure.plan.routes) * len(structure.stages)
    if visits > MOST_VISITS or len(structure.plan.peers) < 2:
        return own
    found = own
    for name in _names(judge):
        under = _NEVER if asked in TIMED else min(under_s, found.seconds)
        deep = _deepest(judge, candidate, name, most_judged, under)
        if deep.seconds == _NEVER:
            continue
        first = asked in TIMED and not found.candidate.visits
        if first or deep.seconds < found.seconds * (1 - 1e-9):
            apart = name == ZERO_BUBBLE and asked not in TIMED
            found = replace(deep, undivided_s=found.seconds) if apart else deep
    return found


def listed_with(judge: CostModel, candidate: Candidate, most: int) -> Deepened:
    """The candidate with at most so many microbatches in flight at each stage; infinite seconds
    where a stage has no memory for them, or a peer for those of all of its stages."""
    wanted, found = min(most, max(candidate.microbatches)), Deepened(candidate, _NEVER)
    for name in _names(judge):
        has = rooms(judge, candidate, name)
        if min(has) < wanted:
            continue
        visits, _ = Lister(judge, candidate, name).visits(dict.fromkeys(range(len(has)), most))
        listed = _judged(judge, replace(candidate, schedule=name, visits=visits))
        if listed.seconds < found.seconds * (1 - 1e-9):
            undivided = found.seconds if name == ZERO_BUBBLE else _NEVER
            found = replace(listed, undivided_s=undivided)
    return found


def _names(judge: CostModel) -> tuple[ScheduleName, ...]:
    """Names of the schedules that are tried."""
    asked = judge.request.options.schedule
    return (asked,) if asked in TIMED else TIMED


def _deepest(
    judge: CostModel,
    candidate: Candidate,
    name: ScheduleName,
    most_judged: int | None,
    under_s: float,
) -> Deepened:
    """The shortest step under one schedule, with what was tried."""
    has, listed = rooms(judge, candidate, name), dict[Visits, tuple[float, int]]()
    for first_whole in (False, True) if name == ZERO_BUBBLE else (False,):
        lister = Lister(judge, candidate, name, first_whole=first_whole)
        for bounds in deeper(has):
            visits, seconds = lister.visits(bounds)
            listed.setdefault(visits, (seconds, len(listed)))
    found, tried = Deepened(candidate, _NEVER), dict[int, float]()
    for visits in sorted(listed, key=listed.__getitem__):
        # Links that are shared only make it longer.
        if most_judged is not None and listed[visits][0] >= min(under_s, found.seconds):
            break
        one = _judged(judge, replace(candidate, schedule=name, visits=visits))
        for most, seconds in one.tried:
            tried[most] = min(seconds, tried.get(most, seconds))
        if one.seconds < found.seconds * (1 - 1e-9):
            found = one
        if len(tried) == most_judged:
            break
    return replace(found, tried=tuple(sorted(tried.items())))


def _judged(judge: CostModel, candidate: Candidate) -> Deepened:
    seconds = judge.seconds(candidate)
    if seconds == _NEVER:
        return Deepened(candidate, _NEVER)
    most = max(judge.structure(candidate).peak_live.values())
    return Deepened(candidate, seconds, ((most, seconds),))


class Lister:
    """Lists the visits of one candidate under one schedule."""

    def __init__(
        self,
        judge: CostModel,
        candidate: Candidate,
        name: ScheduleName,
        *,
        first_whole: bool = False,
    ) -> None:
        """`first_whole`: whether the first stage, whose gradients nobody waits for, keeps its
        backwards as they are under zero bubble."""
        self._judge, self._name, self._candidate = judge, name, candidate
        names = {PeerId(f"p{i}"): p for i, p in enumerate(candidate.peers)}
        form = replace(candidate, schedule=name, visits=())
        self._plan = judge.bare_plan(judge.form(form), [*names])
        self._stages = judge.stages(self._plan)
        self._whole = (0,) if first_whole else ()
        self._times = RouteSeconds(judge, self._plan, self._stages, names, self._whole)

    def visits(self, bounds: Mapping[int, int], *, free: bool = False) -> tuple[Visits, float]:
        """The visits of every peer with at most so many microbatches live in each stage, and when
        the last one ends if no link is shared. `free`: as many gradients of weights may wait as
        there are microbatches, whatever they keep."""
        plan, stages, times = self._plan, self._stages, self._times
        if self._name == ZERO_BUBBLE:
            waiting = dict.fromkeys(bounds, len(plan.routes)) if free else self._waiting(bounds)
            lists = zero_bubble.order(plan, stages, times, bounds, waiting, self._whole)
        else:
            lists = one_f_one_b.order(plan, stages, times, bounds)
        return tuple(tuple(lists[p]) for p in plan.peers), lists.ended_s

    def _waiting(self, bounds: Mapping[int, int]) -> dict[int, int]:
        """By stage, for how many gradients of weights there is memory beside what is live; one at
        least, of which the judge may say that it does not fit."""
        judge, found = self._judge, {}
        for k, (start, stop, holders, recompute) in enumerate(self._candidate.slots()):
            room = min(judge.offers[p].device_memory_bytes for p in holders)
            left = room - judge.stage_bytes(start, stop, bounds[k], len(holders) > 1, recompute)
            each, _ = judge.memory.waiting.of(start, stop)
            count = sum(self._candidate.microbatches)
            found[k] = max(1, min(count, left // each if each else count))
        return found


def rooms(judge: CostModel, candidate: Candidate, name: ScheduleName = DEFAULT) -> list[int]:
    """By stage, how many microbatches its holders could keep beside nothing else but, under zero
    bubble, one whose gradients of weights wait; 0: not one."""
    found, count = [], sum(candidate.microbatches)
    for start, stop, holders, recompute in candidate.slots():
        room = min(judge.offers[p].device_memory_bytes for p in holders)
        room -= judge.memory.waiting.of(start, stop)[0] if name == ZERO_BUBBLE else 0
        needs = partial(
            judge.stage_bytes, start, stop, shared=len(holders) > 1, recompute=recompute
        )
        found.append(bisect_right(range(1, count + 1), room, key=needs))
    return found


def deeper(has: Sequence[int]) -> Iterator[Mapping[int, int]]:
    """Deeper and deeper bounds by stage, from the textbook's to what memory has room for."""
    more, stages = 0, len(has)
    while True:
        yield {k: max(1, min(has[k], stages - k + more)) for k in range(stages)}
        if all(stages - k + more >= has[k] for k in range(stages)):
            return
        more = max(1, 2 * more)
