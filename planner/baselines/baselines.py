"""The two planners that the literature compares with.

- `uniform`: every stage has equally many operators (GPipe's default, and the random order of the
  decentralised-training papers: joining is no order of speed or place).
- `equal_compute`: every stage takes equally long, peers faster or slower; within SLACK of the best,
  the cut with the fewest bytes across. Blind to bandwidth.

Both take peers in the order of joining: the first that are enough for the stages asked for, or, if
these have too little memory, those with most; else all of them, of whom the one with least memory
becomes a spare while no cut fits. Where equal shares do not fit, they are as equal as memory
allows. Forwards are computed again only where nothing fits without.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from ...dag.plan.report import PlanWithReport, Spare
from ...dag.schedule.orders.schedules import SCHEDULES, first_of, interleaves
from ...job.words import count_of, size_text
from ..base.interface import NoPlan, PlanRequest
from ..cost.candidate import Candidate, StageShare
from ..cost.cost_model import CostModel
from ..cost.shortage import recomputes, refuse_impossible, shortage
from ..network.pathcut import Path, least_bottleneck, possible, soonest_fill

__all__ = ["CHUNKS", "equal_compute", "uniform"]

CHUNKS = 2
"""Stages of a peer under "interleaved", where the graph has operators for them."""
SLACK = 0.05
"""How much above the best bottleneck a stage may be for a cheaper cut."""
MOST_POSITIONS = 1024
"""Positions that are tried where equal shares do not fit."""

Rows = tuple[tuple[int, ...], ...]
"""By pipeline, the peer of each stage."""


def uniform(request: PlanRequest, judge: CostModel | None = None) -> PlanWithReport:
    """Equal operators. `judge`: the request's, where there is one already. Raises NoPlan."""
    return _plan(request, judge or CostModel(request), by_operators=True)


def equal_compute(request: PlanRequest, judge: CostModel | None = None) -> PlanWithReport:
    """Equal seconds. `judge` as for `uniform`. Raises NoPlan."""
    return _plan(request, judge or CostModel(request), by_operators=False)


def _plan(request: PlanRequest, judge: CostModel, by_operators: bool) -> PlanWithReport:
    refuse_impossible(request)
    schedule, pipelines = first_of(request.options.schedule), request.options.pipelines or 1
    each, more = divmod(request.microbatches, pipelines)
    counts = tuple(each + (p < more) for p in range(pipelines))
    first: tuple[list[int], list[int]] | None = None
    for recompute, (rows, spares) in itertools.product(
        recomputes(judge), list(_rows(request, pipelines))
    ):
        stages = len(rows[0])
        live = [SCHEDULES[schedule].live(stages, k, counts[0]) for k in range(stages)]
        rooms = [_room(request, rows, k) for k in range(stages)]
        first = first or (rooms, live)
        for cuts in _cuts(judge, rows, rooms, live, recompute, by_operators):
            spans = list(itertools.pairwise(cuts))
            shares = (
                tuple(StageShare(p, *span, recompute) for p, span in zip(row, spans, strict=True))
                for row in rows
            )
            candidate = Candidate(tuple(shares), counts, schedule)
            if judge.fits(candidate):
                sizes = [b - a for a, b in spans]
                text = f"equal {'operators' if by_operators else 'compute'}: " + (
                    f"{count_of(stages, 'stage')} of {min(sizes)} to {max(sizes)} operators over "
                    "the peers in the order of joining, whatever their links"
                )
                return judge.plan(candidate, reasons=[text], spares=spares)
    assert first is not None, "there is at least one set of rows"
    raise shortage(judge, first[0], max(first[1]))


def _rows(request: PlanRequest, pipelines: int) -> Iterator[tuple[Rows, list[Spare]]]:
    """Peers by stage of each pipeline, who is left over and why; the best first, at least one."""
    offers, options, operators = request.offers, request.options, len(request.graph.operators)
    several = interleaves(options.schedule)

    def rows(peers: Sequence[int], chunks: int) -> Rows:
        each = len(peers) // pipelines
        return tuple(tuple(peers[p * each :][:each]) * chunks for p in range(pipelines))

    memory = [o.device_memory_bytes for o in offers]
    lacks = [o.peer not in request.holders for o in offers]
    left = sorted(range(len(offers)), key=lambda i: lacks[i])  # data that stays is read first
    spares: list[Spare] = []
    if (stages := options.stages) is not None:
        chunks = CHUNKS if several and stages % CHUNKS == 0 and stages >= 2 * CHUNKS else 1
        size = stages // chunks * pipelines
        if len(offers) < size:
            raise NoPlan(f"{size} peers are needed, {len(offers)} are on offer", "peers")
        why = f"the job asks for {stages} stages"
        why += f" in {pipelines} pipelines" if pipelines > 1 else ""
        largest = sorted(left, key=lambda i: (lacks[i], -memory[i]))[:size]
        for chosen in (left[:size], sorted(largest, key=left.index)):
            out = [Spare(o.peer, why) for i, o in enumerate(offers) if i not in chosen]
            yield rows(chosen, chunks), out
        return
    while (stages := len(left) // pipelines) > 0:
        if stages <= operators:
            odd = f"{len(left)} peers do not divide into {pipelines} pipelines"
            out = [*spares, *(Spare(offers[i].peer, odd) for i in left[stages * pipelines :])]
            # Stages that share a peer's memory equally may not fit where one does.
            if several and 1 < stages <= operators // CHUNKS:
                yield rows(left[: stages * pipelines], CHUNKS), out
            yield rows(left[: stages * pipelines], 1), out
        # The later one of equals goes, so that who joined first stays; of very many, several.
        for _ in range(max(1, len(left) // 16)):
            least = min(reversed(left), key=lambda i: memory[i])
            left.remove(least)
            why = f"more peers ({len(offers)}) than operators ({operators})"
            if stages <= operators:
                why = f"its memory ({size_text(memory[least])}) is the least and too small for a "
                why += "stage beside the others"
            spares.append(Spare(offers[least].peer, why))
            stages = len(left) // pipelines


def _room(request: PlanRequest, rows: Rows, stage: int) -> int:
    """Device bytes of the stage's smallest holder, divided among the stages that it has."""
    smallest = min(request.offers[row[stage]].device_memory_bytes for row in rows)
    return smallest // rows[0].count(rows[0][stage])


def _cuts(
    judge: CostModel,
    rows: Rows,
    rooms: Sequence[int],
    live: Sequence[int],
    recompute: bool,
    by_operators: bool,
) -> Iterator[tuple[int, ...]]:
    """The cut with equal shares; for operators then the most equal that fits."""
    n, stages = judge.operators, len(rooms)
    each = judge.forward_s * (1 + recompute) + judge.backward_s
    if by_operators:
        yield tuple((k * n + stages // 2) // stages for k in range(stages + 1))
        each = np.tile(np.arange(n + 1.0), (len(each), 1))
    slowest = [max((row[k] for row in rows), key=lambda p: each[p, -1]) for k in range(stages)]
    needs = judge.needs(MOST_POSITIONS)
    at, shared = needs.positions, len(rows) > 1
    lows = [needs.low(rooms[k], live[k], recompute, shared) for k in range(stages)]
    crossing = np.array([judge.crossing_bytes(int(p)) for p in at], np.float64)
    path = Path.without_links(each[slowest][:, at], lows, crossing)
    if not possible(path):
        return
    tight = least_bottleneck(path, 1e-9 if stages <= 64 else 1e-3)
    assert tight is not None, "what is possible has a least bottleneck"
    # A byte across counts more than all seconds together.
    dear = replace(path, both=path.both + 1 + float(path.seconds[:, -1].sum()))
    slack = 1.0 if by_operators else 1 + SLACK
    found = soonest_fill(dear, tight.bottleneck_s * slack) or tight
    yield tuple(int(at[c]) for c in found.cuts)
