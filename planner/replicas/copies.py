"""What snapshots cost a replica while it trains.

Each holder copies its part in its device's memory, which holds the device up, and sends it to a
keeper, which shares its line with the step. A set is on its way for as long as its slowest copy
takes, u; the next one is taken a pause after that, u or the least there is
(`broker/snapshots/cadence.py`), and of a step at most one. So with t and s seconds of a step on the
whole line and on half of it, and c of copying in memory,

    step = (t + (s - t) · u / (u + pause)) · (1 + c / max(u + pause, t))
"""

from __future__ import annotations

from collections.abc import Collection
from copy import copy
from dataclasses import replace

from .pace import Pace, Paces, links
from .rounds import line_rates

__all__ = ["MOST_LOOKED_AT", "PAUSE_S", "CopyingPaces"]

PAUSE_S = 0.5
"""Between two sets of snapshots, however small they are."""
MOST_LOOKED_AT = 24
"""Peers up to which it is looked at: it is an event calculation for each set of them."""


class CopyingPaces:
    """Like `Paces`, of the same request, while sets of snapshots are taken `pause_s` after one
    another at least."""

    def __init__(self, paces: Paces, pause_s: float) -> None:
        self.paces, self.pause_s = paces, pause_s
        judge = paces.judge
        network = judge.network
        self._line = line_rates(network.up, judge.rates)
        if len(judge.offers) > 1:
            self._half = copy(judge)
            self._half.network = replace(network, up=self._line / 2)
            self._half.rates = self._half.network.rates()
        self._known: dict[Pace, Pace] = {}

    @property
    def spent(self) -> int:
        return self.paces.spent

    def of(self, peers: Collection[int], microbatches: int) -> Pace | None:
        """None: they cannot hold the model."""
        pace = self.paces.of(peers, microbatches)
        return None if pace is None else self.copying(pace)

    def copying(self, pace: Pace) -> Pace:
        """Return the replica while its snapshots are taken."""
        if pace not in self._known:
            self._known[pace] = replace(pace, seconds=self._seconds(pace))
        return self._known[pace]

    def _seconds(self, pace: Pace) -> float:
        judge, step_s = self.paces.judge, pace.seconds
        held, sizes = self.paces.fence.rows.trainable_bytes, dict[int, float]()
        state = 1 + judge.request.options.standing_bytes / 4
        for start, stop, holders, _ in pace.candidate.slots():
            for p in holders:
                sizes[p] = sizes.get(p, 0.0) + state * float(held[stop] - held[start])
        copied_s = max(2 * size / judge.offers[p].pace.memory for p, size in sizes.items())
        sent_s = 0.0
        if len(judge.offers) > 1:
            sent_s = max(size / float(self._line[p]) for p, size in sizes.items())
        pause_s = max(self.pause_s, sent_s)
        if links(pace.candidate):
            half = self._half.with_microbatches(sum(pace.candidate.microbatches))
            share = sent_s / (sent_s + pause_s)
            step_s += max(0.0, half.seconds(pace.candidate) - step_s) * share
        return step_s * (1 + copied_s / max(sent_s + pause_s, step_s))
