"""The provably best plan of a small request: one pipeline, fixed microbatches and schedule, one
topological order, no recomputation unless it is asked for; every ordered subset of the peers and
every cut, one share for each peer. 12 operators on 6 peers are 640,000 candidates; most fall to the
bounds. What planners are held against (scheduler.py, tests/planner/schedulers/test_auto.py).

Bounds, for a cut into K stages and K peers in some order:

    busy    max over stages k of M · (F(k) + B(k)) on its peer     a peer does one thing at a time
    memory  device bytes of stage k with one live microbatch       no schedule keeps less
    path    the longest path through the action lists, nothing shared (dag/cost/unshared.py):
            sharing links or cores only makes messages and actions later

Cuts are taken in the order of their least `busy` over all peers, so that good plans come early. A
cut is compiled only when some order of peers has busy < best so far and enough memory; then `path`
is found for all these orders at once. Every pair of cut and order with path < best is played, the
least path first; what is never played has a bound of at least the best seconds, which proves them
the least.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal.dag.plan.plan import ScheduleName
from shoal.planner.cost.candidate import Candidate
from shoal.planner.cost.cost_model import CostModel
from shoal.tests.planner.cases import chain

__all__ = ["Proof", "prove"]

_CLOSE = 1 - 1e-12
"""A bound within rounding of the best seconds cannot be beaten."""


@dataclass(frozen=True, slots=True)
class Proof:
    """The best candidate (None: nothing fits) and what it took to know that."""

    best: Candidate | None
    seconds: float
    candidates: int
    """All in the space."""
    compiled: int
    """Cuts whose program was needed."""
    played: int
    """Candidates that went through the event calculation."""


def prove(
    judge: CostModel, schedule: ScheduleName, *, stages: int | None = None, recompute: bool = False
) -> Proof:
    """The best of all candidates; see the module."""
    n, peers = judge.operators, len(judge.offers)
    m = judge.request.microbatches
    counts = range(1, min(n, peers) + 1) if stages is None else [stages]
    orders = {
        k: np.array(list(itertools.permutations(range(peers), k)), dtype=np.int64)
        for k in counts
        if k <= min(n, peers)
    }
    rooms = np.array([o.device_memory_bytes for o in judge.offers])
    forward = judge.forward_s * (2 if recompute else 1)

    def busy(cuts: tuple[int, ...]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Bound of each order of peers, and whether it may fit."""
        at, k = np.array(cuts), len(cuts) - 1
        each = np.diff(forward[:, at] + judge.backward_s[:, at], axis=1)  # (peers, stages)
        order = orders[k]
        bytes_of = np.array(
            [judge.stage_bytes(a, b, 1, 0, recompute) for a, b in itertools.pairwise(cuts)]
        )
        bound: NDArray[np.float64] = m * each[order, np.arange(k)].max(1)
        fits: NDArray[np.bool_] = np.all(bytes_of <= rooms[order], axis=1)
        return bound, fits

    ranked: list[tuple[float, tuple[int, ...]]] = []
    for cuts in _cuts(n, orders):
        bound, fits = busy(cuts)
        if fits.any():
            ranked.append((float(bound[fits].min()), cuts))
    ranked.sort()

    best: Candidate | None = None
    least, compiled, before = float("inf"), 0, judge.judged
    left: list[tuple[float, tuple[int, ...], tuple[int, ...]]] = []
    for lowest, cuts in ranked:
        if lowest >= least * _CLOSE:
            break
        bound, fits = busy(cuts)
        order = orders[len(cuts) - 1][fits & (bound < least * _CLOSE)]
        if not len(order):
            continue
        compiled += 1
        everywhere = range(len(cuts) - 1) if recompute else ()
        form = chain(order[0].tolist(), cuts, m, schedule, everywhere)
        if not judge.cuttable(form):
            continue
        order = order[_fitting(judge, form, order, recompute)]
        if not len(order):
            continue
        path = judge.bound_many(form, order)
        for row in np.flatnonzero(path < least * _CLOSE):
            left.append((float(path[row]), cuts, tuple(order[row].tolist())))
        # One of each cut at once, so that the best so far falls early.
        first = int(path.argmin())
        if path[first] < least * _CLOSE:
            candidate = chain(order[first].tolist(), cuts, m, schedule, everywhere)
            seconds = judge.seconds(candidate)
            if seconds < least:
                best, least = candidate, seconds
    left.sort()
    for lowest, cuts, who in left:
        if lowest >= least * _CLOSE:
            break
        candidate = chain(who, cuts, m, schedule, range(len(who)) if recompute else ())
        seconds = judge.seconds(candidate)
        if seconds < least:
            best, least = candidate, seconds
    total = sum(len(orders[len(cuts) - 1]) for cuts in _cuts(n, orders))
    return Proof(best, least, total, compiled, judge.judged - before)


def _cuts(operators: int, orders: dict[int, NDArray[np.int64]]) -> Iterator[tuple[int, ...]]:
    for k in orders:
        for inner in itertools.combinations(range(1, operators), k - 1):
            yield (0, *inner, operators)


def _fitting(
    judge: CostModel, form: Candidate, order: NDArray[np.int64], recompute: bool
) -> NDArray[np.bool_]:
    """Which orders of peers have the memory for the microbatches that are live."""
    structure = judge.structure(form)
    need = np.array(
        [
            judge.stage_bytes(s.start, s.stop, structure.peak_live.get((k, k), 0), 0, recompute)
            for k, s in enumerate(structure.plan.stages)
        ]
    )
    rooms = np.array([o.device_memory_bytes for o in judge.offers])
    found: NDArray[np.bool_] = np.all(need <= rooms[order], axis=1)
    return found
