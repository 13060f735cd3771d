"""The tables of scenario.toml as frozen dataclasses, key by key; `scenario.py` joins them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self

from ..job.settings import Settings, SettingsError, nearest
from ..job.units import ByteCount, Duration, Rate
from .devices import DEVICES, Device

__all__ = [
    "MOST_PEERS",
    "BrokerTable",
    "Churn",
    "DeviceTable",
    "Expect",
    "Link",
    "PeerTable",
    "Place",
    "Renamed",
    "count",
    "expand",
    "not_default",
]

MOST_PEERS = 4096
"""Of one scenario: its matrices have this many squared numbers, 134 MB each."""

GBIT = Rate("1Gbit")
MEMORY = ByteCount("4GiB")
ZERO, NEAR, AWAY = Duration("0s"), Duration("1ms"), Duration("60s")
OVERHEAD = Duration("10us")

_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_RANGE = re.compile(r"\{([0-9]{1,18})\.\.([0-9]{1,18})\}")


class Renamed(Settings):
    """Settings with keys in the file that cannot be the names of their fields."""

    KEYS: ClassVar[Mapping[str, str]]
    """Key in the file -> field."""

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> Self:
        for key, name in cls.KEYS.items():
            if name in table:
                raise SettingsError(name, f'is not a known key; did you mean "{key}"?')
        try:
            return super().from_table({cls.KEYS.get(k, k): v for k, v in table.items()})
        except SettingsError as error:
            wrong, problem = error.key, error.problem
            for key, name in cls.KEYS.items():
                wrong, problem = key if wrong == name else wrong, problem.replace(name, key)
            raise SettingsError(wrong, problem) from None


def _positive(settings: Settings, *names: str) -> None:
    for name in names:
        if not 0 < (value := getattr(settings, name)) < float("inf"):
            raise SettingsError(name, f"is {value}: expected more than 0, and finite")


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
        _positive(self, "flops", "memory_bandwidth")


@dataclass(frozen=True, kw_only=True)
class PeerTable(Settings):
    """One peer, or several that differ in their number only: "home-{1..4}"."""

    name: str
    """Of its own; letters, digits, "-", "_", "." and one range of numbers."""
    place: str
    """Where it is: peers of one place share that place's links."""
    device: str | DeviceTable = "cpu-1"
    """What it computes on: a name of sim/devices.py, or numbers."""
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
    """What it costs."""
    data: tuple[str, ...] = ()
    """Data sets that it holds."""

    def check(self) -> None:
        count(self.name)  # raises
        if not _NAME.fullmatch(self.place):
            raise SettingsError("place", f'is "{self.place}": expected letters, digits, - _ .')
        _positive(self, "memory", "up", "down")
        if isinstance(self.device, str) and self.device not in DEVICES:
            meant = nearest(self.device, DEVICES)
            raise SettingsError(
                "device",
                f'is "{self.device}", which is no known device; did you mean "{meant}"? '
                f"(known: {', '.join(DEVICES)}; or a table with flops and memory_bandwidth)",
            )
        most = self.hardware.memory_bytes
        if most is not None and self.memory > most:
            raise SettingsError(
                "memory", f"is {self.memory}: expected at most {most}B, all that {self.device} has"
            )

    @property
    def hardware(self) -> Device:
        if isinstance(self.device, str):
            return DEVICES[self.device]
        return Device(
            flops=self.device.flops,
            memory_bandwidth=self.device.memory_bandwidth,
            overhead_s=self.device.overhead,
        )


def count(name: str) -> int:
    """How many peers a name stands for. Raises SettingsError unless it is one, or has one range."""
    ranges = _RANGE.findall(name)
    if not _NAME.fullmatch(_RANGE.sub("", name) or "-") or len(ranges) > 1 or not name:
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
class Place(Settings):
    """What holds between two peers of one place."""

    latency: Duration = NEAR
    """One way."""
    bandwidth: Rate = GBIT
    """Of each pair."""
    at: tuple[float, float] | None = None
    """Latitude and longitude."""

    def check(self) -> None:
        _positive(self, "bandwidth")


@dataclass(frozen=True, kw_only=True)
class Link(Renamed):
    """What holds between two places or peers; the more specific link wins."""

    KEYS: ClassVar[Mapping[str, str]] = MappingProxyType({"from": "from_"})

    from_: str
    """A place or a peer; `from` in the file."""
    to: str
    """A place or a peer."""
    latency: Duration
    """One way."""
    bandwidth: Rate
    """Of each pair of peers."""
    jitter: Duration = ZERO
    """Spread of the latency."""
    loss: float = 0.0
    """Share of packets that get lost."""
    both: bool = True
    """Whether it holds for the other direction, too."""

    def check(self) -> None:
        _positive(self, "bandwidth")
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
        _positive(self, "up", "down")


@dataclass(frozen=True, kw_only=True)
class Churn(Settings):
    """Peers that come and go by chance."""

    fail_per_hour: float = 0.0
    """Of each peer."""
    return_after: Duration = AWAY
    """How long a failed peer stays away."""
    trace: str = ""
    """CSV of absences instead."""


@dataclass(frozen=True, kw_only=True)
class Expect(Settings):
    """What a simulation must reach."""

    loss_below: float | None = None
    """Last loss."""
    goodput_at_least: float | None = None
    """Share of the time that went into steps that counted."""
    max_loss_difference: float | None = None
    """From the single process, at any step."""
    step_time_error_at_most: float | None = None
    """Of the prediction, relative."""


def not_default(settings: Settings, names: tuple[str, ...] = ()) -> Iterator[str]:
    """The keys, of those named or of all, whose values are not the defaults."""
    for f in fields(settings):  # type: ignore[arg-type]
        default = f.default_factory() if callable(f.default_factory) else f.default
        if (not names or f.name in names) and getattr(settings, f.name) != default:
            yield f.name
