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
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ...dag.cost.speed import Speeds, Work, work_array

__all__ = ["fit"]

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
    product, convolution, attention, memory, special = (float(1.0 / p) for p in per_unit[:5])
    return Speeds(
        product=product,
        convolution=convolution,
        attention=attention,
        memory=memory,
        special=special,
        call_s=float(per_unit[5]),
        error=float(np.median(off)),
    )


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
