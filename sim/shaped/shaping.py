"""What holds between real processes that are to be far apart: latency and bandwidth of each
directed pair, uplinks and downlinks, and how those who send at once share them.

    fair_rates(flows, shaping)      the rate of each flow under way, by max-min fairness

The same model as the virtual world's, so that a run of real processes can be held against it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from ...dag.cost.play import max_min

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..scenario.networks import Wide
    from ..scenario.scenario import Scenario

__all__ = ["Flow", "Shaping", "fair_rates"]

Row = tuple[float, ...]
Flow = tuple[int, int]
"""(number of the sender, number of the receiver)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shaping:
    """The paths between N ends: peers, and usually the broker. Rows send, columns receive.

    Raises ValueError unless every array has N entries (squares N rows of N), names are different,
    latencies are finite and not negative, and bandwidths positive (infinite: no limit). Diagonals
    do not count.
    """

    names: tuple[str, ...]
    latency_s: tuple[Row, ...]
    """(N, N), one way."""
    bandwidth: tuple[Row, ...]
    """(N, N), bytes/s of the pair, for all that goes from the one to the other."""
    up: Row
    """(N,), bytes/s, shared by all that an end sends at once."""
    down: Row
    """(N,), bytes/s, shared by all that an end receives at once."""
    jitter_s: tuple[Row, ...] = ()
    """(N, N), what is sent is earlier or later by up to this; empty: none."""
    loss: tuple[Row, ...] = ()
    """(N, N), share of packets that are sent again, in [0, 1); empty: none."""
    burst: tuple[Row, ...] = ()
    """(N, N), bytes that go at once after a rest, as fast as uplink and downlink allow; empty:
    none."""

    def __post_init__(self) -> None:
        count = len(self.names)
        if len(set(self.names)) != count:
            raise ValueError(f"names are {', '.join(self.names)}: expected each of them once")
        for name in ("latency_s", "bandwidth", "jitter_s", "loss", "burst"):
            square: tuple[Row, ...] = getattr(self, name)
            if not square and name in ("jitter_s", "loss", "burst"):
                continue
            if len(square) != count or any(len(row) != count for row in square):
                raise ValueError(f"{name}: expected {count} rows of {count} numbers")
            for i, row in enumerate(square):
                for j, value in enumerate(row):
                    if i != j:
                        where = f"{name} of {self.names[i]} to {self.names[j]}"
                        _check(where, value, zero=name != "bandwidth")
                        if name == "loss" and value >= 1:
                            raise ValueError(f"{where} is {value}: expected less than 1")
        for name in ("up", "down"):
            row = getattr(self, name)
            if len(row) != count:
                raise ValueError(f"{name} has {len(row)} numbers: expected {count}")
            for end, value in zip(self.names, row, strict=True):
                _check(f"{name} of {end}", value, zero=False)

    @classmethod
    def of(cls, ends: Wide) -> Shaping:
        """The paths between all ends that a scenario speaks of, by the names they have there."""
        network = ends.network
        return cls(
            names=tuple(str(p) for p in network.peers),
            latency_s=_rows(network.latency_s),
            bandwidth=_rows(network.bandwidth),
            up=tuple(map(float, network.up)),
            down=tuple(map(float, network.down)),
            jitter_s=_rows(ends.jitter_s) if ends.jitter_s.any() else (),
            loss=_rows(ends.loss) if ends.loss.any() else (),
            burst=_rows(ends.burst) if ends.burst.any() else (),
        )

    @classmethod
    def of_scenario(cls, scenario: Scenario) -> Shaping:
        """The paths between a scenario's peers and its broker, slowed by its time_scale."""
        return cls.of(scenario.wide()).scaled(scenario.time_scale)

    def scaled(self, time_scale: float) -> Shaping:
        """Everything `time_scale` times as slow: latencies longer and rates lower by the same
        factor. With compute stretched by it as well, a run takes that much longer and is otherwise
        the same. Raises ValueError unless it is positive and finite."""
        _check("time_scale", time_scale, zero=False)
        if time_scale == 1.0:
            return self

        def slower(row: Row) -> Row:
            return tuple(rate / time_scale for rate in row)

        def longer(square: tuple[Row, ...]) -> tuple[Row, ...]:
            return tuple(tuple(s * time_scale for s in row) for row in square)

        return replace(
            self,
            latency_s=longer(self.latency_s),
            jitter_s=longer(self.jitter_s),
            bandwidth=tuple(slower(row) for row in self.bandwidth),
            up=slower(self.up),
            down=slower(self.down),
        )

    def number(self, name: str) -> int:
        """The number of an end, by its name. Raises ValueError for one that is not here."""
        try:
            return self.names.index(name)
        except ValueError:
            known = ", ".join(self.names)
            raise ValueError(f'no end is called "{name}": expected one of {known}') from None

    def alone(self, flow: Flow) -> float:
        """Bytes/s of a flow that has the network for itself."""
        a, b = flow
        return min(self.bandwidth[a][b], self.up[a], self.down[b])

    def to_json(self) -> str:
        """On one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Shaping:
        """What `to_json` wrote. Raises ValueError for anything else."""
        table: Any = json.loads(text)
        known = [f.name for f in fields(cls)]
        if not isinstance(table, dict) or set(table) != set(known):
            raise ValueError(f"expected a JSON object with {', '.join(known)}")

        def frozen(value: Any) -> Any:
            return tuple(map(frozen, value)) if isinstance(value, list) else value

        return cls(**{name: frozen(value) for name, value in table.items()})


def fair_rates(
    flows: Sequence[Flow],
    shaping: Shaping,
    factors: Mapping[Flow, float] | None = None,
    bursting: Container[Flow] = (),
) -> dict[Flow, float]:
    """Bytes/s of each flow when all of them always have something to send: max-min fair over
    pairs, uplinks and downlinks. `factors` divides the bandwidth of pairs; those that are
    `bursting` do not see it."""
    n = len(shaping.names)
    room, wanted = dict[int, float](), list[tuple[int, ...]]()
    for a, b in flows:
        pair = 2 * n + a * n + b
        room[a], room[n + b] = shaping.up[a], shaping.down[b]
        room[pair] = shaping.bandwidth[a][b] / (factors.get((a, b), 1.0) if factors else 1.0)
        if (a, b) in bursting:
            room[pair] = min(shaping.up[a], shaping.down[b])
        wanted.append((a, n + b, pair))
    return dict(zip(flows, max_min(wanted, room), strict=True))


def _rows(square: NDArray[np.float64]) -> tuple[Row, ...]:
    return tuple(tuple(map(float, row)) for row in square)


def _check(what: str, value: float, *, zero: bool) -> None:
    good = math.isfinite(value) and value >= 0 if zero else value > 0
    if not good:
        kind = "not negative and finite" if zero else "positive"
        raise ValueError(f"{what} is {value}: expected it {kind}")
