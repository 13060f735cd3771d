"""What planners say when something is short, and by how much."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from ...dag.schedule.orders.schedules import SCHEDULES, first_of, interleaves
from ...job.words import size_text, some_of
from ..base.interface import NoPlan, PeerOffer, PlanRequest
from ..network.pathcut import Path, soonest_fill
from .candidate import Candidate, StageShare
from .cost_model import CostModel

__all__ = ["fitting", "recomputes", "refuse_impossible", "shortage"]

MOST_OPERATORS = 512
"""Up to which what is short is looked for between all positions."""


def refuse_impossible(request: PlanRequest) -> None:
    """Raises NoPlan where no choice of peers and cuts could do what the options ask for."""
    graph, options = request.graph, request.options
    pipelines = options.pipelines or 1
    if pipelines > request.microbatches:
        raise NoPlan(
            f"{pipelines} pipelines share {request.microbatches} microbatches of a step: expected "
            "at least one for each; lower plan.pipelines or train.microbatch",
            "model",
        )
    if options.stages is not None and options.stages > len(graph.operators):
        raise NoPlan(
            f"{options.stages} stages for a graph of {len(graph.operators)} operators: every stage "
            "needs at least one; lower plan.stages",
            "model",
        )
    need = (options.stages or 1) * pipelines
    if interleaves(options.schedule) and options.stages is not None:
        need = pipelines  # a peer may hold several
    if len(request.offers) < need:
        raise NoPlan(f"{need} peers are needed, {len(request.offers)} are on offer", "peers")


def shortage(judge: CostModel, rooms: Sequence[int] = (), live: int = 0) -> NoPlan:
    """Which memory is short, in amounts of the judge. `rooms`: bytes of the stages of the last try,
    without them of every peer; `live`: the most microbatches that one of them kept."""
    request, offers = judge.request, judge.offers
    rooms = rooms or [o.device_memory_bytes for o in offers]
    live = live or min(request.microbatches, len(rooms))
    largest = max(o.device_memory_bytes for o in offers)
    worst, needed = _largest_operator(judge)
    if needed > largest:
        op = request.graph.operators[worst]
        of = f" of {op.module}" if op.module else ""
        return NoPlan(
            f"no peer has enough memory for operator {op.name}{of}: it needs {size_text(needed)} "
            f"(parameters, gradients, optimizer state, one microbatch), the largest peer offers "
            f"{size_text(largest)}, short by {size_text(needed - largest)}",
            "memory",
            needed,  # a whole peer must come: those that are here cannot give theirs to it
        )
    offered, whole = sum(rooms), least_bytes(judge, 0, judge.operators)
    stages = f"{len(rooms)} stage{'s offer' if len(rooms) != 1 else ' offers'}"
    if whole > offered:
        return NoPlan(
            f"needs {size_text(whole - offered)} more: the model needs {size_text(whole)} for one "
            "microbatch (parameters, gradients, optimizer state, activations), the "
            f"{stages} {size_text(offered)}: let more peers join, or offer more memory",
            "memory",
            whole - offered,
        )
    return NoPlan(
        f"no cut into {len(rooms)} stages fits: the peers offer {_memories(offers)}, and the model "
        f"needs {size_text(whole)} with one live microbatch and more with up to {live}: lower "
        "train.microbatch, let more peers join, or offer more memory",
        "memory",
    )


def recomputes(judge: CostModel) -> tuple[bool, ...]:
    """Whether stages may compute their forward again, the cheaper one first."""
    wanted = judge.request.options.recompute
    return (False, True) if wanted is None else (wanted,)


def least_bytes(judge: CostModel, start: int, stop: int) -> int:
    """What a stage of these operators needs with one microbatch, by the better of the ways that are
    asked for."""
    return min(judge.stage_bytes(start, stop, 1, recompute=r) for r in recomputes(judge))


def _largest_operator(judge: CostModel) -> tuple[int, int]:
    """(operator, bytes) of the operator that needs most, with one microbatch: of each operator, the
    least of the stages that have it; of very many operators, of the stage that has it alone."""
    if judge.operators < MOST_OPERATORS:
        needs = judge.needs(MOST_OPERATORS)
        sizes = np.min([needs.least(1, r) for r in recomputes(judge)], axis=0).tolist()
    else:
        sizes = [least_bytes(judge, i, i + 1) for i in range(judge.operators)]
    worst = max(range(judge.operators), key=lambda i: sizes[i])
    return worst, sizes[worst]


def fitting(judge: CostModel, rooms: Sequence[int], recompute: bool) -> Candidate | None:
    """A candidate of the peers with most memory, in either order, that fits if they have `rooms`
    bytes: one pipeline, or as many as are asked for, cut alike. None: none was found. The judge
    has the last word."""
    options, needs = judge.request.options, judge.needs(MOST_OPERATORS)
    rows, n = options.pipelines or 1, len(needs.positions)
    each, more = divmod(judge.request.microbatches, rows)
    microbatches = tuple(each + (p < more) for p in range(rows))
    schedule = first_of(options.schedule)
    ranked = sorted(range(len(rooms)), key=lambda p: (-rooms[p], p))
    groups = [ranked[k * rows : (k + 1) * rows] for k in range(len(rooms) // rows)]
    for k in range(1, min(len(groups), n - 1) + 1):
        if options.stages not in (None, k):
            continue
        for order in (groups[:k], groups[:k][::-1]):
            live = [SCHEDULES[schedule].live(k, i, microbatches[0]) for i in range(k)]
            lows = [
                needs.low(min(rooms[p] for p in group), m, recompute, rows > 1)
                for group, m in zip(order, live, strict=True)
            ]
            # Memory alone decides: nothing takes any time.
            free = Path.without_links(np.zeros((k, n)), lows, np.zeros(n))
            found = soonest_fill(free, np.inf)
            if found is None:
                continue
            at = needs.positions[list(found.cuts)].tolist()
            candidate = Candidate(
                tuple(
                    tuple(
                        StageShare(group[p], a, b, recompute)
                        for group, (a, b) in zip(order, itertools.pairwise(at), strict=True)
                    )
                    for p in range(rows)
                ),
                microbatches,
                schedule,
            )
            if judge.cuttable(candidate) and all(
                size <= rooms[p] for p, size in judge.device_bytes(candidate).items()
            ):
                return candidate
    return None


def _memories(offers: Sequence[PeerOffer]) -> str:
    return some_of([f"{o} {size_text(o.device_memory_bytes)}" for o in offers], 8)
