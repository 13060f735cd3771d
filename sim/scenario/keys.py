"""What the tables of scenario.toml share: keys that cannot be names of fields, and checks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any, ClassVar, Self

from ...job.settings import Settings, SettingsError

__all__ = ["Renamed", "not_default", "positive", "share"]


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
                head, bracket, rest = wrong.partition("[")
                wrong = f"{key}{bracket}{rest}" if head == name else wrong
                problem = problem.replace(name, key)
            raise SettingsError(wrong, problem) from None


def positive(settings: Settings, *names: str) -> None:
    """Raises SettingsError unless these fields are more than 0, and finite."""
    for name in names:
        if not 0 < (value := getattr(settings, name)) < float("inf"):
            raise SettingsError(name, f"is {value}: expected more than 0, and finite")


def share(settings: Settings, name: str, *, whole: bool) -> None:
    """Raises SettingsError unless a field is None or from 0 to 1; 1 itself only if `whole`."""
    value = getattr(settings, name)
    if value is not None and not (0 <= value < 1 or (whole and value == 1)):
        most = "at most 1" if whole else "less than 1"
        raise SettingsError(name, f"is {value}: expected a share, from 0 to {most}")


def not_default(settings: Settings, names: tuple[str, ...] = ()) -> Iterator[str]:
    """The keys, of those named or of all, whose values are not the defaults."""
    for f in fields(settings):  # type: ignore[arg-type]
        default = f.default_factory() if callable(f.default_factory) else f.default
        if (not names or f.name in names) and getattr(settings, f.name) != default:
            yield f.name
