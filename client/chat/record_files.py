"""Records of files, one at a time: lines of JSON, rows of CSV; checked, and as messages.

A chat is {"messages": [{"role", "content"}, …]}. An instruction is {"instruction", "output"}, with
or without "input", or {"prompt", "completion"}.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ...peer.data.manifest import DataError
from ...peer.data.sources import matching

__all__ = ["Message", "Messages", "RecordFiles"]

Message = dict[str, str]
Messages = list[Message]
_PAIRS = (("instruction", "output"), ("prompt", "completion"))


class RecordFiles:
    """The records of a path or glob, in the order of the names of the files. Each walk reads them
    anew, so that no more than one is in memory.

    bad: gets the message of a record that is left out. Raises DataError for it where that is None,
    and for files that cannot be read."""

    def __init__(self, source: str, kind: str, bad: Callable[[str], None] | None) -> None:
        self.kind, self.bad = kind, bad
        self.paths = list({p.resolve(): p for p in matching(source) if p.is_file()}.values())
        if not self.paths:
            raise DataError(f"no file matches {source}: expected a path or glob of .jsonl or .csv")
        for path in self.paths:
            if path.suffix not in (".jsonl", ".csv"):
                raise DataError(f"{path}: expected records, in files that end in .jsonl or .csv")
            if path.suffix == ".csv" and kind == "chat":
                raise DataError(
                    f"{path}: a row of CSV has no list of messages: expected .jsonl for chats, "
                    'or kind = "instructions"'
                )

    def __iter__(self) -> Iterator[tuple[str, Messages]]:
        """Each record that can be used, with its place, "FILE:LINE"."""
        for path in self.paths:
            for line, record in _rows(path):
                place = f"{path}:{line}"
                try:
                    if isinstance(record, ValueError):
                        raise record
                    messages = _chat(record) if self.kind == "chat" else _instruction(record)
                except ValueError as error:
                    self.refuse(place, str(error))
                    continue
                yield place, messages

    def refuse(self, place: str, why: str) -> None:
        """Leave a record out, or raise DataError."""
        if self.bad is None:
            raise DataError(
                f'{place}: {why}; put it right, or leave such records out: bad_records = "skip"'
            )
        self.bad(f"{place}: {why}")


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Line and record of each row; a ValueError in place of one that does not parse."""
    try:
        if path.suffix == ".csv":
            with path.open(encoding="utf-8-sig", newline="") as file:
                reader = csv.DictReader(file)
                yield from ((reader.line_num, row) for row in reader)
            return
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    yield number, json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
                except (ValueError, RecursionError) as error:
                    what = getattr(error, "msg", type(error).__name__)
                    yield number, ValueError(f"the line is no JSON ({what})")
    except (OSError, csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _chat(record: Any) -> Messages:
    messages = record.get("messages") if isinstance(record, Mapping) else None
    if not isinstance(messages, list) or not messages:
        there = sorted(map(str, record)) if isinstance(record, Mapping) else type(record).__name__
        raise ValueError(
            f'expected a chat, {{"messages": [{{"role", "content"}}, …]}}, got {there}'
        )
    for number, message in enumerate(messages):
        for key in ("role", "content"):
            if not isinstance(message, Mapping) or not isinstance(message.get(key), str):
                raise ValueError(f'message {number} of the chat has no "{key}" that is text')
    return [dict(message) for message in messages]


def _instruction(record: Any) -> Messages:
    if isinstance(record, Mapping):
        for asked, answered in _PAIRS:
            pair = record.get(asked), record.get(answered)
            if isinstance(pair[0], str) and isinstance(pair[1], str):
                more = record.get("input") if asked == "instruction" else None
                user = f"{pair[0]}\n\n{more}" if isinstance(more, str) and more else pair[0]
                return [_said("user", user), _said("assistant", pair[1])]
    there = sorted(map(str, record)) if isinstance(record, Mapping) else type(record).__name__
    wanted = " or ".join(f'{{"{a}", "{b}"}}' for a, b in _PAIRS)
    raise ValueError(f"expected an instruction, {wanted}, as text; got {there}")


def _said(role: str, content: str) -> Message:
    return {"role": role, "content": content}
