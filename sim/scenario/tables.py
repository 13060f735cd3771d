"""The tables of scenario.toml as frozen dataclasses, key by key; `scenario.py` joins them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal

from ...job.settings import Settings, SettingsError, expect, meant
from ...job.units import ByteCount, Duration, Rate
from .devices import DEVICES, DeviceDatasheet
from .mishaps import Churn, Expectations, FaultTable, Renamed, positive, share

__all__ = [
    "MOST_PEERS",
    "BrokerTable",
    "Churn",
    "DeviceTable",
    "Expectations",
    "FaultTable",
    "LinkTable",
    "PeerTable",
    "Place",
    "count",
    "expand",
]

MOST_PEERS = 4096
"""The most peers of one scenario: its matrices have this many squared numbers, 134 MB each."""
NAME = re.compile(r"[A-Za-z0-9_.-]+")
_RANGE = re.compile(r"\{([0-9]{1,18})\.\.([0-9]{1,18})\}")

GBIT = Rate("1Gbit")
MEMORY, NOTHING = ByteCount("4GiB"), ByteCount("0B")
ZERO, NEAR = Duration("0s"), Duration("1ms")
OVERHEAD = Duration("10us")


def count(name: str) -> int:
    """How many peers a name stands for. Raises SettingsError unless it is one, or has one range."""
    ranges = _RANGE.findall(name)
    if not NAME.fullmatch(_RANGE.sub("", name) or "-") or len(ranges) > 1 or not name:
        example = 'letters, digits, - _ . and at most one range such as "home-{1..4}"'
        raise SettingsError("name", f'is "{name}": expected {example}')
    if not ranges:
        return 1
    first, last = (int(n) for n in ranges[0])
    if not first <= last < first + MOST_PEERS:
        problem = f"ends before it starts: {first} to {last}"
        if last > first:
            problem = f"is {last - first + 1} peers: expected at most {MOST_PEERS}"
        raise SettingsError("name", f'is "{name}": its range {problem}')
    return last - first + 1


def expand(name: str) -> tuple[str, ...]:
    """The names that a name with a range stands for, after `count`."""
    ranges = _RANGE.search(name)
    if ranges is None:
        return (name,)
    numbers = range(int(ranges[1]), int(ranges[2]) + 1)
    return tuple(f"{name[: ranges.start()]}{n}{name[ranges.end() :]}" for n in numbers)


@dataclass(frozen=True, kw_only=True)
class DeviceTable(Settings):
    """A device by its published numbers, for one that the table of devices does not know."""

    flops: float
    """Peak fp32 FLOP/s."""
    memory_bandwidth: Rate
    """Peak of its memory."""
    overhead: Duration = OVERHEAD
    """Fixed time of each kernel."""

    def check(self) -> None:
        positive(self, "flops", "memory_bandwidth")


@dataclass(frozen=True, kw_only=True)
class PeerTable(Settings):
    """One peer, or several that differ in their number only: "home-{1..4}"."""

    name: str
    """A name of its own; letters, digits, "-", "_", "." and one range of numbers."""
    place: str
    """Where it is: peers of one place share that place's links."""
    device: str | DeviceTable = "cpu-1"
    """What it computes on: a name of sim/scenario/devices.py, or numbers."""
    memory: ByteCount = MEMORY
    """Memory of the device, and of its host."""
    up: Rate = GBIT
    """Shared by all that it sends at once."""
    down: Rate = GBIT
    """Shared by all that it receives at once."""
    nat: Literal["open", "outbound"] = "open"
    """Whether others can dial it."""
    owner: str = ""
    """Whose it is, for people."""
    ops: Literal["full", "core"] = "full"
    """The operators that it knows."""
    joins: Duration = ZERO
    """When it comes."""
    stays: Duration | Literal[""] = ""
    """How long it stays; empty: to the end."""
    price_per_hour: float = 0.0
    """What it costs while it is there, in any currency."""
    entry: int | None = None
    """Which of the [[peers]] it comes from; not part of the file."""

    OURS: ClassVar[frozenset[str]] = frozenset({"entry"})

    def check(self) -> None:
        count(self.name)  # raises
        if not NAME.fullmatch(self.place):
            raise SettingsError("place", f'is "{self.place}": expected letters, digits, - _ .')
        positive(self, "memory", "up", "down")
        if self.stays != "" and not self.stays > 0:
            raise SettingsError("stays", 'is 0s: expected more, or "" for one that stays')
        expect(self, "price_per_hour", 0 <= self.price_per_hour < float("inf"), "at least 0")
        if isinstance(self.device, str) and self.device not in DEVICES:
            raise SettingsError(
                "device",
                f'is "{self.device}", which is no known device{meant(self.device, DEVICES)} '
                f"(known: {', '.join(DEVICES)}; or a table with flops and memory_bandwidth)",
            )
        most = self.hardware.memory_bytes
        fits = most is None or self.memory <= most
        expect(self, "memory", fits, f"at most {most}B, all that {self.device} has")

    def price(self, seconds: float) -> float:
        """Return the price of being there in a run of so many seconds of the scenario."""
        end_s = seconds if self.stays == "" else min(seconds, self.joins + self.stays)
        return self.price_per_hour * max(0.0, end_s - self.joins) / 3600.0

    @property
    def hardware(self) -> DeviceDatasheet:
        if isinstance(self.device, str):
            return DEVICES[self.device]
        return DeviceDatasheet(
            flops=self.device.flops,
            memory_bandwidth=self.device.memory_bandwidth,
            overhead_s=self.device.overhead,
        )


@dataclass(frozen=True, kw_only=True)
class Place(Settings):
    """What holds between two peers of one place."""

    latency: Duration = NEAR
    """One way."""
    bandwidth: Rate = GBIT
    """The bandwidth of each pair."""
    at: tuple[float, float] | None = None
    """Latitude and longitude."""

    def check(self) -> None:
        positive(self, "bandwidth")
        if self.at is not None and not (abs(self.at[0]) <= 90 and abs(self.at[1]) <= 180):
            raise SettingsError(
                "at", f"is {list(self.at)}: expected [latitude, longitude], to ±90 and ±180"
            )


@dataclass(frozen=True, kw_only=True)
class LinkTable(Renamed):
    """What holds between two places or peers; the more specific link wins."""

    KEYS: ClassVar[Mapping[str, str]] = MappingProxyType({"from": "from_"})

    from_: str
    """A place or a peer; `from` in the file."""
    to: str
    """A place or a peer."""
    latency: Duration
    """One way."""
    bandwidth: Rate
    """The bandwidth of each pair of peers."""
    burst: ByteCount = NOTHING
    """For each pair, the bytes that go at once after a rest, a token bucket filled at
    `bandwidth`."""
    jitter: Duration = ZERO
    """A message is earlier or later by up to this, drawn anew for each."""
    loss: float = 0.0
    """Share of packets that get lost, and are sent again: it costs time only."""
    both: bool = True
    """Whether it holds for the other direction, too."""

    def check(self) -> None:
        positive(self, "bandwidth")
        share(self, "loss", whole=False)
        if self.from_ == self.to:
            raise SettingsError(
                "to",
                f'is "{self.to}", where the link comes from: [places.{self.to}] says what holds '
                "inside a place, and a peer needs no link to itself",
            )

    @property
    def directions(self) -> tuple[tuple[str, str], ...]:
        there, back = (self.from_, self.to), (self.to, self.from_)
        return (there, back) if self.both else (there,)


@dataclass(frozen=True, kw_only=True)
class BrokerTable(Settings):
    """Where the broker is."""

    place: str = ""
    """Empty: the first peer's."""
    up: Rate = GBIT
    """Shared by all that it sends at once."""
    down: Rate = GBIT
    """Shared by all that it receives at once."""

    def check(self) -> None:
        positive(self, "up", "down")
