"""What an upload takes of the submitter's uplink, said before it begins.

Weights of billions of parameters take hours over a home uplink. What goes first (graph, manifest:
megabytes) is timed while it is on the wire, and tells how fast the uplink is. A fast line is done
with it before its speed shows: then, and where the broker has all of it already, ordinary uplinks
stand for it, those that are not slower than what was seen. A broken upload loses nothing: the
broker keeps what came of each blob (`net/blobs/client.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ...dag.ir.graph import Graph
from ...job.words import size_text

__all__ = ["Uplink", "UplinkRate", "duration_text", "starting_bytes", "takes"]

LONG_S = 60.0
"""An upload that takes longer is worth more words than its size."""
LEAST_BYTES = 1 << 18
"""Of an upload that tells of the rate: a smaller one is the way there and back, and no more."""
LEAST_S = 2.0
"""So long must bytes have been on the wire for a rate: the ways there and back, of two such uploads
over the longest lines (0.3 s), and the start of a connection are then a third of it at most."""
ORDINARY = ((1.25e6, "10 Mbit/s"), (1.25e7, "100 Mbit/s"), (1.25e8, "1 Gbit/s"))
"""Uplinks, in bytes/s: of homes behind a copper line, and behind fibre; of a data centre."""


def starting_bytes(graph: Graph, is_made: Callable[[str], bool] = lambda name: False) -> int:
    """The bytes that a run of this graph uploads of the weights that it begins with: every
    parameter and buffer once, in its own dtype, but for those that peers make themselves."""
    specs = {p.name: p.spec for p in graph.parameters} | {b.name: b.spec for b in graph.buffers}
    return sum(spec.size_bytes for name, spec in specs.items() if not is_made(name))


class UplinkRate(NamedTuple):
    """The rate of an uplink. known: whether it was measured; else the uplink has at least so much,
    and may have many times that."""

    bytes_per_s: float
    known: bool


class Uplink:
    """How fast bytes go to the broker. `sent` is for the BlobClient that sends them."""

    def __init__(self) -> None:
        self._bytes, self._seconds = 0, 0.0

    def sent(self, size_bytes: int, seconds: float) -> None:
        """An upload is over, which was on the wire for so long."""
        if size_bytes >= LEAST_BYTES:
            self._bytes += size_bytes
            self._seconds += seconds

    @property
    def rate(self) -> UplinkRate | None:
        """None: nothing has gone that tells."""
        if not self._bytes:
            return None
        return UplinkRate(self._bytes / max(self._seconds, 1e-9), self._seconds >= LEAST_S)


def takes(size_bytes: int, rate: UplinkRate | None = None) -> str:
    """How long so many bytes take, in words for people, and that nothing is sent twice; empty where
    that is not worth a word."""
    if size_bytes <= LONG_S * (rate.bytes_per_s if rate else ORDINARY[0][0]):
        return ""
    if rate is not None and rate.known:
        named = f"{rate.bytes_per_s * 8e-6:.3g} Mbit/s"
        how_long = f"{duration_text(size_bytes / rate.bytes_per_s)} at the {named} of this uplink"
    else:
        least = rate.bytes_per_s if rate else 0.0
        lines = [line for line in ORDINARY if line[0] >= least] or ORDINARY[-1:]
        how_long = " or ".join(f"{duration_text(size_bytes / n)} at {name}" for n, name in lines)
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
