"""Strict settings: dataclasses that check themselves, and TOML that is read into them.

A class that derives from `Settings` checks every field against its annotation when it is made, from
TOML, JSON or Python alike. `read_toml` adds the file and the line to whatever is wrong. Nothing is
guessed: an unknown key is an error that names a known one that is like it.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar, Union

from .encodings import decoded
from .units import ByteCount, Duration, Rate, UnitError
from .words import ELSEWHERE

__all__ = [
    "Settings",
    "SettingsError",
    "at_least",
    "at_most",
    "default_of",
    "expect",
    "json_object",
    "located",
    "meant",
    "plain",
    "read_toml",
]

_Unit = (Duration, ByteCount, Rate)
_MIN, _MAX = -(2**63), 2**63 - 1
S = TypeVar("S", bound="Settings")


class SettingsError(ValueError):
    """Wrong input in a setting. `key`: its dotted path ("" for the whole); `where`: "FILE:LINE"."""

    def __init__(self, key: str, problem: str, where: str = "") -> None:
        what = f"`{key}` {problem}" if key else problem
        super().__init__(f"{where}: {what}" if where else what)
        self.key = key
        self.problem = problem

    def inside(self, table: str) -> SettingsError:
        """Return the problem, seen from the table that contains it."""
        return SettingsError(".".join(k for k in (table, self.key) if k), self.problem)

    def at(self, where: str) -> SettingsError:
        return SettingsError(self.key, self.problem, where)


class Settings:
    """Base of the settings dataclasses (frozen, keyword-only): checks and converts each field."""

    OURS: ClassVar[frozenset[str]] = frozenset()
    """Fields that are not settings: no table may contain them."""
    OF_JOB: ClassVar[bool] = False
    """Whether people may write what other programs call keys of a job (`ELSEWHERE`)."""
    OF_ANOTHER: ClassVar[Mapping[str, str]] = types.MappingProxyType({})
    """Keys that files of another kind have: which kind, and what takes it."""

    def __post_init__(self) -> None:
        for name, hint in _hints(type(self)).items():
            if hint is Any and name in self.OURS:
                continue  # a live object
            object.__setattr__(self, name, _convert(hint, getattr(self, name), name))
        self.check()

    def check(self) -> None:
        """Checks across fields; raises SettingsError. Fields have their types already."""

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> Self:
        """Made from a table of plain values. Raises SettingsError for unknown and missing keys."""
        fields = {f.name: f for f in dataclasses.fields(cls) if f.name not in cls.OURS}  # type: ignore[arg-type]
        for key in table:
            if key not in fields:
                raise SettingsError(key, f"is not a known key{_nearest(key, cls)}")
        for name, field in fields.items():
            no_default = (
                field.default is dataclasses.MISSING
                and field.default_factory is dataclasses.MISSING
            )
            if no_default and name not in table:
                raise SettingsError(name, f"is missing: expected {_describe(_hints(cls)[name])}")
        return cls(**table)


def default_of(cls: Any, key: str) -> Any:
    """What a key is where nobody says it."""
    field = cls.__dataclass_fields__[key]
    return field.default_factory() if field.default is dataclasses.MISSING else field.default


_KNOWN_HINTS: dict[Any, dict[str, Any]] = {}  # evaluated once: a scenario makes thousands


def _hints(cls: Any) -> dict[str, Any]:
    if cls not in _KNOWN_HINTS:
        names = {f.name for f in dataclasses.fields(cls)}
        _KNOWN_HINTS[cls] = {k: v for k, v in typing.get_type_hints(cls).items() if k in names}
    return _KNOWN_HINTS[cls]


def _nearest(key: str, cls: type[Settings]) -> str:
    """How the message of an unknown key goes on: which one was probably meant, of this table or
    just this one of a nested one."""
    if key in cls.OF_ANOTHER:
        return f": {cls.OF_ANOTHER[key]}"
    hints = {k: v for k, v in _hints(cls).items() if k not in cls.OURS}
    for name, hint in hints.items():
        if isinstance(hint, type) and issubclass(hint, Settings) and key in _hints(hint):
            return f'; did you mean "{key}" in [{name}]?'
    table, _, called = ELSEWHERE.get(key, "").rpartition(".") if cls.OF_JOB else ("", "", "")
    if called and called not in hints:
        return f"; what other programs call so is {called} in [{table}] here (docs/job.md)"
    return f"{meant(called or key, hints)} (known: {', '.join(hints)})"


def meant(key: str, known: Iterable[str]) -> str:
    """How a message of an unknown name goes on: which known one is like it; empty where none is."""
    found = difflib.get_close_matches(key, list(known), n=1, cutoff=0.5)
    return f'; did you mean "{found[0]}"?' if found else ""


def _describe(hint: Any) -> str:
    origin = typing.get_origin(hint)
    if origin is Literal:
        return " | ".join(
            f'"{v}"' if isinstance(v, str) else repr(v) for v in typing.get_args(hint)
        )
    if origin in (Union, types.UnionType):
        parts = [h for h in typing.get_args(hint) if h is not types.NoneType]
        return " or ".join(_describe(h) for h in parts)
    if origin is tuple:
        of, *more = typing.get_args(hint)
        return f"a list of {'any number' if more == [...] else 1 + len(more)}: {_describe(of)}"
    if origin is Mapping:
        return "a table"
    names = {
        int: "an integer",
        float: "a number",
        str: "a string",
        bool: "true or false",
        Duration: 'a time such as "30ms"',
        ByteCount: 'a size such as "8GiB"',
        Rate: 'a speed such as "20Mbit"',
    }
    return names.get(hint, "a table")


def _show(value: Any) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, bool):
        return "true" if value else "false"
    try:
        return repr(value)
    except ValueError:  # Python shows no number of more than 4,300 digits
        return "something with a number of thousands of digits"


def _convert(hint: Any, value: Any, key: str) -> Any:
    """`value` as the type of `hint`; raises SettingsError with `key`."""
    if isinstance(value, int) and not isinstance(value, _Unit) and not _MIN <= value <= _MAX:
        raise SettingsError(key, "is out of range: expected a number of 64 bits")
    origin = typing.get_origin(hint)
    wrong = SettingsError(key, f"is {_show(value)}: expected {_describe(hint)}")
    if hint is Any:
        return _convert_any(value, key)
    if hint is types.NoneType or origin is Literal:
        allowed = (None,) if hint is types.NoneType else typing.get_args(hint)
        # 1 == True in Python, so the type counts too.
        if not any(type(value) is type(a) and value == a for a in allowed):
            raise wrong
        return value
    if origin in (Union, types.UnionType):
        return _convert_union(hint, value, key, wrong)
    if origin is tuple:
        of, *more = typing.get_args(hint)
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise wrong
        if more != [...] and len(value) != 1 + len(more):
            raise wrong
        return tuple(_convert(of, v, f"{key}[{i}]") for i, v in enumerate(value))
    if origin is Mapping:
        of = typing.get_args(hint)[1]
        if not isinstance(value, Mapping):
            raise wrong
        return {str(k): _convert(of, v, f"{key}.{k}") for k, v in value.items()}
    if isinstance(hint, type) and issubclass(hint, Settings):
        if isinstance(value, hint):
            return value
        if not isinstance(value, Mapping):
            raise wrong
        try:
            return hint.from_table(value)
        except SettingsError as error:
            raise error.inside(key) from None
    if hint in _Unit:
        try:
            return hint(value)
        except UnitError as error:
            raise SettingsError(key, f"is not readable: {error}") from None
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        if math.isinf(value):  # NaN is refused by the checks of a range
            raise SettingsError(key, f"is {value}: expected a finite number")
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise wrong
    return value


def _convert_any(value: Any, key: str) -> Any:
    """A value that no annotation says more of, as TOML and JSON both have it; raises SettingsError
    with the key of what is not (TOML has dates, Python everything)."""
    if isinstance(value, Mapping):
        return {str(k): _convert(Any, v, f"{key}.{k}") for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_convert(Any, v, f"{key}[{i}]") for i, v in enumerate(value)]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise SettingsError(
        key,
        f"is a {type(value).__name__} ({value}): expected text (in quotes), a number, true or "
        "false, a list or a table",
    )


def _convert_union(hint: Any, value: Any, key: str, wrong: SettingsError) -> Any:
    units = [h for h in typing.get_args(hint) if h in _Unit]
    for part in typing.get_args(hint):
        try:
            return _convert(part, value, key)
        except SettingsError as error:
            # What is nearly right, a table, a quantity, a number, knows better what is wrong.
            near = isinstance(value, Mapping) and part is not types.NoneType
            if near or part in units or part is type(value):
                wrong = error
    raise wrong


def plain(value: Any) -> Any:
    """Settings as plain values that JSON can hold and `from_table` reads back."""
    if isinstance(value, Settings):
        names = [f.name for f in dataclasses.fields(value)]  # type: ignore[arg-type]
        return {n: plain(getattr(value, n)) for n in names if n not in value.OURS}
    if isinstance(value, _Unit):
        return str(value)
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [plain(v) for v in value]
    return value


def read_toml(cls: type[S], path: Path, defaults: Mapping[str, Any] | None = None) -> S:
    """The settings in a TOML file; `defaults` fill top-level keys that it leaves out.

    Raises SettingsError with file and line for whatever is wrong in it, OSError when it cannot be
    read.
    """
    data = path.read_bytes()
    try:
        text = decoded(data)
    except ValueError as error:
        raise SettingsError("", str(error), str(path)) from None
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        match = re.search(r"^(.*) \(at line (\d+)", str(error))
        what, line = match.groups() if match else (str(error), "1")
        what += _unquoted(text.splitlines()[int(line) - 1 : int(line)])
        raise SettingsError("", f"not valid TOML: {what}", f"{path}:{line}") from None
    except RecursionError:
        raise SettingsError("", "is nested too deeply", str(path)) from None
    except ValueError as error:  # a number of thousands of digits
        raise SettingsError("", f"is not readable: {error}", str(path)) from None
    try:
        return cls.from_table({**(defaults or {}), **table})
    except SettingsError as error:
        raise error.at(_where(path, text, error.key)) from None


def _unquoted(lines: Sequence[str]) -> str:
    """How the message of what is no TOML goes on, where its line has a text without quotes."""
    found = (
        re.match(r"\s*([\w.-]+)\s*=\s*([A-Za-z./~][^\"'#{}\[\]]*)$", lines[0]) if lines else None
    )
    return f'; a text stands in quotes: {found[1]} = "{found[2].strip()}"' if found else ""


def located(error: SettingsError, path: Path) -> SettingsError:
    """Return the problem with the line of its key in a file, which may have become unreadable."""
    try:
        return error.at(_where(path, decoded(path.read_bytes()), error.key))
    except (OSError, ValueError):
        return error.at(str(path))


def _where(path: Path, text: str, key: str) -> str:
    """FILE:LINE of a dotted key, or of the nearest table around it that the file names."""
    lines: dict[tuple[str, ...], int] = {}
    for names, line in _lines(text):
        lines.setdefault(names, line)
        lines.setdefault((*names[:-1], _bare(names[-1])), line)
    parts = tuple(key.split("."))
    while parts:
        for names in (parts, (*parts[:-1], _bare(parts[-1]))):
            if names in lines:
                return f"{path}:{lines[names]}"
        parts = parts[:-1]
    return str(path)


def _bare(name: str) -> str:
    """Without the index of a list's element."""
    return re.sub(r"(\[\d+\])+$", "", name)


_KEY = r"""(?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')"""
_DOTTED = rf"{_KEY}(?:\s*\.\s*{_KEY})*"
_STATEMENT = re.compile(rf"\s*(?:\[\[?\s*(?P<table>{_DOTTED})\s*\]\]?|(?P<key>{_DOTTED})\s*=)")
_TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?"""' + r"|'''.*?'''"  # strings over several lines
    r'|"(?:\\.|[^"\\\n])*"' + r"|'[^'\n]*'" + r"|\#[^\n]*|[\[\]{}\n]|.",
    re.DOTALL,
)


def _lines(text: str) -> Iterator[tuple[tuple[str, ...], int]]:
    """(path of a table or key, line) for each statement of a valid TOML text, in order. A table of
    an array of tables has its number in the path: ("peers[3]", "device")."""
    at, line = 0, 1
    table: tuple[str, ...] = ()
    last: dict[tuple[str, ...], int] = {}  # array of tables -> number of the last one
    while at < len(text):
        if statement := _STATEMENT.match(text, at):
            line += text.count("\n", at, statement.start(statement.lastgroup or 0))
            names = re.findall(_KEY, statement["table"] or statement["key"])
            path = tuple(n.strip("\"'") for n in names)
            if statement["table"]:
                double = statement[0].lstrip().startswith("[[")
                table = path = _numbered(path, last, double)
            else:
                path = table + path
            yield path, line
            at = statement.end()
        depth = 0
        for token in _TOKEN.finditer(text, at):  # to the end of the statement
            at = token.end()
            line += token[0].count("\n")
            depth += (token[0] in "[{") - (token[0] in "]}")
            if token[0] == "\n" and depth <= 0:
                break
        else:
            return


def _numbered(
    names: tuple[str, ...], last: dict[tuple[str, ...], int], another: bool
) -> tuple[str, ...]:
    """The path of a table's header, with the numbers of the arrays of tables in it; `another`: the
    header adds a table to its array."""
    path: tuple[str, ...] = ()
    for i, name in enumerate(names):
        array = (*path, name)
        if another and i == len(names) - 1:
            last[array] = last.get(array, -1) + 1
        path = (*path, f"{name}[{last[array]}]") if array in last else array
    return path


def json_object(text: str) -> dict[str, Any]:
    """The object in a JSON text; raises SettingsError for anything else."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise SettingsError("", f"not valid JSON: {error}") from None
    except (ValueError, RecursionError) as error:  # thousands of digits, or of brackets
        raise SettingsError("", f"is no readable JSON: {error}") from None
    if not isinstance(value, dict):
        raise SettingsError("", f"is a JSON {type(value).__name__}: expected an object")
    return value


def expect(settings: Settings, key: str, holds: bool, what: str) -> None:
    """Raises SettingsError, with what was expected, unless something holds of a key. It is said so
    that NaN, of which nothing holds, is refused too."""
    if not holds:
        raise SettingsError(key, f"is {getattr(settings, key)}: expected {what}")


def at_least(settings: Settings, least: int, *keys: str) -> None:
    """Raises SettingsError for a smaller one of these."""
    for key in keys:
        expect(settings, key, getattr(settings, key) >= least, f"{least} or more")


def at_most(settings: Settings, most: int, *keys: str) -> None:
    """Raises SettingsError for a larger one of these."""
    for key in keys:
        expect(settings, key, getattr(settings, key) <= most, f"at most {most}")
