"""One pipeline in which stages change places (CheckFree+, arXiv 2506.15461, section 4.3).

Every second microbatch visits the first two and the last two stages of blocks the other way round,
so that each of the four learns the part of its neighbour, and a lost one can become a copy of that.
What stands before the repeated blocks (an embedding), and what stands behind them (a norm, a head),
is held by both peers of the pair beside it: it has no neighbour to be made from.

    microbatch 0, 2, …   before@a  1@a  2@b  3@c … 6@f  behind@f
    microbatch 1, 3, …   before@b  2@b  1@a  3@c … 6@f  5@e  behind@e

Which peers, in which order, the asked planner says, for one pipeline; the cuts between the blocks
are those with the shortest longest stage, the peers' speeds and both ends reckoned in, among those
that give both of a pair as many. Blocks stay whole: only what is alike can change places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...dag.analysis.blocks import Block, blocks
from ...dag.ir.graph import Graph
from ...dag.plan.plan import PlanError
from ...dag.plan.report import PlanWithReport, Spare
from ...dag.schedule.orders.schedules import DEFAULT, first_of, interleaves
from ..base.interface import NoPlan, Planner, PlanRequest
from ..cost.candidate import Candidate, StageShare
from ..cost.cost_model import CostModel
from ..cost.shortage import recomputes
from ..search.reasons import stage_reasons

__all__ = ["LEAST", "swapped"]

LEAST = 4
"""Stages of blocks: two pairs."""


def swapped(request: PlanRequest, planner: Planner) -> PlanWithReport:
    """A plan by the order of peers that `planner` finds. Raises NoPlan."""
    forms = [f for f in (request, *request.others) if f.microbatches > 1 and not f.head_parts]
    forms = [f for f in forms if _can(f.graph)]
    if not forms:
        raise NoPlan(
            f"stages cannot change places: expected {LEAST} repeated blocks or more that follow "
            "each other with something before and behind them, and two microbatches in a step or "
            "more (recovery.ladder has neighbour+)",
            "model",
        )
    if len(request.offers) < LEAST:
        raise NoPlan(
            f"{len(request.offers)} peers are there: expected {LEAST} or more, so that the first "
            "two and the last two can change places (recovery.ladder has neighbour+)",
            "peers",
        )
    stages = request.options.stages
    found = planner(_alone(forms, stages)).plan
    if len(found.peers) < LEAST:
        found = planner(_alone(forms, LEAST)).plan
    form = next(f for f in forms if f.microbatch_size == found.microbatch_size)
    judge = CostModel(replace(form, others=(), known_costs=form.costs))
    peers = [judge.place[p] for p in found.peers]
    named = _chain(form.graph)
    counts = _shared_out(judge, peers[: len(named)], named)
    for again in recomputes(judge):
        candidate = _candidate(peers[: len(named)], counts, named, judge, again)
        try:
            fits = judge.cuttable(candidate) and judge.fits(candidate)
        except PlanError as error:
            raise NoPlan(f"stages cannot change places: {error}", "model") from None
        if fits:
            break
    else:
        short = _short(judge, candidate)
        raise NoPlan(f"stages that change places do not fit: {short}", "memory")
    plan, report = judge.plan(candidate)
    used, step_s = set(plan.peers), report.predicted.step_s
    hangs = next(iter(report.predicted.bottlenecks), "the step hangs on others")
    spare = [o.peer for o in judge.offers if o.peer not in used]
    why = (
        f"{len(plan.peers)} of {len(judge.offers)} peers in a pipeline whose first two and last "
        f"two stages of blocks change places in every second microbatch, {step_s:.4g} s for a step "
        f"of {form.microbatches} microbatches of {form.microbatch_size}"
    )
    names = {o.peer: str(o) for o in judge.offers}
    order = " -> ".join(names[v.peer] for v in plan.routes[1])
    # Of the pipeline in order: the other one has the same stages.
    parts = [*stage_reasons(judge, candidate)][1 : 1 + len(candidate.pipelines[0])]
    told = replace(
        report,
        reasons=(why, f"every second microbatch goes {order}", *parts),
        spares=tuple(Spare(p, f"not needed: {hangs}") for p in spare),
    )
    return PlanWithReport(plan, told)


def _alone(forms: Sequence[PlanRequest], stages: int | None) -> PlanRequest:
    """The request for the pipeline without swaps, of whose peers each has one stage."""

    def plain(form: PlanRequest) -> PlanRequest:
        schedule = form.options.schedule
        options = replace(
            form.options,
            stages=stages,
            pipelines=1,
            schedule=DEFAULT if interleaves(schedule) else first_of(schedule),
        )
        return replace(form, options=options, others=())

    return replace(plain(forms[0]), others=tuple(map(plain, forms[1:])))


def _chain(graph: Graph) -> list[Block]:
    """The longest row of blocks of one kind that follow each other."""
    best: list[Block] = []
    row: list[Block] = []
    for block in blocks(graph):
        row = [*row, block] if row and row[-1].kind == block.kind else [block]
        best = row if len(row) > len(best) else best
    return best


def _can(graph: Graph) -> bool:
    chain = _chain(graph)
    return len(chain) >= LEAST and chain[0].start > 0 and chain[-1].stop < len(graph.operators)


def _shared_out(judge: CostModel, peers: Sequence[int], named: Sequence[Block]) -> list[int]:
    """How many blocks each peer has: both of a pair as many where that can be, since only then a
    lost one can become a copy of the other; and then the longest stage as short as it can be."""
    bounds = [b.start for b in named] + [named[-1].stop]
    n, each = len(peers), judge.both_s

    def seconds(k: int, i: int, j: int) -> float:
        found = each[peers[k], bounds[j]] - each[peers[k], bounds[i]]
        if k < 2:  # what stands before, for every second microbatch
            found += each[peers[k], bounds[0]] / 2
        if k >= n - 2:
            found += (each[peers[k], judge.operators] - each[peers[k], bounds[-1]]) / 2
        return float(found)

    # By (blocks so far, of them the last peer's): what pairs differ by, longest stage, counts.
    best: dict[tuple[int, int], tuple[int, float, tuple[int, ...]]] = {(0, 0): (0, 0.0, ())}
    for k in range(n):
        following: dict[tuple[int, int], tuple[int, float, tuple[int, ...]]] = {}
        for (i, last), (odd, longest, counts) in best.items():
            for j in range(i + 1, len(named) - (n - k - 1) + 1):
                uneven = abs(j - i - last) if k in (1, n - 1) else 0
                way = odd + uneven, max(longest, seconds(k, i, j)), (*counts, j - i)
                following[j, j - i] = min(way, following.get((j, j - i), way))
        best = following
    return [*min(way for (j, _), way in best.items() if j == len(named))[2]]


def _candidate(
    peers: Sequence[int],
    counts: Sequence[int],
    named: Sequence[Block],
    judge: CostModel,
    recompute: bool,
) -> Candidate:
    """Two pipelines over the same stages, which differ in who has the ends."""
    starts, at = list[int](), 0
    for count in counts:
        starts.append(named[at].start)
        at += count
    stop = named[-1].stop
    inner = [
        StageShare(p, a, b, recompute)
        for p, a, b in zip(peers, starts, [*starts[1:], stop], strict=True)
    ]

    def pipeline(first: int, last: int) -> tuple[StageShare, ...]:
        ends = StageShare(first, 0, starts[0]), StageShare(last, stop, judge.operators)
        return (ends[0], *inner, ends[1])

    m = judge.request.microbatches
    asked = judge.request.options.schedule
    return Candidate(
        (pipeline(peers[0], peers[-1]), pipeline(peers[1], peers[-2])),
        (m - m // 2, m // 2),
        DEFAULT if interleaves(asked) else first_of(asked),
        swaps=True,
    )


def _short(judge: CostModel, candidate: Candidate) -> str:
    for p, size in judge.device_bytes(candidate).items():
        offer = judge.offers[p]
        if size > offer.device_memory_bytes:
            return f"{offer} would need {size} bytes, it has {offer.device_memory_bytes}"
    return "an updated buffer or data that stays with its peer would belong to two of them"
