"""What an upload takes of the submitter's uplink, said before it begins.

Weights of billions of parameters take hours over a home uplink. What goes first (graph, manifest:
megabytes) is timed, and tells how fast the uplink is; where the broker has that already, two
ordinary uplinks stand for it. A broken upload loses nothing: the broker keeps what came of each
blob (`net/blobs_client.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ..dag.graph import Graph
from ..job.words import size_text
from ..net.cap import Cap, Meter

__all__ = ["Uplink", "duration_text", "starting_bytes", "takes"]

LONG_S = 60.0
"""An upload that takes longer is worth more words than its size."""
LEAST_BYTES = 1 << 18
"""So many must have gone for a rate: fewer are gone before the connection is at its speed."""
ORDINARY = ((1.25e6, "10 Mbit/s"), (1.25e7, "100 Mbit/s"))
"""Uplinks of homes, in bytes/s: behind a copper line, and behind fibre."""


def starting_bytes(graph: Graph, is_made: Callable[[str], bool] = lambda name: False) -> int:
    """Of the weights that a run of this graph begins with, as they are uploaded: every parameter
    and buffer once, in its own dtype, but for those that peers make themselves."""
    specs = {p.name: p.spec for p in graph.parameters} | {b.name: b.spec for b in graph.buffers}
    return sum(spec.size_bytes for name, spec in specs.items() if not is_made(name))


class Uplink:
    """How fast bytes go to the broker, from the first of them on. `cap` is for the BlobClient that
    sends them: it counts. `clock`: seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._meter, self._clock = _Meter(clock), clock
        self.cap = Cap(None, meter=self._meter)

    @property
    def bytes_per_s(self) -> float | None:
        """None: too little has gone."""
        seconds = self._clock() - self._meter.began
        if self._meter.bytes < LEAST_BYTES or seconds <= 0:
            return None
        return self._meter.bytes / seconds


class _Meter(Meter):
    """Knows when its first byte went."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._clock = clock
        self.began = 0.0

    def add(self, size_bytes: int) -> None:
        if not self.bytes:
            self.began = self._clock()
        super().add(size_bytes)


def takes(size_bytes: int, bytes_per_s: float | None = None) -> str:
    """How long so many bytes take, in words for people, and that nothing is sent twice; empty where
    that is not worth a word."""
    if size_bytes <= LONG_S * (bytes_per_s or ORDINARY[0][0]):
        return ""
    if bytes_per_s is None:
        each = (f"{duration_text(size_bytes / rate)} at {name}" for rate, name in ORDINARY)
        how_long = " or ".join(each)
    else:
        rate = f"{bytes_per_s * 8e-6:.3g} Mbit/s"
        how_long = f"{duration_text(size_bytes / bytes_per_s)} at the {rate} of this uplink"
    return (
        f"{size_text(size_bytes)} take about {how_long}; what has come stays with the broker, and "
        "the same command goes on from there after a break"
    )


def duration_text(seconds: float) -> str:
    """As "42 s", "17 min", "3 h 5 min", "2 days 4 h"."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} days {hours} h" if hours else f"{days} days"
