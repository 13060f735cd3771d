"""Records, one at a time: lines of JSON, rows of CSV and Parquet; checked, and as messages.

A chat is {"messages": [{"role", "content"}, …]} or {"conversations": [{"from", "value"}, …]}. An
instruction is {"instruction", "output"}, with or without "input", or {"prompt", "completion"}.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...job.encodings import each_key_once
from ...peer.data.array_files import each_once, matching
from ...peer.data.columns_of_files import csv_rows, parquet_rows
from ...peer.data.manifest import DataError

__all__ = ["ChatRecords", "LiveRecords", "Message", "Messages", "RecordFiles"]

Message = dict[str, str]
Messages = list[Message]
_PAIRS = (("instruction", "output"), ("prompt", "completion"))
_ROLES = {"human": "user", "gpt": "assistant"}
"""Roles of "conversations" that have another name in "messages"."""
_INSTEAD = {
    "system": 'give messages, the first of them with the role "system"',
    "history": "give messages, with earlier turns in front",
    "tools": "write what the model is told of tools into a message",
    "functions": "write what the model is told of functions into a message",
    "input": "write it into the prompt",
    "weight": "all records count alike",
    "chat_template_kwargs": "give a template that does so of itself (data.template)",
    **dict.fromkeys(("images", "videos", "audios"), "only text is learned here"),
}
"""What to write in place of keys beside the messages."""
_OF_CHAT = ("system", "tools", "functions", "chat_template_kwargs", "images", "videos", "audios")
_ASSISTANTS = ("assistant", "gpt", "chatgpt", "bing", "bard", "model", "bot", "ai")
"""Roles, in small letters, of whom other trainers learn."""
_SUFFIXES = (".jsonl", ".csv", ".parquet")
_ENDINGS = ".jsonl, .csv or .parquet"


class ChatRecords:
    """Records of a kind, walked as often as they are asked for. bad: gets the message of a record
    that is left out; None: DataError is raised for it."""

    def __init__(self, kind: str, bad: Callable[[str], None] | None) -> None:
        self.kind, self.bad = kind, bad

    def rows(self) -> Iterator[tuple[str, Any]]:
        """Place and record of each; a ValueError in place of one that does not parse."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[tuple[str, Messages]]:
        """Each record that can be used, with its place, such as "FILE:LINE"."""
        for place, record in self.rows():
            try:
                if isinstance(record, ValueError):
                    raise record
                messages = _chat(record) if self.kind == "chat" else _instruction(record)
                _check_text(messages)
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


class LiveRecords(ChatRecords):
    """The records of a sequence in memory, or of a `datasets.Dataset`."""

    def __init__(self, found: Sequence[Any], kind: str, bad: Callable[[str], None] | None) -> None:
        super().__init__(kind, bad)
        self.found = found

    def rows(self) -> Iterator[tuple[str, Any]]:
        yield from ((f"record {n}", self.found[n]) for n in range(len(self.found)))


class RecordFiles(ChatRecords):
    """The records of a path or glob, in the order of the names of the files. Each walk reads them
    anew, so that no more than one is in memory.

    bad: gets the message of a record that is left out. Raises DataError for it where that is None,
    and for files that cannot be read."""

    def __init__(self, source: str, kind: str, bad: Callable[[str], None] | None) -> None:
        super().__init__(kind, bad)
        self.paths = each_once(matching(source))
        if not self.paths:
            raise DataError(f"no file matches {source}: expected a path or glob of {_ENDINGS}")
        for path in self.paths:
            if path.suffix not in _SUFFIXES:
                raise DataError(f"{path}: expected records, in files that end in {_ENDINGS}")
            if path.suffix == ".csv" and kind == "chat":
                raise DataError(
                    f"{path}: a row of CSV has no list of messages: expected .jsonl for chats, "
                    'or kind = "instructions"'
                )

    def rows(self) -> Iterator[tuple[str, Any]]:
        for path in self.paths:
            yield from ((f"{path}:{line}", record) for line, record in _rows(path))


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Line and record of each row; a ValueError in place of one that does not parse."""
    if path.suffix == ".parquet":
        yield from enumerate(parquet_rows(path), 1)
        return
    if path.suffix == ".csv":
        yield from csv_rows(path)
        return
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                    yield number, json.loads(text, object_pairs_hook=each_key_once)
                except (ValueError, RecursionError) as error:
                    own = str(error) if type(error) is ValueError else type(error).__name__
                    what = getattr(error, "msg", own)
                    yield number, ValueError(f"the line is no JSON ({what})")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _check_text(messages: Messages) -> None:
    """Raise ValueError for what JSON may write and no UTF-8 has: half a pair of surrogates."""
    for number, message in enumerate(messages):
        try:
            message["content"].encode()
        except UnicodeEncodeError:
            raise ValueError(f"message {number} has half of a character (a surrogate)") from None


def _check_used(said: Mapping[str, Any], keys: Sequence[str], what: str) -> None:
    """Raise ValueError for keys that other trainers read, which would be left out here."""
    for key in keys:
        if said.get(key) not in (None, "", [], {}) and (key, said[key]) != ("weight", 1):
            raise ValueError(f'{what} has "{key}", which would be left out: {_INSTEAD[key]}')


def _chat(record: Any) -> Messages:
    messages = record.get("messages") if isinstance(record, Mapping) else None
    if messages is None and isinstance(record, Mapping) and "conversations" in record:
        messages = _of_conversations(record["conversations"])
    if not isinstance(messages, list) or not messages:
        there = sorted(map(str, record)) if isinstance(record, Mapping) else type(record).__name__
        raise ValueError(
            f'expected a chat, {{"messages": [{{"role", "content"}}, …]}}, got {there}'
        )
    _check_used(record, _OF_CHAT, "the chat")
    for number, message in enumerate(messages):
        for key in ("role", "content"):
            if not isinstance(message, Mapping) or not isinstance(message.get(key), str):
                raise ValueError(f'message {number} of the chat has no "{key}" that is text')
        for key in ("weight", "train", "training", "loss"):
            if message.get(key, 1) not in (None, 1):
                raise ValueError(
                    f'message {number} of the chat has the "{key}" {message[key]}: here all of '
                    "the assistant's messages count alike"
                )
        if (role := message["role"]) != "assistant" and role.lower() in _ASSISTANTS:
            raise ValueError(
                f'message {number} of the chat has the "role" {role!r}, of whom nothing would be '
                'learned: the role of the assistant is "assistant"'
            )
    return [dict(message) for message in messages]


def _of_conversations(found: Any) -> Any:
    """Messages of a list of {"from", "value"}."""
    if not isinstance(found, list) or not all(isinstance(one, Mapping) for one in found):
        return found
    named = {"from": "role", "value": "content"}
    renamed = [{named.get(key, key): value for key, value in one.items()} for one in found]
    for message in renamed:
        if isinstance(message.get("role"), str):
            message["role"] = _ROLES.get(message["role"], message["role"])
    return renamed


def _instruction(record: Any) -> Messages:
    if isinstance(record, Mapping):
        for asked, answered in _PAIRS:
            pair = record.get(asked), record.get(answered)
            if isinstance(pair[0], str) and isinstance(pair[1], str):
                more = record.get("input") if asked == "instruction" else None
                if more is not None and not isinstance(more, str):
                    raise ValueError(f'"input" is {type(more).__name__}: expected text')
                unread = ("system", "history", "weight", *(["input"] if more is None else []))
                _check_used(record, unread, "the instruction")
                user = f"{pair[0]}\n\n{more}" if more else pair[0]
                return [_said("user", user), _said("assistant", pair[1])]
    there = sorted(map(str, record)) if isinstance(record, Mapping) else type(record).__name__
    wanted = " or ".join(f'{{"{a}", "{b}"}}' for a, b in _PAIRS)
    raise ValueError(f"expected an instruction, {wanted}, as text; got {there}")


def _said(role: str, content: str) -> Message:
    return {"role": role, "content": content}
