"""Settings of `shoal join` and of the worker processes that it starts. Plain data, no torch."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from ...net.address import address_of
from ...net.identity.token import Token
from ...net.local import is_loopback, split
from ...net.printable import printable
from ..hours import Hours

__all__ = [
    "DEFAULT_STATE",
    "WAITS",
    "JoinConfig",
    "JoinError",
    "PeerConfig",
    "SharedConfig",
    "host_name",
    "with_suffix",
]

DEFAULT_STATE = Path("~/.local/share/shoal/peers")
"""One folder per name in it, and in that one per device."""
WAITS = "waits"
"""Key of what a worker says to its supervisor: what it waits for while it drains."""


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", re.ASCII)
_LONGEST_NAME = 64
_DEVICE = re.compile(r"cpu|mps|(cuda|xpu)(:\d{1,4})?", re.ASCII)


def host_name() -> str:
    """The name of a host's peers where none was given: what can stand in one of the host's own."""
    found = re.sub(r"[^A-Za-z0-9_.-]+", "-", socket.gethostname(), flags=re.ASCII)
    return found.strip("-_.")[:_LONGEST_NAME].rstrip("-_.") or "peer"


def with_suffix(name: str, suffix: str) -> str:
    """A name that ends so, no longer than names may be."""
    return name[: _LONGEST_NAME - len(suffix)] + suffix


class JoinError(ValueError):
    """Settings with which nobody can join; the message says what is missing."""


def no_token(folder: Path) -> JoinError:
    """The error of a peer that has nothing to join with."""
    return JoinError(
        f"{folder} has no certificate, and no token was given: join with the whole line that the "
        "broker printed, --token included"
    )


@dataclass(frozen=True, kw_only=True)
class SharedConfig:
    """What a host and the peer of each of its devices are told alike."""

    broker: str = ""
    """HOST:PORT. Empty: found by the name of the swarm."""
    swarm: str = ""
    """Name under which the broker is found, wherever it is, and when it has moved. Empty: by its
    address only."""
    directory: str = ""
    """Socket of this host's node of that swarm's directory. Empty: there is none."""
    name: str = ""
    """For people, and the readable part of a new id. Empty: the host's name."""
    place: str = ""
    owner: str = ""
    memory_bytes: int | None = None
    """What runs may use of a device. None: a share of what is free, see profile.py."""
    up_bytes_per_s: float | None = None
    """The owner's cap of what a peer sends to others. None: none."""
    down_bytes_per_s: float | None = None
    """The same for what it receives."""
    hours: str = ""
    """When it takes part in runs, by the host's clock; see peer/hours.py. Empty: always."""
    monthly_bytes: int | None = None
    """What all peers of the host may send and receive in a calendar month. None: no limit."""
    stay_s: float | None = None
    """How long it means to stay, for plans. None: not said."""
    data: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Data sets that stay with it, by name: the tables of peer.toml, see rights.py."""
    web: tuple[str, ...] = ()
    """Where on the web it reads weights for runs, see rights.py. Empty: nowhere."""
    operator_set: Literal["full", "core"] = "full"
    """Operators that it offers to run."""
    threads: int | None = None
    """CPU threads of one operator. None: torch's choice."""
    insecure: bool = False
    """Without identity and encryption; the broker is on this machine then."""
    token: str = field(default="", repr=False)
    """To join with where there is no certificate yet: that of the line that the broker printed."""
    port: int = 0
    """Where a peer's Frames service listens, of the first device; the others have the numbers after
    it. 0: any free one."""
    address: str = ""
    """HOST:PORT at which others reach the peer of the first device, the others have the ports after
    it. Empty: where it listens; "none": they cannot."""
    via: Mapping[str, str] = field(default_factory=dict)
    """Address -> address to dial instead; see addresses.py."""
    stretch: float = 1.0
    """How many times its own CPU time an action takes; see peer/compute/stretch.py."""
    host_state: Path | None = None
    """Folder of what holds for all peers of this host (host.py). None, of a peer: it is never
    paused, and no traffic is counted; of a host: its `state`, or DEFAULT_STATE where that is None
    too."""
    give_up_s: float | None = None
    """End with code 3 after so long without the broker. None: keep trying."""
    first_s: float | None = None
    """The same before it has reached the broker for the first time. None: as give_up_s."""
    drain_s: float = 30.0
    """How long the first stop waits for the broker's word, or for the end of a step."""
    log: str = "info"
    """Lowest level that is logged."""


@dataclass(frozen=True, kw_only=True)
class PeerConfig(SharedConfig):
    """One worker process: one device."""

    state: Path
    """Folder of this peer's identity; one process at a time owns it."""
    device: str = "cpu"
    """ "cpu" or "cuda:N"."""
    host: str = ""
    """Where its Frames service listens. Empty: the address by which it reaches the broker."""
    trace: str = ""
    """File that gets what it did and when (peer/shell/spans.py). Empty: none."""
    parent: int | None = None
    """Process that it ends with. None: none."""

    def to_json(self) -> str:
        """On one line."""
        shared = None if self.host_state is None else str(self.host_state)
        return json.dumps(asdict(self) | {"state": str(self.state), "host_state": shared})

    @classmethod
    def from_json(cls, text: str) -> PeerConfig:
        """Raises ValueError for anything that `to_json` did not write."""
        table = json.loads(text)
        known = {f.name for f in fields(cls)}
        if not isinstance(table, dict) or set(table) != known:
            raise ValueError(f"expected a JSON object with {', '.join(sorted(known))}")
        shared = table["host_state"]
        paths = {"state": Path(table["state"]), "host_state": shared and Path(shared)}
        return cls(**table | paths | {"web": tuple(table["web"])})


_CAPS = ("up_bytes_per_s", "down_bytes_per_s", "monthly_bytes", "stay_s")


@dataclass(frozen=True, kw_only=True)
class JoinConfig(SharedConfig):
    """`shoal join`: one peer per device of this host. Raises ValueError for wrong values."""

    bootstrap: tuple[str, ...] = ()
    """Multiaddrs of nodes of the swarm; those that were known before are tried as well."""
    swarm_port: int = 0
    """Where this host's node listens; 0: where it did before, or any free one."""
    devices: Literal["all"] | tuple[str, ...] = "all"
    """ "all": every GPU, or the CPU where there is none."""
    state: Path | None = None
    """Folder with one folder per device in it. None: DEFAULT_STATE / name, or name-2, name-3, …
    while others of this host run there."""
    first_s: float | None = 30.0
    """Of the first start of a worker. A wrong address is told soon, and a peer that was a member
    waits for its broker however long that is away."""
    trace: Path | None = None
    """See PeerConfig; with several devices, each writes to a file beside it."""

    def __post_init__(self) -> None:
        if self.broker:
            object.__setattr__(self, "broker", address_of(self.broker))
        if self.address not in ("", "none"):
            object.__setattr__(self, "address", address_of(self.address, self.port or None))
        self._check_whereabouts()
        # Folders have these names, and are made before anybody else is asked.
        if self.name and not _NAME.fullmatch(self.name):
            raise ValueError(
                f'the name "{printable(self.name, 80)}" cannot be: expected 1 to {_LONGEST_NAME} '
                'letters, digits, "_", "." and "-", a letter or digit first (--name, or `name` in '
                "peer.toml)"
            )
        for device in () if self.devices == "all" else self.devices:
            if not _DEVICE.fullmatch(device):
                raise ValueError(
                    f'the device "{printable(device, 80)}" cannot be: expected "cpu" or such as '
                    '"cuda:0"'
                )
        if self.insecure and not is_loopback(split(self.broker)[0]):
            raise ValueError(
                f"--insecure with {self.broker}: expected a broker on this machine, as anybody on "
                "the way could read and change everything"
            )
        if self.insecure and self.token:
            raise ValueError("--insecure with a token: expected one of them")
        if self.token:
            Token.parse(self.token)
        if self.devices != "all" and not self.devices:
            raise ValueError('devices are empty: expected "all" or names such as "cpu", "cuda:0"')
        if self.hours:
            try:
                Hours.parse(self.hours)
            except ValueError as error:
                raise ValueError(f"hours {error}") from None
        for name in ("memory_bytes", "threads", "give_up_s", "first_s", *_CAPS):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} is {value}: expected a number above 0")
        if not 0 <= self.port < 65536:
            raise ValueError(f"port is {self.port}: expected 1 to 65535, or 0 for any free one")
        if not 0 <= self.swarm_port < 65536:
            raise ValueError(f"swarm_port is {self.swarm_port}: expected 0 to 65535")
        if not 1 <= self.stretch < float("inf"):
            raise ValueError(f"stretch is {self.stretch}: expected a number of at least 1")
        if self.stretch > 1 and self.threads != 1:
            raise ValueError(
                f"stretch is {self.stretch} with threads {self.threads}: expected threads 1, as "
                "it goes by the CPU time of one thread"
            )

    def _check_whereabouts(self) -> None:
        if not self.swarm:
            if not self.broker:
                raise ValueError(
                    "where is the broker? expected HOST:PORT or --swarm NAME, as in the line that "
                    "it printed"
                )
            if self.bootstrap:
                raise ValueError("--bootstrap is a way into a swarm: expected --swarm, too")
            return
        from ...net.discovery.record import check_multiaddr, check_swarm  # loads what signs records

        check_swarm(self.swarm)
        for way in self.bootstrap:
            check_multiaddr(way)
        if self.insecure:
            raise ValueError(
                "--insecure with --swarm: what is found there is believed by an identity; expected "
                "one of them"
            )
