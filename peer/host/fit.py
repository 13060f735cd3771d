"""From timed work to speeds: non-negative least squares on relative errors.

    minimise  Σ over samples ((work · seconds per unit) / measured − 1)²,  each at least its floor

The floor keeps a class that the samples do not resolve from being infinitely fast: no class is more
than FASTEST times as fast as the sample that gives the tightest bound for it. Samples that another
process slowed weigh less in a second and third pass. Six classes do not explain every kernel, and
least squares on relative errors end on the fast side: at last all speeds are scaled so that the
samples that are made like stages are right in the median. Six unknowns: every set of those that
lie on their floor is tried (64), so the solution is exact.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Sequence
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray

from ...dag.cost.speed import Speeds, Work, work_array

__all__ = ["busy_share", "fit"]

FASTEST = 20.0
PASSES = 3
CLOSE = 0.1
"""Relative error from which on a sample weighs less."""

Array = NDArray[np.float64]


def fit(works: Sequence[Work], seconds: Sequence[float], level: Sequence[int] = ()) -> Speeds:
    """The speeds that explain best what was measured, scaled so that the samples at the places
    `level` are right in the median; `error` is the median relative error that remains. Raises
    ValueError unless every class appears and every time is positive."""
    amounts, times = work_array(works), np.asarray(seconds, dtype=np.float64)
    if not (np.isfinite(times).all() and (times > 0).all()):
        raise ValueError(f"times are {times}: expected positive numbers")
    absent = [n for n, a in zip(Work._fields, amounts.T, strict=True) if not a.any()]
    if absent:
        raise ValueError(f"no sample has work of the class {absent[0]}: it cannot be fitted")
    rows = amounts / times[:, None]  # (samples, 6); rows @ per_unit is 1 where the fit is exact
    floor = 1.0 / (FASTEST * rows.max(axis=0))
    weights = np.ones(len(times))
    for _ in range(PASSES):
        per_unit = _least(rows, floor, weights)
        off = np.abs(rows @ per_unit - 1.0)
        weights = np.sqrt(CLOSE / np.maximum(off, CLOSE))
    if level:
        per_unit /= np.median((rows @ per_unit)[list(level)])
        off = np.abs(rows @ per_unit - 1.0)
    rates = dict(zip(Work._fields[:5], (1.0 / per_unit[:5]).tolist(), strict=True))
    return Speeds(**rates, call_s=float(per_unit[5]), error=float(np.median(off)))


def _least(rows: Array, floor: Array, weights: Array) -> Array:
    """The least-squares solution of rows · x = 1 with x ≥ floor; shape (6,)."""
    a = rows * weights[:, None]
    size = np.linalg.norm(a, axis=0)  # columns of one length: the normal equations stay well posed
    a = a / size
    low = floor * size
    gram, right = a.T @ a, a.T @ weights
    best, least = low, np.inf
    for held in itertools.product((False, True), repeat=len(low)):
        at, free = np.array(held), ~np.array(held)
        x = low.copy()
        if free.any():
            try:
                x[free] = np.linalg.solve(
                    gram[np.ix_(free, free)], right[free] - gram[np.ix_(free, at)] @ low[at]
                )
            except np.linalg.LinAlgError:
                continue  # these samples do not tell these classes apart
        error = float(x @ gram @ x - 2 * right @ x)
        if (x >= low).all() and error < least:
            best, least = x, error
    found: Array = best / size
    return found


# How much of its speed a CPU thread keeps while every core of the machine computes.
#
# Two virtual cores are often one real one, and all of them share caches and memory: a peer's
# speeds, measured alone, are not those that it has beside others. Measured with a mixture of a
# transformer's kernels in every thread at once, against the same mixture in one.

ROUNDS = 4
LEAST = 0.2


def busy_share(seconds: float = 0.4, cores: int | None = None) -> float:
    """Between LEAST and 1; 1 on a machine with one core. Takes about `seconds`."""
    count = cores or os.cpu_count() or 1
    if count < 2:
        return 1.0
    span = seconds / (2 * ROUNDS)
    shares = []
    for _ in range(ROUNDS):
        alone = _rate(1, span)
        shares.append(_rate(count, span) / alone)
    return min(1.0, max(LEAST, median(shares)))


def _rate(threads: int, seconds: float) -> float:
    """Mixtures per CPU second of a thread, the mean over threads."""
    begin, results = threading.Barrier(threads), [0.0] * threads

    def run(i: int) -> None:
        torch.set_num_threads(1)  # holds for this thread
        a, w = torch.rand(256, 256), torch.rand(256, 1024)
        out = torch.empty(256, 1024)
        done = 0
        begin.wait()
        started, computed = time.perf_counter(), time.thread_time()
        while time.perf_counter() - started < seconds or not done:
            torch.mm(a, w, out=out)
            torch.nn.functional.gelu(out).add_(out)
            done += 1
        # Of its own CPU time: what other programs take of the machine is not meant.
        results[i] = done / max(time.thread_time() - computed, 1e-9)

    workers = [threading.Thread(target=run, args=(i,)) for i in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(results) / threads
