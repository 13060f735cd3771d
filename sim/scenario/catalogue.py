"""The scenarios that come with Shoal: `shoal sim NAME` runs one, `shoal sim --list` shows them.

Each is a file of `sim/scenarios/`; what it is about stands in its first line, as a comment.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ...job.settings import SettingsError, meant
from .scenario import SCENARIOS

__all__ = ["DEFAULT", "CatalogueEntry", "catalogue", "find"]

DEFAULT = "two-regions"
"""What `shoal sim` without arguments runs."""


class CatalogueEntry(NamedTuple):
    """One scenario of the catalogue."""

    name: str
    about: str
    mode: str
    """The world in which it runs unless another is asked for."""
    path: Path


def catalogue() -> Iterator[CatalogueEntry]:
    """All of them, by name, the default first."""
    for path in sorted(SCENARIOS.glob("*.toml"), key=lambda p: (p.stem != DEFAULT, p.stem)):
        text = path.read_text(encoding="utf-8")
        about = text.partition("\n")[0].removeprefix("#").strip().rstrip(".")
        yield CatalogueEntry(path.stem, about, str(tomllib.loads(text).get("mode", "real")), path)


def find(wanted: str) -> Path:
    """The file of a scenario that is given by its name or as a path. Raises SettingsError for a
    name that nobody knows; a file that is not there is for whoever opens it."""
    names = {path.stem: path for path in SCENARIOS.glob("*.toml")}
    if wanted in names:
        return names[wanted]
    path = Path(wanted)
    if path.suffix or path.exists() or len(path.parts) > 1:
        return path
    raise SettingsError(
        "",
        f'"{wanted}" is no file, and no built-in scenario{meant(wanted, sorted(names))} '
        "(`shoal sim --list` shows all)",
    )
