"""What is known of tensors without values: which operators made them, of what.

    StorageContent   what lies in a storage: what an operator made, or wrote there, or came from
                     outside
    Op               a call of an operator, on views
    StorageView      a tensor: a part of a storage with some content

A content never changes: writing into a storage gives it another one, made of the one before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

__all__ = ["Op", "StorageContent", "StorageView", "drawn", "is_random", "read_by", "written"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StorageView:
    """A tensor that an operator read: where it lies in a storage with this content. `content` is
    None where all of it is overwritten."""

    content: StorageContent | None
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    storage_bytes: int

    @classmethod
    def of(cls, tensor: Tensor, content: StorageContent | None) -> StorageView:
        """How a tensor lies."""
        return cls(
            content,
            int(tensor.storage_offset()),
            tuple(tensor.shape),
            tuple(tensor.stride()),
            tensor.dtype,
            tensor.untyped_storage().nbytes(),
        )

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def interval(self) -> tuple[int, int] | None:
        """The elements of the storage, if they are an interval in row-major order."""
        expected = 1
        for size, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and step != expected:
                return None
            expected *= size
        return self.offset, self.offset + self.elements

    @property
    def is_whole(self) -> bool:
        """Whether it has each element of its storage once."""
        return self.elements * self.dtype.itemsize == self.storage_bytes and (
            self.interval is not None or _is_dense(self.shape, self.stride)
        )


def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


@dataclass(eq=False, slots=True)
class Op:
    """A call of an operator; its tensors are views. `stream`: of a draw, once it has one."""

    number: int
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    stream: str = ""

    @property
    def name(self) -> str:
        """As in `aten.normal_`, without its overload."""
        return str(self.func._schema.name).removeprefix("aten::")


@dataclass(eq=False, slots=True)
class StorageContent:
    """What lies in a storage: result `result` of an operator, or what it wrote into the storage of
    `written`, or else the tensor `real`, which came from outside, or what `read` gives, as of a
    file."""

    op: Op | None = None
    result: int = 0
    written: StorageView | None = None
    real: Tensor | None = None
    read: Callable[[], Tensor] | None = None
    like: StorageView | None = None
    """How a result lies in its storage."""


def drawn(op: Op) -> tuple[str, tuple[float, float]] | None:
    """The kind of step and the numbers of an operator that draws each element by itself."""
    name, numbers = op.name, [a for a in op.args if isinstance(a, (int, float))]
    if name in ("uniform_", "normal_"):
        first = float(numbers[0]) if numbers else 0.0
        return name[:-1], (first, float(numbers[1]) if len(numbers) > 1 else 1.0)
    if name == "normal" and str(op.func._overloadname) == "float_float":
        return "normal", (float(numbers[0]), float(numbers[1]))
    kinds = {"rand": "uniform", "rand_like": "uniform", "randn": "normal", "randn_like": "normal"}
    return (kinds[name], (0.0, 1.0)) if name in kinds else None


def read_by(op: Op) -> Iterator[StorageContent]:
    """What an operator reads."""
    for view in tree_leaves((op.args, op.kwargs)):
        if isinstance(view, StorageView) and view.content is not None:
            yield view.content


def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], kind: type[T]) -> list[T]:
    """What an operator writes into: those of a kind among the arguments that it declares so."""
    found: list[T] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            found += [one for one in tree_leaves(value) if isinstance(one, kind)]
    return found


def is_random(op: Op) -> bool:
    """Whether an operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in op.func.tags
