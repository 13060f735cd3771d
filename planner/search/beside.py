"""Plans for data that stays with its peers: where a search begins, and what is said when there is
none.

Who has the data takes the operators that must run beside it (dag/analysis/beside.py), at the
beginning, at the end or both, and lends what lies between to the others. The search shifts the cuts
from there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from ...job.words import size_text
from ..base.interface import NoPlan
from ..cost.candidate import Candidate, Pipeline, StageShare
from ..cost.cost_model import CostModel
from ..cost.shortage import least_bytes
from .moves import even_pipeline
from .search import SearchSpace

__all__ = ["no_plan_beside", "seeds_beside"]

MOST_HOLDERS = 4
"""Peers with the data that are tried as the one that has it all."""
MOST_LENT = 8
"""Peers that share what lies between."""


def seeds_beside(judge: CostModel, space: SearchSpace) -> Iterator[Candidate]:
    """In no order of merit; what the space forbids comes too. Each reads data only where it is."""
    speed = judge.forward_s[:, -1] + judge.backward_s[:, -1]
    ranked = sorted(range(len(judge.offers)), key=lambda p: (speed[p], p))
    holders = [p for p in ranked if judge.may_have[p]]
    microbatches = judge.request.microbatches
    for again in space.recompute:
        for schedule in space.schedules:
            for h in holders[:MOST_HOLDERS]:
                for line in _lines(judge, h, [p for p in ranked if p != h], again):
                    yield Candidate((line,), (microbatches,), schedule)
            for count in range(2, min(len(holders), microbatches) + 1):
                each, more = divmod(microbatches, count)
                shares = tuple(each + (p < more) for p in range(count))
                own, rest = holders[:count], [p for p in ranked if p not in holders[:count]]
                for lent in {0, min(1, len(rest) // count), len(rest) // count}:
                    lines = tuple(
                        _line(judge, h, rest[i : lent * count : count], again)
                        for i, h in enumerate(own)
                    )
                    yield Candidate(lines, shares, schedule)


def _lines(judge: CostModel, holder: int, others: Sequence[int], again: bool) -> Iterator[Pipeline]:
    for k in range(min(len(others), MOST_LENT) + 1):
        yield _line(judge, holder, others[:k], again)


def _line(judge: CostModel, holder: int, others: Sequence[int], again: bool) -> Pipeline:
    """The holder has all but the longest stretch that may leave it, which the others share."""
    n = judge.operators
    if not others:
        return (StageShare(holder, 0, n, again),)
    stays = [-1, *judge.request.beside, n]
    a, b = max(pairwise(stays), key=lambda gap: (gap[1] - gap[0], gap))
    start, stop = a + 1, b
    middle = even_pipeline(judge, others, again, stop, start) if stop > start else None
    if middle is None:
        return (StageShare(holder, 0, n, again),)
    ends = StageShare(holder, 0, start, again), StageShare(holder, stop, n, again)
    return tuple(s for s in (ends[0], *middle, ends[1]) if s.start < s.stop)


def no_plan_beside(judge: CostModel) -> NoPlan | None:
    """What the data's place makes impossible; None: something else is short."""
    request = judge.request
    if not request.beside:
        return None
    holders = [o for o, has in zip(judge.offers, judge.may_have.tolist(), strict=True) if has]
    names = ", ".join(map(str, holders[:MOST_HOLDERS]))
    where = (
        f"{len(request.beside)} of {judge.operators} operators must run beside the data, on {names}"
    )
    spans, start = [], request.beside[0]
    for i, j in pairwise((*request.beside, judge.operators + 1)):
        if j != i + 1:
            spans.append((start, i + 1))
            start = j
    need = sum(least_bytes(judge, a, b) for a, b in spans)
    room = max(o.device_memory_bytes for o in holders)
    if need > room:
        return NoPlan(
            f"needs {size_text(need - room)} more on a peer with the data: {where}; they need "
            f"{size_text(need)}, and {size_text(room)} is the most that one offers",
            "memory",
            need - room,
        )
    asked = request.options.stages, request.options.pipelines
    if (asked[0] or 1) < 3 and asked[0] is not None:
        return NoPlan(
            f"{where}: no plan with plan.stages = {asked[0]} was found; leave it to the planner",
            "memory" if asked[0] == 1 else "plan",
        )
    if asked[1] is not None and asked[1] > len(holders):
        return NoPlan(
            f"{where}: each of plan.pipelines = {asked[1]} needs a peer with the data", "peers"
        )
    return None
