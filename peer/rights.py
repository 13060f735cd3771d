"""peer.toml: what the owner of a host allows, for every peer that joins from it.

    ~/.config/shoal/peer.toml

A flag of `shoal join` comes before the file. A key whose capability is not built yet is refused,
never ignored: who wrote `monthly` counts on it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..job.settings import Settings, SettingsError, read_toml
from ..job.units import ByteCount, Rate

__all__ = ["Rights", "peer_toml", "read_rights"]

_NOT_BUILT = ("monthly", "hours", "stay", "share", "data")


def peer_toml() -> Path:
    """Where the file is, whether or not there is one."""
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "shoal" / "peer.toml"


@dataclass(frozen=True, kw_only=True)
class Rights(Settings):
    """The file; every key may be left out."""

    name: str = ""
    """Of this host's peers. Empty: the host's name."""
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
    monthly: Any = None
    hours: Any = None
    stay: Any = None
    share: Any = None
    data: Any = None

    def check(self) -> None:
        for key in _NOT_BUILT:
            if getattr(self, key) is not None:
                raise SettingsError(key, "is not supported yet: leave it out")
        for key in ("memory", "up", "down"):
            value = getattr(self, key)
            if value is not None and not value > 0:
                raise SettingsError(key, f"is {value}: expected more than nothing")
        if not self.devices:
            raise SettingsError("devices", 'is empty: expected "all" or names such as "cuda:0"')

    @property
    def device_names(self) -> tuple[str, ...] | None:
        """None: all that are found."""
        if self.devices == "all":
            return None
        return (self.devices,) if isinstance(self.devices, str) else self.devices


def read_rights(path: Path | None = None) -> Rights:
    """What the file says; everything left out when there is none, which is an error only for one
    that was named. Raises SettingsError with file and line, OSError."""
    found = path or peer_toml()
    if path is None and not _is_there(found):
        return Rights()
    return read_toml(Rights, found)


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except PermissionError:  # a service whose user's home is closed to it
        return False


assert set(_NOT_BUILT) <= {f.name for f in fields(Rights)}
