"""Who holds which stage, so that all stages carry as many microbatches a second as another: at
first, and when holders come, go or change their speed.

`seconds[k, p]` is what a microbatch takes peer p at stage k; infinite: it cannot hold it. A stage
carries the sum of 1 / seconds over its holders.

Rebalancing is SWARM's (arXiv 2301.11913), with hysteresis: a newcomer joins the stage that carries
least; then a holder moves from another stage to the one that carries least, if both carry more than
(1 + LEAST_GAIN) times the least after it. With equal speeds no arrangement comes twice: each move
makes the sum of carried^-q over the stages smaller, for q large enough that (1 + LEAST_GAIN)^q > 2.
The same holds while speeds swing by less than the square root of 1 + LEAST_GAIN, 4.8 %.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["LEAST_GAIN", "Holders", "assigned", "rebalanced"]

Floats = NDArray[np.float64]
Holders = tuple[tuple[int, ...], ...]
"""By stage, its peers."""

LEAST_GAIN = 0.10
"""Of the stage that carries least, for which a holder moves."""
MOST_CHANGES = 256
"""Of a first arrangement; most are balanced after a few."""


def assigned(seconds: Floats, peers: Iterable[int]) -> Holders | None:
    """All of the peers on stages: who can hold fewest first, then the fastest, each to the stage
    that carries least; then improved by moves and exchanges. None: a stage has nobody."""
    speed = 1 / seconds
    open_to = (speed > 0).sum(0)
    found: list[list[int]] = [[] for _ in seconds]
    for p in sorted(peers, key=lambda p: (open_to[p], -speed[:, p].max(), p)):
        _join(found, p, speed)
    if not all(found):
        return None
    for _ in range(MOST_CHANGES):
        change = _best_change(found, speed, exchanges=True)
        if change is None or change.gain <= 1e-9:
            break
        _carry_out(found, change)
    return tuple(map(tuple, found))


def rebalanced(holders: Holders, seconds: Floats, newcomers: Iterable[int] = ()) -> Holders | None:
    """An arrangement with newcomers in it, and moves where they are worth it; who cannot hold its
    stage (any more) is a newcomer itself. None: a stage has nobody."""
    speed = 1 / seconds
    found = [[p for p in of if speed[k, p] > 0] for k, of in enumerate(holders)]
    odd = [p for k, of in enumerate(holders) for p in of if not speed[k, p] > 0]
    for p in (*odd, *newcomers):
        _join(found, p, speed)
    while change := _best_change(found, speed, exchanges=False):
        if change.gain <= LEAST_GAIN:
            break
        _carry_out(found, change)
    return tuple(map(tuple, found)) if all(found) else None


@dataclass(frozen=True, slots=True)
class _Change:
    """For the stage that carries least. `gain`: by how much more than it both stages carry then, a
    share of what it carries."""

    gain: float
    source: int
    to: int
    peer: int
    back: int = -1
    """Who goes the other way."""


def _join(found: Sequence[list[int]], peer: int, speed: Floats) -> None:
    """A newcomer goes where least is carried, of the stages that it can hold."""
    able = [k for k in range(len(found)) if speed[k, peer] > 0]
    if able:
        found[min(able, key=lambda k: (speed[k, found[k]].sum(), k))].append(peer)


def _best_change(
    found: Sequence[Sequence[int]], speed: Floats, *, exchanges: bool
) -> _Change | None:
    carries = [float(speed[k, of].sum()) for k, of in enumerate(found)]
    low = carries.index(min(carries))
    back = np.array([-1, *(found[low] if exchanges else ())])
    best: _Change | None = None
    for k, of in enumerate(found):
        if k == low or not of:
            continue
        peers = np.array(of)
        # (holder of k, who comes for it)
        there = speed[low, peers][:, None] - np.where(back < 0, 0.0, speed[low, back])
        here = np.where(back < 0, 0.0, speed[k, back]) - speed[k, peers][:, None]
        after = np.minimum(carries[low] + there, carries[k] + here)
        cannot = (speed[low, peers] <= 0)[:, None] | ((back >= 0) & (speed[k, back] <= 0))
        if len(of) == 1:
            cannot = cannot | (back < 0)
        after = np.where(cannot, -np.inf, after)
        p, q = divmod(int(np.argmax(after)), len(back))
        most = float(after[p, q])
        gain = most / carries[low] - 1 if carries[low] else most * np.inf
        if most > 0 and (best is None or gain > best.gain):
            best = _Change(gain, k, low, of[p], int(back[q]))
    return best


def _carry_out(found: Sequence[list[int]], change: _Change) -> None:
    found[change.source].remove(change.peer)
    found[change.to].append(change.peer)
    if change.back >= 0:
        found[change.to].remove(change.back)
        found[change.source].append(change.back)
