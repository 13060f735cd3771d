"""What holds between real processes that are to be far apart: latency and bandwidth of each
directed pair, uplinks and downlinks, and how those who send at once share them.

    fair_rates(flows, shaping)      the rate of each flow under way, by max-min fairness

The same model as the virtual world's, so that a run of real processes can be held against it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .naming import BROKER

if TYPE_CHECKING:
    from ..dag.network import Network
    from .scenario import Scenario

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

    def __post_init__(self) -> None:
        count = len(self.names)
        if len(set(self.names)) != count:
            raise ValueError(f"names are {', '.join(self.names)}: expected each of them once")
        for name in ("latency_s", "bandwidth"):
            square: tuple[Row, ...] = getattr(self, name)
            if len(square) != count or any(len(row) != count for row in square):
                raise ValueError(f"{name}: expected {count} rows of {count} numbers")
            for i, row in enumerate(square):
                for j, value in enumerate(row):
                    if i != j:
                        where = f"{name} of {self.names[i]} to {self.names[j]}"
                        _check(where, value, zero=name == "latency_s")
        for name in ("up", "down"):
            row = getattr(self, name)
            if len(row) != count:
                raise ValueError(f"{name} has {len(row)} numbers: expected {count}")
            for end, value in zip(self.names, row, strict=True):
                _check(f"{name} of {end}", value, zero=False)

    @classmethod
    def of(cls, network: Network) -> Shaping:
        """The paths of a network of peers, who stand in it by the same names."""
        return cls(
            names=tuple(str(p) for p in network.peers),
            latency_s=tuple(tuple(map(float, row)) for row in network.latency_s),
            bandwidth=tuple(tuple(map(float, row)) for row in network.bandwidth),
            up=tuple(map(float, network.up)),
            down=tuple(map(float, network.down)),
        )

    @classmethod
    def of_scenario(cls, scenario: Scenario) -> Shaping:
        """The paths between a scenario's peers and its broker, slowed by its time_scale. Raises
        SettingsError when no link says how the broker is reached."""
        from .networks import matrices
        from .tables import PeerTable

        where = scenario.broker
        place = where.place or scenario.peers[0].place
        broker = PeerTable(name=BROKER, place=place, up=where.up, down=where.down)
        network = matrices([*scenario.peers, broker], *scenario.spelled_out)
        return cls.of(network).scaled(scenario.time_scale)

    def scaled(self, time_scale: float) -> Shaping:
        """Everything `time_scale` times as slow: latencies longer and rates lower by the same
        factor. With compute stretched by it as well, a run takes that much longer and is otherwise
        the same. Raises ValueError unless it is positive and finite."""
        _check("time_scale", time_scale, zero=False)
        if time_scale == 1.0:
            return self

        def slower(row: Row) -> Row:
            return tuple(rate / time_scale for rate in row)

        return replace(
            self,
            latency_s=tuple(tuple(s * time_scale for s in row) for row in self.latency_s),
            bandwidth=tuple(slower(row) for row in self.bandwidth),
            up=slower(self.up),
            down=slower(self.down),
        )

    def number(self, name: str) -> int:
        """Of an end. Raises ValueError for one that is not here."""
        try:
            return self.names.index(name)
        except ValueError:
            known = ", ".join(self.names)
            raise ValueError(f'no end is called "{name}": expected one of {known}') from None

    def round_trip_s(self, a: str, b: str) -> float:
        i, j = self.number(a), self.number(b)
        return self.latency_s[i][j] + self.latency_s[j][i]

    def to_json(self) -> str:
        """On one line."""
        return json.dumps({name: getattr(self, name) for name in _FIELDS})

    @classmethod
    def from_json(cls, text: str) -> Shaping:
        """What `to_json` wrote. Raises ValueError for anything else."""
        table: Any = json.loads(text)
        if not isinstance(table, dict) or set(table) != set(_FIELDS):
            raise ValueError(f"expected a JSON object with {', '.join(_FIELDS)}")
        return cls(
            names=tuple(table["names"]),
            latency_s=tuple(map(tuple, table["latency_s"])),
            bandwidth=tuple(map(tuple, table["bandwidth"])),
            up=tuple(table["up"]),
            down=tuple(table["down"]),
        )


_FIELDS = ("names", "latency_s", "bandwidth", "up", "down")


def fair_rates(
    flows: Sequence[Flow], shaping: Shaping, factors: Mapping[Flow, float] | None = None
) -> dict[Flow, float]:
    """Bytes/s of each flow when all of them always have something to send: max-min fair, so that
    none can have more without one that has no more than it getting less. `factors` divides the
    bandwidth of pairs.

    By filling (Bertsekas and Gallager, Data Networks, 6.5.2): all rates grow alike until a limit
    is full; who is behind it stays there, and the others grow on.
    """
    members: dict[tuple[str, int, int], list[Flow]] = {}
    limits: dict[tuple[str, int, int], float] = {}
    for flow in flows:
        a, b = flow
        pair = shaping.bandwidth[a][b] / (factors.get(flow, 1.0) if factors else 1.0)
        for key, limit in (
            (("pair", a, b), pair),
            (("up", a, 0), shaping.up[a]),
            (("down", b, 0), shaping.down[b]),
        ):
            members.setdefault(key, []).append(flow)
            limits[key] = limit
    rates: dict[Flow, float] = {}
    growing = dict.fromkeys(flows)
    while growing:
        shares = {
            key: max(0.0, limits[key] - sum(rates[f] for f in fs if f in rates)) / here
            for key, fs in members.items()
            if (here := sum(f in growing for f in fs))
        }
        level = min(shares.values())
        for key, share in shares.items():
            if share <= level * (1 + 1e-12):
                for flow in members[key]:
                    if growing.pop(flow, 0) is None:
                        rates[flow] = level
    return rates


def _check(what: str, value: float, *, zero: bool) -> None:
    good = math.isfinite(value) and value >= 0 if zero else value > 0
    if not good:
        kind = "not negative and finite" if zero else "positive"
        raise ValueError(f"{what} is {value}: expected it {kind}")
