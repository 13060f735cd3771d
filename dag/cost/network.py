"""Links between peers as matrices: the transfer part of the cost model.

    seconds(n, a -> b) = latency[a, b] + n / bandwidth[a, b]

and all that a peer sends at once shares its uplink, all that it receives its downlink.
A peer to itself is free (docs/architecture.md, "One cost model").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..plan.plan import PeerId

__all__ = ["Network", "uniform"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Network:
    """What P peers can send each other. Rows send, columns receive.

    Raises ValueError unless all shapes are those of `peers`, latencies are finite and not negative,
    and bandwidths, uplinks and downlinks are positive (infinite: no limit). Diagonals do not count.
    """

    peers: tuple[PeerId, ...]
    latency_s: Floats
    """(P, P), one way."""
    bandwidth: Floats
    """(P, P), bytes/s."""
    up: Floats
    """(P,), bytes/s of the sender's uplink, shared by all that it sends at once."""
    down: Floats
    """(P,), bytes/s of the receiver's downlink."""
    measured: NDArray[np.bool_] | None = None
    """(P, P), where a number was measured or stated and not estimated; None: everywhere."""

    def __post_init__(self) -> None:
        n = len(self.peers)
        for name, shape in (
            ("latency_s", (n, n)),
            ("bandwidth", (n, n)),
            ("up", (n,)),
            ("down", (n,)),
        ):
            array = getattr(self, name)
            if array.shape != shape:
                raise ValueError(f"{name} has shape {array.shape}: expected {shape}, {n} peers")
            bad = ~(array >= 0) | np.isinf(array) if name == "latency_s" else ~(array > 0)
            if len(shape) == 2:
                bad &= ~np.eye(n, dtype=bool)
            if bad.any():
                at = tuple(int(i) for i in np.argwhere(bad)[0])
                where = " to ".join(self.peers[i] for i in at)
                kind = "not negative and finite" if name == "latency_s" else "positive"
                raise ValueError(f"{name} of {where} is {array[at]}: expected it {kind}")

    def __len__(self) -> int:
        return len(self.peers)

    def seconds(self, source: int, destination: int, size_bytes: float) -> float:
        """A transfer alone on the network."""
        if source == destination:
            return 0.0
        rate = min(self.bandwidth[source, destination], self.up[source], self.down[destination])
        return float(self.latency_s[source, destination] + size_bytes / rate)

    def rates(self) -> Floats:
        """(P, P) bytes/s of a transfer alone: least of pair, uplink and downlink; inf on the
        diagonal."""
        alone = np.minimum(self.bandwidth, np.minimum(self.up[:, None], self.down[None, :]))
        np.fill_diagonal(alone, np.inf)
        return alone

    def part(self, indices: Sequence[int]) -> Network:
        """The network of some peers, in the given order."""
        at = np.asarray(indices, dtype=np.int64)
        grid = np.ix_(at, at)
        return Network(
            tuple(self.peers[i] for i in indices),
            self.latency_s[grid],
            self.bandwidth[grid],
            self.up[at],
            self.down[at],
            None if self.measured is None else self.measured[grid],
        )


def uniform(peers: Sequence[PeerId], latency_s: float = 0.0, bandwidth: float = np.inf) -> Network:
    """Every pair alike, each on its own."""
    n = len(peers)
    return Network(
        tuple(peers),
        np.full((n, n), float(latency_s)),
        np.full((n, n), float(bandwidth)),
        np.full(n, np.inf),
        np.full(n, np.inf),
    )
