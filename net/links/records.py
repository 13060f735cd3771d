"""Small immutable records, of which a busy link makes thousands a second.

A frozen dataclass sets each field by `object.__setattr__`, which takes three times as long as plain
setting. Of an `immutable` one the type checker alone forbids to change a field.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

__all__ = ["immutable"]

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def immutable(cls: type[T]) -> type[T]:
    """As `dataclass(frozen=True, slots=True)`: with equality, a hash, and slots for its fields."""
    return dataclass(slots=True, unsafe_hash=True)(cls)
