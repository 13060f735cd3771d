"""Measured and assumed wide-area networks of the literature, from `topologies.json`.

    seconds(n bytes) = latency + n / bandwidth        one way; each link holds in both directions

The file keeps the source and the licence of every set beside its numbers. A set lists places and
the links between them; its nodes sit at places.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...dag.cost.network import Network
from ...dag.plan.plan import PeerId

__all__ = ["Topology", "load", "names", "topology_of"]

Floats = NDArray[np.float64]
FILE = Path(__file__).parents[1] / "topologies.json"


@dataclass(frozen=True, eq=False)
class Topology:
    """A set: K places, and N nodes at them."""

    name: str
    places: tuple[str, ...]
    latency_s: Floats
    """(K, K), symmetric; on the diagonal between two nodes of one place."""
    bandwidth: Floats
    """(K, K), bytes/s, the same."""
    node_places: tuple[int, ...]
    """(N,), the place of each node; empty: the set places none."""
    experiment: Mapping[str, Any]
    """Sizes of the authors' workload, as they state them."""

    def network(self) -> Network:
        """The N nodes, named PLACE-NUMBER; nothing limits what one node sends to several."""
        at = np.array(self.node_places, dtype=np.int64)
        grid = np.ix_(at, at)
        seen = [self.node_places[: i + 1].count(k) for i, k in enumerate(self.node_places)]
        peers = [f"{self.places[k]}-{n}" for k, n in zip(self.node_places, seen, strict=True)]
        latency_s, bandwidth = self.latency_s[grid], self.bandwidth[grid]
        np.fill_diagonal(latency_s, 0.0)
        np.fill_diagonal(bandwidth, np.inf)
        free = np.full(len(at), np.inf)
        return Network(tuple(PeerId(p) for p in peers), latency_s, bandwidth, free, free.copy())


@functools.cache
def _sets() -> dict[str, dict[str, Any]]:
    return {s["name"]: s for s in json.loads(FILE.read_text(encoding="utf-8"))["sets"]}


def names() -> tuple[str, ...]:
    """The sets that there are."""
    return tuple(_sets())


def load(name: str, variant: str = "") -> Topology:
    """A set with the changes of one of its variants. Raises ValueError for unknown names."""
    if name not in _sets():
        raise ValueError(f'no network set is named "{name}"; known: {", ".join(names())}')
    return topology_of(_sets()[name], variant)


def topology_of(table: Mapping[str, Any], variant: str = "") -> Topology:
    """A set from its table, with the fields that those of `topologies.json` have. Raises ValueError
    for a variant that it has not, and for a pair of places without a link."""
    name = table["name"]
    changes: Mapping[str, Any] = {}
    if variant:
        if variant not in table["variants"]:
            known = ", ".join(table["variants"]) or "none"
            raise ValueError(f'"{name}" has no variant "{variant}"; known: {known}')
        changes = table["variants"][variant]
    places = tuple(table["places"])
    index = {place: k for k, place in enumerate(places)}
    latency_ms = np.full((len(places), len(places)), np.nan)
    bandwidth = latency_ms.copy()

    if table["other_pairs"]:
        latency_ms[:] = table["other_pairs"]["latency_ms"]
        bandwidth[:] = table["other_pairs"]["bandwidth_bytes_per_s"]
    inside = changes.get("same_place", table["same_place"])
    np.fill_diagonal(latency_ms, inside["latency_ms"])
    np.fill_diagonal(bandwidth, inside["bandwidth_bytes_per_s"])
    for a, b, ms, rate in (*table["links"], *changes.get("links", ())):
        for pair in ((index[a], index[b]), (index[b], index[a])):
            latency_ms[pair], bandwidth[pair] = ms, rate
    if np.isnan(bandwidth).any():
        a, b = (places[int(i)] for i in np.argwhere(np.isnan(bandwidth))[0])
        raise ValueError(f'"{name}" has no link between {a} and {b}')
    return Topology(
        name,
        places,
        latency_ms / 1000,
        bandwidth,
        tuple(table["node_places"]),
        table["experiment"],
    )
