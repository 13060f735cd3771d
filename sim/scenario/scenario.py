"""The scenario: peers, places and links as a file states them, for the planner and `shoal sim`.

scenario = Scenario.from_toml("sim/scenarios/testbed-8.toml")
scenario.offers(), scenario.network()        # what a planner gets
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from ...dag.cost.network import Network
from ...dag.plan.plan import PeerId
from ...job import Job
from ...job.settings import SettingsError, expect, located, meant, plain, read_toml
from ...job.units import Duration, Rate
from ...planner.base.interface import PeerOffer
from . import topologies
from .mishaps import BETWEEN, Churn, Expectations, FaultTable, Renamed, positive
from .naming import BROKER, named, select
from .networks import Wide, wide
from .tables import (
    BrokerTable,
    LinkTable,
    PeerTable,
    Place,
)

__all__ = ["SCENARIOS", "Scenario"]

SCENARIOS = Path(__file__).parents[1] / "scenarios"
"""The scenarios that come with Shoal; see catalogue.py."""

LIMIT = Duration("10min")


@dataclass(frozen=True, kw_only=True)
class Scenario(Renamed):
    """A whole scenario. After reading, each of `peers` has a name of its own."""

    version: int
    """The version of the format; 1."""
    job: str
    """job.toml, from the scenario's folder."""
    peers: tuple[PeerTable, ...]
    """Who takes part, in the order of joining."""
    name: str = ""
    """For people; the file's stem."""
    seed: int = 0
    """The seed of everything random."""
    job_overrides: Mapping[str, Any] = field(default_factory=dict)
    """Tables and keys of the job with other values, as in [job_overrides.codec]; see `adjusted`."""
    network_set: str = ""
    """`network` in the file: "set:NAME" or "set:NAME:VARIANT" of topologies.json, beneath places
    and links."""
    mode: Literal["real", "virtual", "ghost"] = "real"
    """What is simulated."""
    limit: Duration = LIMIT
    """Longest duration of the simulation."""
    time_scale: float = 1.0
    """The scale of delay, rate and compute together."""
    places: Mapping[str, Place] = field(default_factory=dict)
    """What holds inside places; one that is left out has the defaults."""
    links: tuple[LinkTable, ...] = ()
    """What holds between places and peers."""
    broker: BrokerTable = field(default_factory=BrokerTable)
    """Where the broker is."""
    faults: tuple[FaultTable, ...] = ()
    """What goes wrong, and when."""
    churn: Churn = field(default_factory=Churn)
    """What goes wrong by chance."""
    expect: Expectations = field(default_factory=Expectations)
    """What must be reached."""
    folder: Path = Path()
    """Where relative paths start; not part of the file."""
    path: Path = Path()
    """The file; not part of itself."""
    left: tuple[str, ...] = ()
    """Tables of the file that are for the job that it names, where another one takes its place;
    not part of the file."""

    OURS: ClassVar[frozenset[str]] = frozenset({"folder", "path", "left"})
    OF_ANOTHER: ClassVar[Mapping[str, str]] = MappingProxyType(
        dict.fromkeys(
            ("model", "data", "train", "sync"),
            "jobs have it, and this was read as a scenario: `shoal train FILE` trains a job, and "
            "`shoal sim --job FILE` plays it in a scenario",
        )
    )
    KEYS: ClassVar[Mapping[str, str]] = MappingProxyType({"network": "network_set"})

    @classmethod
    def from_toml(cls, path: str | Path, job: str | Path | None = None) -> Scenario:
        """The scenario in a file; `job` stands in the place of the one that it names, if it does.
        Of another one than that neither `job_overrides` nor `expect` says anything: both are left.

        Raises SettingsError with file and line, OSError when the file cannot be read.
        """
        path = Path(path)
        given = None if job is None else str(Path(job).resolve())
        defaults = {"name": path.stem} | ({"job": given} if given else {})
        scenario = read_toml(cls, path, defaults)
        folder = path.resolve().parent
        scenario = replace(scenario, folder=folder, path=path)
        if given is None or scenario.job_path.resolve() == Path(given):
            return replace(scenario, job=given or scenario.job)
        nothing: dict[str, Any] = {"job_overrides": {}, "expect": Expectations()}
        left = tuple(name for name, none in nothing.items() if getattr(scenario, name) != none)
        return replace(scenario, job=given, left=left, **nothing)

    def wrong(self, key: str, problem: str) -> SettingsError:
        """An error about a key of the file, to be raised: with its line."""
        return located(SettingsError(key, problem), self.path)

    def check(self) -> None:
        expect(self, "version", self.version == 1, "1")
        self._check_places()
        object.__setattr__(self, "peers", tuple(named(self.peers)))
        self._check_times()
        self._check_faults()
        self._wide  # noqa: B018 (raises for links that are wrong)

    def _check_times(self) -> None:
        """Raise SettingsError for durations that cannot be."""
        positive(self, "limit", "time_scale")
        real = self.mode == "real"
        expect(
            self, "time_scale", real or self.time_scale == 1, f'1.0 where `mode` is "{self.mode}"'
        )
        for i, fault in enumerate(self.faults):
            if fault.at is not None and fault.at > self.limit:
                raise SettingsError(
                    f"faults[{i}].at", f"is {fault.at}, after `limit` ({self.limit}): never"
                )

    def _check_faults(self) -> None:
        """Raise SettingsError for a fault of nobody. Peers have names of their own already."""
        for i, fault in enumerate(self.faults):
            who = self.selected(fault.who, f"faults[{i}].who")
            others = self.selected(fault.with_, f"faults[{i}].with")
            if BROKER in who and fault.do not in BETWEEN:
                raise SettingsError(
                    f"faults[{i}].who", f'names the broker: "{fault.do}" is for peers'
                )
            if others and len({*who, *others}) == 1:
                raise SettingsError(
                    f"faults[{i}].with", f'is "{others[0]}", as `who` is: expected another'
                )

    def _check_places(self) -> None:
        """Raise SettingsError for an unknown place, and for no peer at all."""
        if not self.peers:
            raise SettingsError("peers", "is empty: expected at least one [[peers]]")
        known = dict.fromkeys(p.place for p in self.peers)
        for name in self.places:
            if name not in known and name != self.broker.place:
                raise SettingsError(
                    f"places.{name}",
                    f"describes a place where no peer is{meant(name, known)}",
                )
        allowed = {*known, *self.places}
        if self.network_set:
            allowed = {*self.topology().places, *self.places}
            for i, peer in enumerate(self.peers):
                if peer.place not in allowed:
                    raise SettingsError(
                        f"peers[{i}].place",
                        f'is "{peer.place}", which is no place of "{self.network_set}" and none of '
                        f"[places]{meant(peer.place, sorted(allowed))}",
                    )
        if self.broker.place and self.broker.place not in allowed:
            raise SettingsError(
                "broker.place",
                f'is "{self.broker.place}", where no peer is and which [places] does not name'
                f"{meant(self.broker.place, sorted(allowed))}",
            )

    def offers(self) -> tuple[PeerOffer, ...]:
        """What the peers offer to a planner, in their order; their ids are their names. Each is
        alone on its host, whose memory is as large as the device's."""
        return tuple(
            PeerOffer(
                peer=PeerId(peer.name),
                name=peer.name,
                place=peer.place,
                device_memory_bytes=int(peer.memory),
                host_memory_bytes=int(peer.memory),
                flops_per_s=peer.hardware.speeds.product,
                operator_set=peer.ops,
                speeds=peer.hardware.speeds,
            )
            for peer in self.peers
        )

    def network(self) -> Network:
        """The matrices over the peers, in their order; arrays are read-only."""
        return self._network

    def wide(self) -> Wide:
        """The matrices over the peers and, as the last end, the broker; with jitter and loss."""
        return self._wide

    def price(self, seconds: float) -> float | None:
        """The price of a run of so many seconds of the scenario, faults and churn apart; None when
        no peer has a price."""
        if not any(p.price_per_hour for p in self.peers):
            return None
        return sum(p.price(seconds) for p in self.peers)

    def adjusted(self, job: Job) -> Job:
        """The job with the values of `job_overrides` in the place of its own, table by table.

        Raises SettingsError for a key or a value that a job cannot have.
        """
        if not self.job_overrides:
            return job
        table = plain(job)
        try:
            for key, value in self.job_overrides.items():
                table[key] = _over(table.get(key), value, key)
            changed = Job.from_table(table)
        except SettingsError as error:
            raise located(error.inside("job_overrides"), self.path) from None
        return replace(changed, module=job.module, folder=job.folder)

    @property
    def left_out(self) -> str:
        """Sentence about tables that another job leaves out; empty: there are none."""
        if not self.left:
            return ""
        tables = " and ".join(self.left)
        return f"without {tables} of {self.name}: said of the job that it names, not of this one"

    @property
    def job_path(self) -> Path:
        return self.folder / self.job

    @property
    def broker_place(self) -> str:
        return self.broker.place or self.peers[0].place

    @functools.cached_property
    def _wide(self) -> Wide:
        broker = PeerTable(
            name=BROKER, place=self.broker_place, up=self.broker.up, down=self.broker.down
        )
        return wide((*self.peers, broker), *self.spelled_out)

    @functools.cached_property
    def _network(self) -> Network:
        whole = self._wide.network
        square = whole.latency_s[:-1, :-1], whole.bandwidth[:-1, :-1]
        return Network(whole.peers[:-1], *square, whole.up[:-1], whole.down[:-1])

    @functools.cached_property
    def spelled_out(self) -> tuple[Mapping[str, Place], tuple[LinkTable, ...]]:
        """Places and links, with those of the network set behind those of the file."""
        if not self.network_set:
            return self.places, self.links
        topology = self.topology()
        used = {self.broker_place, *(p.place for p in self.peers)}
        here = [k for k, name in enumerate(topology.places) if name in used]
        stated = {pair for link in self.links for pair in link.directions}

        def numbers(k: int, m: int) -> dict[str, Any]:
            return _units(topology.latency_s[k, m], topology.bandwidth[k, m])

        inside = {topology.places[k]: Place(**numbers(k, k)) for k in here}
        links = [
            LinkTable(from_=topology.places[k], to=topology.places[m], both=False, **numbers(k, m))
            for k in here
            for m in here
            if k != m and (topology.places[k], topology.places[m]) not in stated
        ]
        return {**inside, **self.places}, (*self.links, *links)

    def topology(self) -> topologies.Topology:
        """The network set. Raises SettingsError unless `network` names one."""
        kind, name, variant = [*self.network_set.split(":", 2), "", ""][:3]
        if kind != "set":
            raise SettingsError("network", f'is "{self.network_set}": expected "set:NAME"')
        try:
            return topologies.load(name, variant)
        except ValueError as error:
            raise SettingsError("network", f'is "{self.network_set}": {error}') from None

    def selected(self, selectors: Sequence[str], key: str = "who") -> tuple[str, ...]:
        """The names of the peers that selectors pick, and "broker" at the end if it is one of
        them. Raises SettingsError, with `key` and a number, for one that picks nobody."""
        return select(selectors, self.peers, key)


def _over(given: Any, value: Any, key: str) -> Any:
    """A key's value with an override; tables are merged."""
    if not isinstance(given, Mapping) or not isinstance(value, Mapping):
        return value
    lengths = ("steps", "tokens", "passes")
    if key == "train" and any(name in value for name in lengths):
        given = {k: v for k, v in given.items() if k not in lengths}  # another way to say it
    return {**given, **{k: _over(given.get(k), v, k) for k, v in value.items()}}


def _units(latency_s: float, bandwidth: float) -> dict[str, Any]:
    return {
        "latency": Duration(f"{float(latency_s)!r}s"),
        "bandwidth": Rate(f"{float(bandwidth)!r}B/s"),
    }
