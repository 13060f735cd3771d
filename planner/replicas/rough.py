"""How long a set of peers takes for a local step, by closed formulas alone: some 0.1 ms for a set
that `pace.py` needs 20 ms for.

One pipeline through K of the peers, each after the nearest that is left, cut in proportion to speed
as far as memory goes (peer p takes the part w_p of the work, τ = max w_p · t_p):

    step = fill + (m - 1) · max(τ, widest hop, slowest circle) + update         (network/pathcut.py)

for some K from all of them down to as few as hold the model, the fastest first, by islands where
they are many. Or each peer that
can hold the model by itself a pipeline of its own, with a sum of gradients between them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from ...dag.cost.speed import Work
from ..cost.candidate import Candidate, StageShare
from ..cost.rows import in_proportion
from ..cost.shortage import recomputes
from ..network.pathcut import slowest_circle
from .pace import Pace, Paces

__all__ = ["RoughPaces"]

Floats = NDArray[np.float64]

FULL = 0.95
"""Of a peer's memory, what a cut fills: operators are not to be had in parts."""


class RoughPaces:
    """Like `Paces`, of the same request."""

    def __init__(self, paces: Paces) -> None:
        self.paces, judge = paces, paces.judge
        self.rows = rows = paces.fence.rows
        self.spent = 0
        self._known: dict[tuple[frozenset[int], int], Pace | None] = {}
        byte_s = judge.per_unit[:, Work._fields.index("memory")] * rows.trainable_bytes[-1]
        forward, backward = judge.forward_s[:, -1], judge.backward_s[:, -1]
        self._whole = {r: forward * (1 + r) + backward + 3 * byte_s for r in (False, True)}
        self._update = (rows.passes - 3) * byte_s
        work = judge.totals.forward + judge.totals.backward
        flops = work[:, :3].sum(1)
        self._done = flops / max(float(flops[-1]), 1e-300)
        self._needs: dict[tuple[int, bool], int] = {}

    def of(self, peers: Collection[int], microbatches: int) -> Pace | None:
        """None: they cannot hold the model."""
        key = frozenset(peers), microbatches
        if key not in self._known:
            self.spent += len(key[0])
            self._known[key] = self._best(key[0], microbatches)
        return self._known[key]

    def _best(self, peers: frozenset[int], m: int) -> Pace | None:
        options = self.paces.judge.request.options
        speed = self.paces.speed
        order = [
            p
            for island in self.paces.pool(peers).groups
            for p in sorted(island, key=lambda p: (-speed[p], p))
        ]
        found: list[tuple[float, Candidate]] = []
        if options.pipelines in (None, 1):
            k = len(order) if options.stages is None else min(options.stages, len(order))
            while k:
                one = self._pipeline(order[:k], m)
                if one is None and k < len(order) and options.stages is None:
                    break
                if one is not None:
                    found.append(one)
                k = k * 3 // 4 if options.stages is None else 0
            if not found and len(order) > 1:
                by_room = sorted(order, key=lambda p: (-int(self.paces.rooms[p]), p))
                one = self._pipeline(by_room[: options.stages], m)
                found += [one] if one is not None else []
        if options.pipelines != 1 and options.stages in (None, 1) and m > 1:
            found += self._alone(order, m)
        if not found:
            return None
        return self.paces.pace(*min(found, key=lambda x: x[0]))

    def _needed(self, live: int, recompute: bool) -> int:
        judge = self.paces.judge
        key = live, recompute
        if key not in self._needs:
            self._needs[key] = judge.stage_bytes(0, judge.operators, live, recompute=recompute)
        return self._needs[key]

    def _pipeline(self, peers: Sequence[int], m: int) -> tuple[float, Candidate] | None:
        k, judge = len(peers), self.paces.judge
        if k > judge.operators:
            return None
        for recompute in recomputes(judge):
            needed = self._needed(min(m, k // 2 + 1), recompute)
            rooms = self.paces.rooms[list(peers)] / needed * (FULL if k > 1 else 1.0)
            if rooms.sum() >= 1:
                break
        else:
            return None
        path = self._path(peers)
        each = self._whole[recompute][path]
        part = _parts(1 / each, self.paces.rooms[path] / needed * (FULL if k > 1 else 1.0))
        a, b = path[:-1], path[1:]
        hop = self.rows.typical_bytes * self.rows.both[a, b] + self.rows.latency[a, b]
        busy = part * each
        stages = (busy + np.append(hop, 0.0)).tolist()
        widest = float(self.rows.slower[a, b].max(initial=0.0)) * self.rows.typical_bytes
        period = max(float(busy.max()), widest, slowest_circle(stages, m))
        seconds = sum(stages) + (m - 1) * period + float((part * self._update[path]).max())
        cuts = np.searchsorted(self._done, np.cumsum(part)[:-1] * self._done[-1])
        at = [0, *(int(c) for c in cuts), judge.operators]
        for i in range(1, k):
            at[i] = min(max(at[i], at[i - 1] + 1), judge.operators - (k - i))
        shares = tuple(StageShare(int(p), at[i], at[i + 1], recompute) for i, p in enumerate(path))
        return seconds, Candidate((shares,), (m,), self.rows.schedule)

    def _path(self, peers: Sequence[int]) -> list[int]:
        """From the fastest, always to the nearest that is left."""
        left, cost = list(peers[1:]), self.paces.fence.cost
        path = [peers[0]]
        while left:
            path.append(left.pop(int(np.argmin(cost[path[-1], left]))))
        return path

    def _alone(self, order: Sequence[int], m: int) -> list[tuple[float, Candidate]]:
        judge = self.paces.judge
        wanted = judge.request.options.pipelines
        for recompute in recomputes(judge):
            needed = self._needed(1, recompute)
            able = [p for p in order if self.paces.rooms[p] >= needed][: wanted or m]
            if len(able) < max(2, wanted or 2):
                continue
            each = self._whole[recompute][able]
            counts = in_proportion((1 / each).tolist(), m)
            used = [(p, c) for p, c in zip(able, counts, strict=True) if c]
            if len(used) < 2:
                continue
            shares = tuple((StageShare(p, 0, judge.operators, recompute),) for p, _ in used)
            candidate = Candidate(shares, tuple(c for _, c in used), self.rows.schedule)
            busy = float((np.array(counts) * each).max() + self._update[able].max())
            return [(busy + self.rows.sync(candidate), candidate)]
        return []


def _parts(speed: Floats, most: Floats) -> Floats:
    """Parts of one whole in proportion to speed, none above its most."""
    part = np.zeros(len(speed))
    full = np.zeros(len(speed), dtype=bool)
    while True:
        rest = 1.0 - float(most[full].sum())
        part = np.where(full, most, rest * speed / max(float(speed[~full].sum()), 1e-300))
        over = ~full & (part > most)
        if not over.any():
            return part
        full |= over
