"""peer.toml: what the owner of a host allows, for every peer that joins from it.

    ~/.config/shoal/peer.toml

A flag of `shoal join` comes before the file. What a peer cannot keep to is refused, never ignored:
who wrote it counts on it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ...job.settings import Settings, SettingsError, located, read_toml
from ...job.units import ByteCount, Duration, Rate
from ...net.surroundings import SurroundingsError, config_home, user_path
from ...net.web.places import check_place
from ..hours import Hours

__all__ = ["OwnData", "Rights", "peer_toml", "read_rights"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


def peer_toml() -> Path:
    """Where the file is, whether or not there is one."""
    return config_home() / "shoal" / "peer.toml"


@dataclass(frozen=True, kw_only=True)
class OwnData(Settings):
    """data.NAME: a data set that stays with this host's peers."""

    path: str
    """A file or a glob, as `data.source` of a job; relative to peer.toml."""
    users: tuple[str, ...] | None = None
    """Who may train on it, as their certificates name them. None: every submitter."""
    leaves: tuple[str, ...] = ()
    """Arrays that runs may copy to the broker, where others can read them, by their names in the
    file ("tokens": all of a text or of token ids). The rest never leaves: by names of the owner's,
    as what a job takes for inputs and labels is the submitter's choice."""
    blends_leave: bool = False
    """Whether activations may leave in which a residual connection has added data to products of
    it. A transformer over ids needs that where it is larger than this host (docs/security.md)."""

    def check(self) -> None:
        if not self.path:
            raise SettingsError("path", "is empty: expected a file or a glob")
        if self.users is not None and not self.users:
            raise SettingsError(
                "users", "is empty: nobody could use it; leave it out for every submitter"
            )


@dataclass(frozen=True, kw_only=True)
class Rights(Settings):
    """The file; every key may be left out."""

    name: str = ""
    """The name of this host's peers. Empty: the host's name."""
    owner: str = ""
    """Whose they are, for people."""
    place: str = ""
    """Where they are, for plans."""
    devices: str | tuple[str, ...] = "all"
    """ "all", "cpu", or a list such as ["cuda:0"]."""
    memory: ByteCount | None = None
    """What runs may use of each device. None: a share of what is free."""
    up: Rate | None = None
    """Most that each peer sends. None: no cap."""
    down: Rate | None = None
    """Most that it receives."""
    monthly: ByteCount | None = None
    """Most that all peers of this host send and receive in a calendar month. None: no limit."""
    hours: str = ""
    """When they take part, by the host's clock: "22-08", "22:30-08:00". Empty: always."""
    stay: Duration | None = None
    """How long they mean to stay, for plans. None: not said."""
    web: tuple[str, ...] = ()
    """Where on the web its peers read pretrained weights for runs that name URLs: hosts
    ("huggingface.co", "*.hf.co") or origins ("http://10.0.0.5:8000"). Empty: nowhere."""
    data: Mapping[str, str | OwnData] = field(default_factory=dict)
    """Data sets by name: a path, or a table with `path`, `users` and `leaves`."""

    def check(self) -> None:
        for key in ("memory", "up", "down", "monthly", "stay"):
            value = getattr(self, key)
            if value is not None and not value > 0:
                raise SettingsError(key, f"is {value}: expected more than nothing")
        if self.hours:
            try:
                Hours.parse(self.hours)
            except ValueError as error:
                raise SettingsError("hours", str(error)) from None
        for place in self.web:
            try:
                check_place(place)
            except ValueError as error:
                raise SettingsError("web", str(error)) from None
        for name in self.data:
            if not _NAME.fullmatch(name):
                raise SettingsError(
                    f"data.{name}",
                    "is no name of a data set: expected at most 64 letters, digits, dots, dashes "
                    "and underscores",
                )
        if not self.devices:
            raise SettingsError("devices", 'is empty: expected "all" or names such as "cuda:0"')

    @property
    def device_names(self) -> tuple[str, ...] | None:
        """None: all that are found."""
        if self.devices == "all":
            return None
        return (self.devices,) if isinstance(self.devices, str) else self.devices

    def with_data_of(self, folder: Path) -> Rights:
        """Return the rights with `data` as tables and relative paths inside `folder`. Raises
        SettingsError for a path where nothing is."""
        found = {}
        for name, given in self.data.items():
            one = OwnData(path=given) if isinstance(given, str) else given
            path = (folder / user_path(one.path)).absolute()
            if not set("*?[") & set(str(path)) and not path.is_file():
                raise SettingsError(f"data.{name}", f"is {path}: there is no such file")
            found[name] = replace(one, path=str(path))
        return replace(self, data=found)


def read_rights(path: Path | None = None) -> Rights:
    """What the file says; everything left out when there is none, which is an error only for one
    that was named. Raises SettingsError with file and line, OSError."""
    if path is None:
        try:
            path = peer_toml()
            if not path.exists():
                return Rights()
        except (PermissionError, SurroundingsError):  # a service whose home is closed, or none
            return Rights()
    rights = read_toml(Rights, path)
    try:
        return rights.with_data_of(path.parent)
    except SettingsError as error:
        raise located(error, path) from None
