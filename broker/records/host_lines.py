"""How fast hosts sent what they gave to rounds gone by. What probes have measured of links is
forgotten when the broker ends; this is not."""

from __future__ import annotations

from collections import deque
from itertools import chain
from statistics import median

from ...proto.broker_pb2 import HostLine, RoundDone
from ...proto.journal_pb2 import RoundsKept

__all__ = ["HostLines"]

_NEWEST = 3
"""Rounds of a host: with one of three uploads held up, the line is that of another."""


class HostLines:
    """Changes by events only."""

    def __init__(self) -> None:
        self._known: dict[int, deque[HostLine]] = {}
        """By replica, of its newest rounds in one term."""

    def line(self, replica: int, term: int) -> HostLine | None:
        """Return the line of a replica, the median of its newest uploads; None: it has made none in
        this term, and may be elsewhere."""
        known = self._known.get(replica)
        if not known or known[-1].term != term:
            return None
        return HostLine(
            replica=replica,
            term=term,
            bytes_per_s=median(line.bytes_per_s for line in known),
            update_bytes_per_s=median(line.update_bytes_per_s for line in known),
            latency_s=median(line.latency_s for line in known),
        )

    def done(self, done: RoundDone) -> None:
        """A round is committed."""
        for line in done.lines:
            self._add(line)

    def _add(self, line: HostLine) -> None:
        known = self._known.get(line.replica)
        if known is None or known[-1].term != line.term:
            known = self._known[line.replica] = deque(maxlen=_NEWEST)
        known.append(line)

    def kept(self) -> RoundsKept:
        """All of it, for `restore`."""
        return RoundsKept(lines=chain.from_iterable(self._known.values()))

    def restore(self, kept: RoundsKept) -> None:
        """Take what `kept` gave."""
        for line in kept.lines:
            self._add(line)
