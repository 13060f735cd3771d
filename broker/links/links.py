"""What the broker knows of the links between peers: soft state, from probes and training traffic.

For each directed pair the newest estimate, its age and its origin. A probe's numbers replace what
was known. Training traffic tells the rate of flows that filled the link
(`peer/core/rates/traffic.py`): one by FAR less than was believed replaces it at once, since no plan
that counts on the rest can hold; any other moves it by an exponential mean, since what is a little
less may be others' share, and what is more a burst. The rate is what a link goes on carrying; what
it lets through before is a burst, kept for people, and no plan counts on it. An estimate older than
`MAX_AGE_S` counts as not measured. Numbers that cannot be are not taken, whoever says them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...dag.cost.network import Network
from ...dag.plan.plan import PeerId
from ...planner.network.completion import complete, shared_ends
from ...proto.broker_pb2 import LinkState

__all__ = ["MAX_AGE_S", "Caps", "LinkBurst", "LinkEstimate", "Links", "Origin"]

MAX_AGE_S = 3600.0
MOST_BYTES_PER_S = 1e12
FAR = 1.5
LEAST_BYTES_PER_S = 1.0
"""A slower link says nothing but that it carries nothing: predictions over it are no numbers."""
MOST_LATENCY_S = 60.0
_TRAFFIC_WEIGHT = 0.3

ASSUMED_LATENCY_S = 0.03
ASSUMED_BYTES_PER_S = 12.5e6
"""Where nothing at all was measured: two homes on one continent, 100 Mbit/s."""

Origin = Literal["probe", "traffic"]


class LinkBurst(NamedTuple):
    """The first bytes after a rest went at least so fast, so many of them; zeros: no faster."""

    bytes_per_s: float
    size_bytes: int


@dataclass(slots=True)
class LinkEstimate:
    """The measured latency and rate of the link of one directed pair; NaN in a field: that part was
    never measured."""

    latency_s: float
    bytes_per_s: float
    at: float
    origin: Origin
    burst: LinkBurst | None = None
    shared: bool = False
    """Whether the rate is that of the source's line, which other flows shared."""


@dataclass(frozen=True, slots=True)
class Caps:
    """Capabilities of a peer besides its links. `group`: peers of one site share it; "": alone.
    up, down: the owner's caps, bytes/s; 0: none stated."""

    group: str = ""
    up: float = 0.0
    down: float = 0.0


class Links:
    """Holds the newest estimate of every directed pair of peers, its age and its origin. Times are
    the broker's clock, seconds."""

    def __init__(self) -> None:
        self._known: dict[PeerId, dict[PeerId, LinkEstimate]] = {}

    def report(
        self,
        source: PeerId,
        destination: PeerId,
        latency_s: float,
        bytes_per_s: float,
        now: float,
        origin: Origin,
        burst: LinkBurst | None = None,
        shared: bool = False,
    ) -> str:
        """Takes a measurement; 0 stands for "not measured", and None for a burst that nobody looked
        for; `shared` as in LinkEstimate. Returns why it was not taken, or ""."""
        for name, value, most in (
            ("latency_s", latency_s, MOST_LATENCY_S),
            ("bytes_per_s", bytes_per_s, MOST_BYTES_PER_S),
            ("burst_bytes_per_s", burst.bytes_per_s if burst else 0.0, MOST_BYTES_PER_S),
        ):
            if not 0 <= value <= most:  # NaN too
                return f"{name} is {value:g}: expected 0 to {most:g}"
        if 0 < bytes_per_s < LEAST_BYTES_PER_S:
            return f"bytes_per_s is {bytes_per_s:g}: expected 0, or {LEAST_BYTES_PER_S:g} or more"
        if not latency_s and not bytes_per_s:
            return "it has neither a latency nor a bandwidth"
        rate = bytes_per_s or math.nan
        new = LinkEstimate(latency_s or math.nan, rate, now, origin, burst, shared)
        old = self.get(source, destination, now)
        if old is not None:
            weight = _TRAFFIC_WEIGHT if origin == "traffic" else 1.0
            new.latency_s = _mixed(old.latency_s, new.latency_s, weight)
            at_once = FAR * new.bytes_per_s < old.bytes_per_s  # NaN: no
            new.bytes_per_s = _mixed(old.bytes_per_s, new.bytes_per_s, 1.0 if at_once else weight)
            new.burst = old.burst if burst is None else new.burst
            new.shared = shared if bytes_per_s else old.shared
        self._known.setdefault(source, {})[destination] = new
        return ""

    def get(self, source: PeerId, destination: PeerId, now: float) -> LinkEstimate | None:
        """The estimate, if it is not too old."""
        found = self._known.get(source, {}).get(destination)
        return found if found is not None and now - found.at <= MAX_AGE_S else None

    def is_measured(self, a: PeerId, b: PeerId, now: float) -> bool:
        """Whether bandwidths both ways are known."""
        both = self.get(a, b, now), self.get(b, a, now)
        return all(e is not None and not math.isnan(e.bytes_per_s) for e in both)

    def uplink(self, peer: PeerId, now: float) -> float:
        """The greatest rate measured out of a peer; 0: none."""
        rates = (e.bytes_per_s for e in self._known.get(peer, {}).values() if _fresh(e, now))
        return max((rate for rate in rates if not math.isnan(rate)), default=0.0)

    def forget(self, peer: PeerId) -> None:
        """The peer is somewhere else now: nothing that was measured holds."""
        self._known.pop(peer, None)
        for row in self._known.values():
            row.pop(peer, None)

    def prune(self, now: float) -> None:
        """Drops what is too old."""
        for source, row in list(self._known.items()):
            kept = {b: e for b, e in row.items() if _fresh(e, now)}
            if kept:
                self._known[source] = kept
            else:
                del self._known[source]

    def states(self, peers: Mapping[PeerId, object], now: float) -> list[LinkState]:
        """Every fresh estimate between these peers, for people."""
        return [
            LinkState(
                source=a,
                destination=b,
                latency_s=_shown(e.latency_s),
                bytes_per_s=_shown(e.bytes_per_s),
                age_s=max(0.0, now - e.at),
                burst_bytes_per_s=e.burst.bytes_per_s if e.burst else 0.0,
                burst_bytes=e.burst.size_bytes if e.burst else 0,
            )
            for a, row in self._known.items()
            if a in peers
            for b, e in row.items()
            if b in peers and _fresh(e, now)
        ]

    def network(self, peers: Sequence[PeerId], caps: Mapping[PeerId, Caps], now: float) -> Network:
        """For planning. What was measured stands as it is; the rest is completed from it
        (`planner/network/completion.py`), and `measured` says which is which.

        An uplink is the owner's cap, or else what flows showed that shared it (`_lines`), or else
        what the measured rates out of the peer show of it (`shared_ends`): the greatest of them
        when most are equal, and infinite when they differ, so that the pair's own bandwidth
        decides; taking the greatest then would bind near pairs to what far ones carry. The same for
        downlinks, but for the flows.
        """
        n = len(peers)
        latency, bandwidth = np.full((n, n), np.nan), np.full((n, n), np.nan)
        index = {peer: i for i, peer in enumerate(peers)}
        for i, peer in enumerate(peers):
            for other, e in self._known.get(peer, {}).items():
                j = index.get(other)
                if j is not None and j != i and _fresh(e, now):
                    latency[i, j], bandwidth[i, j] = e.latency_s, e.bytes_per_s
        known = [caps.get(peer, Caps()) for peer in peers]
        full = complete(
            latency,
            bandwidth,
            [c.group for c in known],
            latency_s_if_none=ASSUMED_LATENCY_S,
            bandwidth_if_none=ASSUMED_BYTES_PER_S,
        )
        return Network(
            peers=tuple(peers),
            latency_s=full.latency_s,
            bandwidth=full.bandwidth,
            up=_capped(self._lines(peers, shared_ends(bandwidth), now), [c.up for c in known]),
            down=_capped(shared_ends(bandwidth.T), [c.down for c in known]),
            measured=~np.isnan(bandwidth) | np.eye(n, dtype=bool),
        )

    def _lines(
        self, peers: Sequence[PeerId], shown: NDArray[np.float64], now: float
    ) -> NDArray[np.float64]:
        """(P,) bytes/s of uplinks: where flows shared one, the median of what left it then, and no
        less than what any flow had alone; elsewhere `shown`."""
        found = shown.copy()
        for i, peer in enumerate(peers):
            row = [e for e in self._known.get(peer, {}).values() if _fresh(e, now)]
            if line := [e.bytes_per_s for e in row if e.shared]:
                alone = (e.bytes_per_s for e in row if not (e.shared or math.isnan(e.bytes_per_s)))
                found[i] = max(statistics.median(line), max(alone, default=0.0))
        return found


def _capped(shown: NDArray[np.float64], caps: Iterable[float]) -> NDArray[np.float64]:
    """(P,): the owner's cap where one is stated."""
    stated = np.array(list(caps))
    return np.where(stated > 0, stated, shown)


def _fresh(estimate: LinkEstimate, now: float) -> bool:
    return now - estimate.at <= MAX_AGE_S


def _mixed(old: float, new: float, weight: float) -> float:
    if math.isnan(old) or math.isnan(new):
        return old if math.isnan(new) else new
    return (1 - weight) * old + weight * new


def _shown(value: float) -> float:
    return 0.0 if math.isnan(value) else value
