"""Messages from records whose fields have the same names, and back."""

from __future__ import annotations

from typing import Any, TypeVar

from google.protobuf.message import Message

__all__ = ["filled", "taken"]

M = TypeVar("M", bound=Message)
R = TypeVar("R")


def filled(kind: type[M], record: object, /, **others: object) -> M:
    """A message of this kind: `others` by name, and each field that is not among them from the
    record's attribute of that name. Raises AttributeError where the record has none, and TypeError
    for a value that is not of the field's type."""
    names = kind.DESCRIPTOR.fields_by_name
    own = {name: getattr(record, name) for name in names if name not in others}
    return kind(**own, **others)


def taken(kind: type[R], message: Message, /, **others: object) -> R:
    """A record of this kind, a dataclass or named tuple: `others` by name, and each field that is
    not among them from the message's of that name, repeated ones as tuples. Raises AttributeError
    where the message has none."""
    names = kind.__annotations__.keys() - others.keys()
    own: dict[str, Any] = {name: getattr(message, name) for name in names}
    plain = int | float | str
    own = {n: v if isinstance(v, plain) else tuple(v) for n, v in own.items()}
    return kind(**own, **others)
