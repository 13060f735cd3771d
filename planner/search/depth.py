"""Depth: how many microbatches a stage has on their way, where a message takes as long as a stage.

1F1B keeps K - i live in stage i of K, which is right where a hop costs nothing. On a WAN the first
gradient comes back later than that, and the stage waits. So the visits of a candidate are listed
anew with the real times of its peers and links, backward before forward, under deeper and deeper
bounds: each stage as deep as its memory allows at most. What the step takes then, the judge says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...dag.plan.action import VISITS, Action
from ...dag.plan.plan import PeerId
from ...dag.schedule.orders.list_scheduler import Visited
from ...dag.schedule.orders.schedules import DEFAULT, SCHEDULES
from ..cost.candidate import Candidate
from ..cost.cost_model import CostModel

__all__ = ["MOST_VISITS", "deepened"]

MOST_VISITS = 20_000
"""Visits of a step up to which it is tried: each try compiles a program of its own."""


def deepened(judge: CostModel, candidate: Candidate) -> Candidate:
    """The candidate with the visits listed that make its step shortest, if any are better than its
    schedule's own; with the fewest in flight among equals."""
    structure = judge.structure(candidate)
    plan, stages = structure.plan, structure.stages
    if len(plan.routes) * len(stages) > MOST_VISITS or len(plan.peers) < 2:
        return candidate
    times = _Times(judge, candidate)
    best, least = candidate, judge.seconds(candidate)
    seen: set[object] = set()
    for bounds in _bounds(judge, candidate):
        lists = SCHEDULES[DEFAULT].order(plan, stages, times, bounds)
        visits = tuple(tuple(lists[p]) for p in plan.peers)
        if visits in seen:
            break
        seen.add(visits)
        found = replace(candidate, schedule=DEFAULT, visits=visits)
        seconds = judge.seconds(found)
        if seconds < least * (1 - 1e-9):
            best, least = found, seconds
    return best


def _bounds(judge: CostModel, candidate: Candidate) -> Iterator[dict[int, int]]:
    """Deeper and deeper bounds by stage, from the textbook's on."""
    slots, count = candidate.slots(), sum(candidate.microbatches)
    rooms = []
    for start, stop, holders, recompute in slots:
        room = min(judge.offers[p].device_memory_bytes for p in holders)
        low, high = 1, count
        while low < high:  # the most that fit beside nothing else
            middle = (low + high + 1) // 2
            shared = len(holders) > 1
            fits = judge.stage_bytes(start, stop, middle, shared, recompute) <= room
            low, high = (middle, high) if fits else (low, middle - 1)
        rooms.append(low)
    more, stages = 0, len(slots)
    while True:
        yield {k: min(rooms[k], stages - k + more) for k in range(stages)}
        if all(stages - k + more >= rooms[k] for k in range(stages)):
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
