"""Messages from records whose fields have the same names."""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import Message

__all__ = ["filled"]

M = TypeVar("M", bound=Message)


def filled(kind: type[M], record: object, /, **others: object) -> M:
    """A message of this kind: `others` by name, and each field that is not among them from the
    record's attribute of that name. Raises AttributeError where the record has none, and TypeError
    for a value that is not of the field's type."""
    names = kind.DESCRIPTOR.fields_by_name
    own = {name: getattr(record, name) for name in names if name not in others}
    return kind(**own, **others)
