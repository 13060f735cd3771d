"""Quantities with units, as people write them: "30ms", "8GiB", "20Mbit".

Inside there are only seconds, bytes and bytes per second; bits exist nowhere but in this reader. A
bare number is refused, because nobody can tell what it means.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Self

__all__ = ["ByteCount", "Duration", "Rate", "UnitError"]

_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z/]*)\s*")


class UnitError(ValueError):
    """A quantity without its unit, or with an unknown one; the message shows a good one."""


def _parse(text: object, units: Mapping[str, float], what: str, example: str) -> float:
    """Value of `text` in the base unit. Raises UnitError."""
    if not isinstance(text, str):
        raise UnitError(f'{text!r} has no unit: expected {what} such as "{example}"')
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise UnitError(f'"{text}" is not {what}: expected a number and a unit, e.g. "{example}"')
    number, unit = match.groups()
    if unit not in units:
        problem = f'has the unknown unit "{unit}"' if unit else "has no unit"
        raise UnitError(f'"{text}" {problem}: expected one of {", ".join(units)}, e.g. "{example}"')
    value = float(number) * units[unit]
    if math.isinf(value):
        raise UnitError(f'"{text}" is too large: expected {what} such as "{example}"')
    return value


class Duration(float):
    """A time in seconds. `Duration("30ms")` reads a string; a Duration is taken as it is."""

    UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}  # noqa: RUF012 (constant)

    def __new__(cls, text: str | Duration) -> Self:
        if isinstance(text, Duration):
            return super().__new__(cls, float(text))
        return super().__new__(cls, _parse(text, cls.UNITS, "a time", "30ms"))

    def __str__(self) -> str:
        return f"{float(self)!r}s"

    def __reduce__(self) -> tuple[type[Self], tuple[str]]:
        return type(self), (str(self),)  # copies are made from text: a bare number is refused


class ByteCount(int):
    """An amount of memory in bytes: `ByteCount("8GiB")`, `ByteCount("2MB")`."""

    UNITS = {  # noqa: RUF012 (constant)
        "B": 1.0,
        "kB": 1e3,
        "MB": 1e6,
        "GB": 1e9,
        "TB": 1e12,
        "KiB": 2.0**10,
        "MiB": 2.0**20,
        "GiB": 2.0**30,
        "TiB": 2.0**40,
    }

    def __new__(cls, text: str | ByteCount) -> Self:
        if isinstance(text, ByteCount):
            return super().__new__(cls, int(text))
        return super().__new__(cls, round(_parse(text, cls.UNITS, "a size", "8GiB")))

    def __str__(self) -> str:
        return f"{int(self)}B"

    def __reduce__(self) -> tuple[type[Self], tuple[str]]:
        return type(self), (str(self),)  # see Duration


class Rate(float):
    """A speed in bytes per second: `Rate("20Mbit")` is 2.5e6, `Rate("2MB/s")` is 2e6."""

    UNITS = {  # noqa: RUF012 (constant)
        "kbit": 1e3 / 8,
        "Mbit": 1e6 / 8,
        "Gbit": 1e9 / 8,
        "B/s": 1.0,
        "kB/s": 1e3,
        "MB/s": 1e6,
        "GB/s": 1e9,
    }

    def __new__(cls, text: str | Rate) -> Self:
        if isinstance(text, Rate):
            return super().__new__(cls, float(text))
        return super().__new__(cls, _parse(text, cls.UNITS, "a speed", "20Mbit"))

    def __str__(self) -> str:
        return f"{float(self)!r}B/s"

    def __reduce__(self) -> tuple[type[Self], tuple[str]]:
        return type(self), (str(self),)  # see Duration
