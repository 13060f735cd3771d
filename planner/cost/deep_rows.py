"""Rows of peers whose visits are to be listed, with any number of microbatches on their way."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ...dag.cost.pace import UPDATE_CALLS
from ...dag.cost.speed import Work
from ..network.pathcut import best_cut
from .candidate import Candidate, Pipeline, StageShare
from .cost_model import CostModel
from .rows import RowBuilder
from .shortage import recomputes

__all__ = ["DeepRows"]

LIVE = 2
"""Microbatches for which a stage has memory at least."""


class DeepRows(RowBuilder):
    """Makes candidates as RowBuilder does, where nothing but memory bounds what is on its way."""

    def __init__(self, judge: CostModel) -> None:
        super().__init__(judge)
        graph = judge.request.graph
        trainable = {f"param:{p.name}" for p in graph.parameters if p.trainable}
        self._tied = [
            (at[0], at[-1], graph.spec[value].size_bytes)
            for value, at in graph.readers.items()
            if value in trainable and len(at) > 1
        ]
        """Weights of several operators: the first and the last, and bytes."""
        self._call_s = judge.per_unit[:, Work._fields.index("calls")]

    @property
    def _bound(self) -> bool:
        return False

    def _live(self, stages: int, stage: int, microbatches: int, among: int) -> int:
        return min(LIVE, microbatches)

    def closed(self, peers: Sequence[int], begin: int, end: int) -> Pipeline | None:
        """The shares of one row whose first peer has the operators before `begin`, and takes those
        from `end` on as well; the others may stay empty. None: nothing fits."""
        for recompute in recomputes(self.judge):
            found = self._closed(peers, begin, end, recompute)
            if found is not None:
                return found
        return None

    def _closed(
        self, peers: Sequence[int], begin: int, end: int, recompute: bool
    ) -> Pipeline | None:
        judge, needs, first = self.judge, self._needs_of(len(peers)), peers[0]
        at = needs.positions[: int(np.searchsorted(needs.positions, end, side="right"))]
        n, low, tail = len(at), int(np.searchsorted(at, begin)), int(at[-1])
        path = self._path([[p] for p in peers], self.microbatches, False, recompute)
        live = min(LIVE, self.microbatches)
        left = self._memory(first)
        left -= judge.stage_bytes(tail, judge.operators, live, recompute=recompute)
        seconds = path.seconds[:, :n].copy()
        seconds[0, 1:] += path.seconds[0, -1] - seconds[0, -1]
        # Nobody else begins, and the first peer has no less than what is asked of it.
        lows = [np.maximum(one[:n], 1) for one in path.lows]
        lows[0] = needs.low(max(0, left), live, recompute)[:n].copy()
        lows[0][:low] = np.arange(low)
        path = replace(path, seconds=seconds, lows=lows, crossing=path.crossing[:n])
        found = best_cut(path, self.microbatches, bound=False)
        if found is None or len(found.peers) < 2:
            return None
        cuts = zip(found.peers, itertools.pairwise(found.cuts), strict=True)
        shares = [StageShare(peers[k], int(at[a]), int(at[b]), recompute) for k, (a, b) in cuts]
        return (*shares, StageShare(first, tail, judge.operators, recompute))

    def after(self, candidate: Candidate) -> float:
        """Seconds behind all visits: exchanges of holders, and of weights that the beginning and
        the end of a row share; and the update of the peer that takes longest for it."""
        tied = 0.0
        for i, j, size in self._tied:
            ends = ((_at(row, i), _at(row, j)) for row in candidate.pipelines)
            tied += max(2 * size * float(self.slower[p, q]) for p, q in ends)
        held: dict[int, float] = {}
        for s in (s for row in candidate.pipelines for s in row):
            trained = self.judge.chain.trained
            count, size = trained[:, s.stop] - trained[:, s.start]
            seconds = self.passes * size * self._byte_s[s.peer]
            seconds += UPDATE_CALLS * count * self._call_s[s.peer]
            held[s.peer] = held.get(s.peer, 0.0) + float(seconds)
        return self.sync(candidate) + tied + max(held.values())


def _at(row: Sequence[StageShare], operator: int) -> int:
    """The peer that has an operator."""
    return next(s.peer for s in row if operator < s.stop)
