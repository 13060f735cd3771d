"""How much each client of a cohort sends, and what it weighs (BCRS: Tang et al. 2024, 2408.14736).
Pure.

An update has n numbers, of which a client sends the k largest, 4 bytes each, and where they are, as
the codec `topk` writes them (`compression/sparse/indices.py`); all of them, without places, where
that is no more. Running statistics go whole. So

    bytes(k) = whole + min(4·k + places(n, k), 4·n)           t_i(k) = L_i + bytes(k) / B_i
    T = max t_i(k*)     k* = max(1, round(CR*·n))             over the cohort
    k_i = max(k*, the largest k with t_i(k) <= T)             p'_i ~ p_i·(CR_i / mean CR)^alpha

The paper counts 2·CR·V: a place as large as a number, where ours takes 1 to 2 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from ...compression.sparse.indices import sizes_bytes
from ...dag.cost.network import Network
from ...dag.permutation import Domain, key
from ...dag.rounds.cohorts import WEIGHT_UNIT
from ...job.clients.client_compression import ClientLinks, Spread, spread_of
from ...job.units import Duration, Rate
from ...proto.broker_pb2 import HostLine
from .segments import adds_up

__all__ = [
    "Links",
    "Update",
    "as_uploaded",
    "lines_of",
    "links_of",
    "sending_to_all",
    "shown_line",
    "weights_of",
]

_LEAST = 0.1
"""Of its mean, the least that a normal draw comes to."""
_BELL = NormalDist()
_FASTEST = 1e12
"""Bytes/s that a line without a limit counts for."""
_TRIPS, _LONG_S = 4.0, 0.1
"""A shorter upload, in round trips or seconds, tells of its latency and its processes."""

Counts = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Links:
    """Links of some clients, in one order: seconds, and bytes per second, (clients,) each."""

    latency_s: Numbers
    bytes_per_s: Numbers


def links_of(links: ClientLinks, clients: Sequence[int]) -> Links:
    """Return the links of these clients, by number: a function of (seed, client)."""
    numbers = np.array(clients, np.uint64)

    def drawn(spread: Spread, what: int) -> Numbers:
        kind, first, second = spread
        if kind == "fixed":
            return np.full(len(numbers), first)
        words = key(links.seed, Domain.CLIENT_LINK, what, numbers) >> np.uint64(12)
        even = (words.astype(np.float64) + 0.5) / 2.0**52  # in (0, 1)
        if kind == "uniform":
            return first + (second - first) * even
        bell = np.array([_BELL.inv_cdf(x) for x in even.tolist()])
        return np.maximum(_LEAST * first, first + second * bell)

    return Links(drawn(spread_of(links.latency, Duration), 0), drawn(spread_of(links.up, Rate), 1))


def lines_of(network: Network) -> Numbers:
    """Return what each peer gives at most to all others together, (peers,) bytes/s: its uplink, and
    no more than its fastest pair carries, of those that were measured if some were. Where few are
    nobody knows the uplink, and the sum of what all carry may be many times of it."""
    pairs = apart = _apart(network)
    if network.measured is not None:
        known = apart & network.measured
        pairs = np.where(known.any(1, keepdims=True), known, apart)
    fastest = np.where(pairs, network.bandwidth, 0.0).max(1)
    found: Numbers = np.minimum(np.minimum(network.up, fastest), _FASTEST)
    return found


def sending_to_all(network: Network, shown: Sequence[HostLine | None]) -> Links:
    """Return the links by which peers, two at least, give what others add up, in the order of
    `network`: those that uploads of rounds gone by have shown, or else (None) what follows from
    pairs and lines. Who adds up what is as `lines_of` (`broker/policies/segments.py`): all but the
    own part goes by the line, each part by its pair."""
    network = as_uploaded(network, shown)
    apart, lines = _apart(network), lines_of(network)
    fastest = lines.max()
    adding = np.where([adds_up(line, fastest) for line in lines], lines, 0.0)
    parts = adding / adding.sum()
    sent = apart & (parts > 0)
    by_pair = np.where(sent, network.bandwidth / np.where(sent, parts, 1.0), np.inf).min(1)
    by_line = lines / np.maximum(1.0 - parts, 1.0 / _FASTEST)
    found = np.minimum(by_line, by_pair)
    for i, line in enumerate(shown):
        found[i] = found[i] if line is None else line.update_bytes_per_s
    return Links(_longest(network), found)


def as_uploaded(network: Network, shown: Sequence[HostLine | None]) -> Network:
    """Return the network in which the line of each peer, in the order of `network`, is the one that
    its uploads have shown; None: none has. Pairs of such a peer carry as much."""
    latency, bandwidth, up = network.latency_s.copy(), network.bandwidth.copy(), network.up.copy()
    for i, line in enumerate(shown):
        if line is not None:
            latency[i], bandwidth[i], up[i] = line.latency_s, line.bytes_per_s, line.bytes_per_s
    return replace(network, latency_s=latency, bandwidth=bandwidth, up=up)


def shown_line(
    network: Network, peer: int, sent_bytes: int, update_bytes: int, seconds: float
) -> HostLine | None:
    """Return what an upload of a peer, by its number in `network`, has shown: `sent_bytes` of its
    update, which has `update_bytes`, left in `seconds`, from the first byte to the last
    acknowledgement. None: nothing. Those of its update are known, and it does not send more."""
    latency_s = float(_longest(network)[peer])
    there_s = 2 * latency_s
    if not sent_bytes or seconds < max(_LONG_S, _TRIPS * there_s):
        return None
    rate, of_all = (
        min(size / (seconds - there_s), _FASTEST)
        for size in (min(sent_bytes, update_bytes), update_bytes)
    )
    return HostLine(bytes_per_s=rate, update_bytes_per_s=of_all, latency_s=latency_s)


def _longest(network: Network) -> Numbers:
    """Return the longest latency from each to another one, (peers,) seconds."""
    found: Numbers = np.where(_apart(network), network.latency_s, 0.0).max(1)
    return found


def _apart(network: Network) -> npt.NDArray[np.bool_]:
    """Return (peers, peers), whether these are two."""
    return ~np.eye(len(network.peers), dtype=bool)


@dataclass(frozen=True, slots=True)
class Update:
    """What a client may send. elements: n; whole: bytes of what is always sent."""

    elements: int
    whole: int = 0

    def bytes(self, kept: Counts) -> Counts:
        """Return the bytes of so many numbers, by client."""
        return self.whole + np.minimum(self._sparse(kept), 4 * self.elements)

    def seconds(self, kept: Counts, links: Links) -> Numbers:
        """Return how long each client sends."""
        return links.latency_s + self.bytes(kept) / links.bytes_per_s

    def least(self, ratio: float, clients: int) -> Counts:
        """Return k* for so many clients; all numbers where these take no more bytes."""
        return self._dense(np.full(clients, max(1, round(ratio * self.elements))))

    def by_links(self, ratio: float, links: Links) -> Counts:
        """Return how many numbers each client sends, so that all end as the slowest does."""
        low = self.least(ratio, len(links.bytes_per_s))
        until = self.seconds(low, links).max()
        high = np.full_like(low, self.elements)
        while (low < high).any():
            middle = (low + high + 1) // 2
            fits = self.seconds(middle, links) <= until
            low, high = np.where(fits, middle, low), np.where(fits, high, middle - 1)
        return self._dense(low)

    def _sparse(self, kept: Counts) -> Counts:
        return 4 * kept + sizes_bytes(self.elements, kept)

    def _dense(self, kept: Counts) -> Counts:
        whole = self._sparse(kept) >= 4 * self.elements
        return np.where(whole, self.elements, kept)


def weights_of(shares: Sequence[int], kept: Counts, alpha: float) -> list[int]:
    """Return what each client weighs, at least 1. `shares`: its samples, or 1."""
    more = (kept / kept.mean()) ** alpha
    return [
        max(1, round(n * WEIGHT_UNIT * by)) for n, by in zip(shares, more.tolist(), strict=True)
    ]
