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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ...dag.plan.action import VISITS, Action
from ...dag.plan.plan import PeerId, ScheduleName
from ...dag.schedule.orders import one_f_one_b, zero_bubble
from ...dag.schedule.orders.list_scheduler import Visited
from ...dag.schedule.orders.schedules import DEFAULT, TIMED, ZERO_BUBBLE
from ..cost.candidate import Candidate
from ..cost.cost_model import CostModel

__all__ = ["MOST_VISITS", "Deepened", "deepened", "deeper", "listed_with", "rooms"]

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


def deepened(judge: CostModel, candidate: Candidate) -> Deepened:
    """The candidate, as deep as makes its step shortest; listed in any case where the request asks
    for that, with at most so many in flight where it says how many. Infinite seconds where memory
    has no room for so many."""
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
        deep = _deepest(judge, candidate, name)
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
        listed = _Lister(judge, candidate, name).under(dict.fromkeys(range(len(has)), most))
        if listed.seconds < found.seconds * (1 - 1e-9):
            undivided = found.seconds if name == ZERO_BUBBLE else _NEVER
            found = replace(listed, undivided_s=undivided)
    return found


def _names(judge: CostModel) -> tuple[ScheduleName, ...]:
    """Names of the schedules that are tried."""
    asked = judge.request.options.schedule
    return (asked,) if asked in TIMED else TIMED


def _deepest(judge: CostModel, candidate: Candidate, name: ScheduleName) -> Deepened:
    """The shortest step under one schedule, with what was tried."""
    lister, has = _Lister(judge, candidate, name), rooms(judge, candidate, name)
    found = Deepened(candidate, _NEVER)
    tried: dict[int, float] = {}
    seen: set[object] = set()
    for bounds in deeper(has):
        listed = lister.under(bounds)
        if listed.candidate.visits in seen:
            break
        seen.add(listed.candidate.visits)
        if listed.seconds < _NEVER:
            for most, seconds in listed.tried:
                tried[most] = min(seconds, tried.get(most, seconds))
        if listed.seconds < found.seconds * (1 - 1e-9):
            found = listed
    return replace(found, tried=tuple(sorted(tried.items())))


class _Lister:
    """Lists the visits of one candidate under one schedule."""

    def __init__(self, judge: CostModel, candidate: Candidate, name: ScheduleName) -> None:
        self._judge, self._name = judge, name
        if name == ZERO_BUBBLE:  # its actions are others than those of the candidate's schedule
            candidate = replace(candidate, schedule=name, visits=())
        self._candidate = candidate
        self._times = _Times(judge, candidate)

    def under(self, bounds: Mapping[int, int]) -> Deepened:
        """The candidate with at most so many microbatches live in each stage."""
        judge, structure = self._judge, self._judge.structure(self._candidate)
        plan, stages = structure.plan, structure.stages
        if self._name == ZERO_BUBBLE:
            waiting = self._waiting(bounds)
            lists = zero_bubble.order(plan, stages, self._times, bounds, waiting)
        else:
            lists = one_f_one_b.order(plan, stages, self._times, bounds)
        visits = tuple(tuple(lists[p]) for p in plan.peers)
        found = replace(self._candidate, schedule=self._name, visits=visits)
        seconds = judge.seconds(found)
        most = max(judge.structure(found).peak_live.values())
        return Deepened(found, seconds, ((most, seconds),))

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
        low, high = 0, count
        while low < high:
            middle = (low + high + 1) // 2
            needed = judge.stage_bytes(start, stop, middle, len(holders) > 1, recompute)
            low, high = (middle, high) if needed <= room else (low, middle - 1)
        found.append(low)
    return found


def deeper(has: Sequence[int]) -> Iterator[Mapping[int, int]]:
    """Deeper and deeper bounds by stage, from the textbook's to what memory has room for."""
    more, stages = 0, len(has)
    while True:
        yield {k: max(1, min(has[k], stages - k + more)) for k in range(stages)}
        if all(stages - k + more >= has[k] for k in range(stages)):
            return
        more = max(1, 2 * more)


class _Times:
    """Seconds of the visits and messages of a candidate on its peers and links; what several
    messages of one uplink take from one another is left to the judge."""

    def __init__(self, judge: CostModel, candidate: Candidate) -> None:
        structure, peers = judge.structure(candidate), list(candidate.peers)
        wiring, program = structure.wiring, structure.wiring.program
        seconds: list[float] = structure.row_seconds(judge.per_unit[peers]).tolist()
        self._visit = {
            (program.peers[i], action.kind, action.stage): seconds[row]
            for row, (i, action) in enumerate(wiring.kinds)
        }
        self._message: dict[tuple[Visited, Visited], tuple[float, float]] = {}
        for giver, taker, size in zip(
            program.giver, program.taker, structure.size_bytes, strict=True
        ):
            a, b = program.actions[giver], program.actions[taker]
            if a.kind in VISITS and b.kind in VISITS:
                i, j = program.owner[giver], program.owner[taker]
                ends = (
                    (program.peers[i], a.kind, a.stage),
                    (program.peers[j], b.kind, b.stage),
                )
                p, q = peers[i], peers[j]
                hold = size / float(judge.rates[p, q])
                self._message[ends] = hold, float(judge.network.latency_s[p, q])

    def visit(self, peer: PeerId, action: Action) -> float:
        return self._visit[peer, action.kind, action.stage]

    def message(self, source: Visited, target: Visited) -> tuple[float, float]:
        return self._message.get((source, target), (0.0, 0.0))
