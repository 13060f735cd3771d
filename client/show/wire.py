"""What compression does on every link, as the plan expects it and as the peers measured it.

Before a run: the codecs of `LinkPrediction`. During it: `LinkUse` of every committed step, summed
by link, role and codec. Where nothing is compressed there is nothing to show.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from ...dag.schedule.filled import taken
from ...proto.broker_pb2 import LinkUse, PlanReport, RunEvent
from .text import size_text, time_text

__all__ = ["CompressionSums", "LinkRow", "planned", "sentence"]

RAW = "raw/1"
"""The codec that changes nothing."""


@dataclass(kw_only=True)
class LinkRow:
    """One role on one directed link, by codec; peers as people call them."""

    source: str
    destination: str
    role: str
    codec: str
    bytes: int = 0
    """Encoded."""
    dense_bytes: int = 0
    """Of the same tensors, uncompressed."""
    saved_s: float = 0.0
    """Seconds of transfer that it saves, as the plan expects."""
    encode_s: float = 0.0
    """Seconds that both ends take to encode and decode."""
    error: float = 0.0
    """Relative L2, the mean of what was sampled, or what the plan expects; 0: nothing is lost, or
    no sample was taken."""
    steps: int = 0
    """In how many the codec was used; bytes and seconds are of all of them."""


def planned(report: PlanReport, called: Mapping[str, str]) -> list[LinkRow]:
    """What a plan expects of one step: a row per link and role, the busiest link first; empty where
    nothing is compressed. `called`: peers' names by id."""
    rows = [
        taken(
            LinkRow,
            use,
            source=called.get(link.source, link.source),
            destination=called.get(link.destination, link.destination),
            steps=1,
        )
        for link in sorted(report.predicted.links, key=lambda x: -x.busy_s)
        for use in link.codecs
    ]
    return rows if any(row.codec != RAW for row in rows) else []


def sentence(row: LinkRow) -> str:
    """A row as people read it in a line."""
    where = f"{row.source} -> {row.destination} {row.role.replace('_', ' ')}"
    smaller = row.dense_bytes / row.bytes if row.bytes else 1.0
    sizes = f"{size_text(row.bytes)} of {size_text(row.dense_bytes)} ({smaller:.3g}x)"
    times = f"saves {time_text(row.saved_s)}, encoding {time_text(row.encode_s)}"
    return f"{where}: {row.codec}, {sizes}, {times}, error {row.error:.2g}"


_OTHERS = "others"
"""Of a step with very many links, those that it tells of together."""


class CompressionSums:
    """Sums what the steps of a run measured. `names`: asked for peers' names by id, once, when
    there is something to show."""

    def __init__(self, names: Callable[[], Mapping[str, str]]) -> None:
        self._names = names
        self._saved_s: dict[tuple[str, str, str], float] = {}  # of a step, by link and role
        self._sums: dict[tuple[str, str, str, str], LinkRow] = {}  # errors: of all samples
        self._samples = Counter[tuple[str, str, str, str]]()

    def see(self, event: RunEvent) -> None:
        """Takes in one event of the run."""
        if event.HasField("step"):
            for key in dict.fromkeys(map(self._add, event.step.links)):  # both ends tell of a link
                self._sums[key].steps += 1
                if key[3] != RAW:
                    self._sums[key].saved_s += self._saved_s.get(key[:3], 0.0)
        elif event.HasField("plan"):
            self._saved_s = {
                (link.source, link.destination, use.role): use.saved_s
                for link in event.report.predicted.links
                for use in link.codecs
            }

    def _add(self, use: LinkUse) -> tuple[str, str, str, str]:
        source, destination, role, codec = key = use.source, use.destination, use.role, use.codec
        new = LinkRow(source=source, destination=destination, role=role, codec=codec)
        found = self._sums.setdefault(key, new)
        found.bytes += use.bytes
        found.dense_bytes += use.dense_bytes
        found.encode_s += use.encode_s + use.decode_s
        found.error += use.error
        self._samples[key] += use.error != 0
        return key

    def rows(self) -> list[LinkRow]:
        """By link, role and codec, what saved the most bytes first; empty where nothing was
        compressed."""
        if all(codec == RAW for *_, codec in self._sums):
            return []
        called = self._names()
        rows = [
            replace(
                found,
                source=called.get(found.source, found.source) or _OTHERS,
                destination=called.get(found.destination, found.destination) or _OTHERS,
                error=found.error / max(1, self._samples[key]),
            )
            for key, found in self._sums.items()
        ]
        return sorted(rows, key=lambda r: r.bytes - r.dense_bytes)

    def table(self) -> list[dict[str, Any]]:
        """The rows as plain values."""
        return [asdict(row) for row in self.rows()]
