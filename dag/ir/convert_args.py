"""Tensor specs, names and the arguments of operators, to the wire and back (`convert.py`). Reading
raises GraphError, whatever a message says."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NoReturn

from ...proto import common_pb2, graph_pb2
from .graph import (
    ITEM_BYTES,
    Arg,
    Device,
    Dim,
    Dtype,
    GraphError,
    MemoryFormat,
    Ref,
    Size,
    TensorSpec,
)

__all__ = [
    "MAX_NAME",
    "MAX_TEXT",
    "arg_from_proto",
    "arg_to_proto",
    "dtype_from_proto",
    "dtype_to_proto",
    "name_of",
    "refuse",
    "spec_from_proto",
    "spec_to_proto",
]

MAX_NAME = 512  # characters
MAX_TEXT = 4096  # characters, of an argument or a reason
MAX_NESTING = 8  # lists in lists, of an argument; operators have at most two
MAX_RANK = 32
MAX_SIZE = 1 << 48  # elements along one dimension
MAX_ELEMENTS = 1 << 53

_DTYPES: dict[str, common_pb2.DType] = {
    name: getattr(common_pb2.DType, name.upper()) for name in ITEM_BYTES
}
_DTYPE_NAMES: dict[int, str] = {number: name for name, number in _DTYPES.items()}
_MEMORY_FORMATS = ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")


def refuse(what: str) -> NoReturn:
    """Raises GraphError: a message is wrong."""
    raise GraphError(f"graph message: {what}")


def name_of(text: str, what: str, refuse: Callable[[str], NoReturn] = refuse) -> str:
    """The text when it can be a name; `refuse` raises otherwise."""
    if not text or len(text) > MAX_NAME or not text.isprintable():
        refuse(f"{what} is {text[:60]!r}: expected 1 to {MAX_NAME} printable characters")
    return text


# ---------------------------------------------------------------- tensor specs


def spec_to_proto(spec: TensorSpec) -> common_pb2.TensorSpec:
    """Raises GraphError for a dtype that has no place on a wire."""
    return common_pb2.TensorSpec(
        shape=[
            common_pb2.Size(times=d.times, plus=d.plus)
            if isinstance(d, Size)
            else common_pb2.Size(plus=d)
            for d in spec.shape
        ],
        dtype=dtype_to_proto(spec.dtype),
    )


def spec_from_proto(message: common_pb2.TensorSpec) -> TensorSpec:
    """Raises GraphError for an unknown dtype, a negative or an absurd size."""
    if len(message.shape) > MAX_RANK:
        refuse(f"a tensor has {len(message.shape)} dimensions: expected at most {MAX_RANK}")
    shape = tuple(_dim_from_proto(size) for size in message.shape)
    if math.prod(d for d in shape if isinstance(d, int)) > MAX_ELEMENTS:
        refuse(f"a tensor of shape {list(shape)} has more than {MAX_ELEMENTS} elements")
    return TensorSpec(shape, dtype_from_proto(message.dtype))


def _dim_from_proto(message: common_pb2.Size) -> Dim:
    size = _size_from_proto(message)
    if size.times:
        return size
    if size.plus < 0:
        refuse(f"a tensor has the size {size.plus}")
    return size.plus


def _size_from_proto(message: common_pb2.Size) -> Size:
    if not (0 <= message.times <= MAX_SIZE and abs(message.plus) <= MAX_SIZE):
        refuse(f"a size is {message.times}b{message.plus:+d}: expected at most {MAX_SIZE}")
    return Size(message.times, message.plus)


def dtype_to_proto(name: str) -> common_pb2.DType:
    """Raises GraphError for a dtype that has no place on a wire."""
    if name not in _DTYPES:
        raise GraphError(f"dtype {name} has no place on a wire: expected {', '.join(_DTYPES)}")
    return _DTYPES[name]


def dtype_from_proto(number: int) -> str:
    """Raises GraphError for an unknown number."""
    if number not in _DTYPE_NAMES:
        refuse(f"dtype {number} is unknown")
    return _DTYPE_NAMES[number]


# ---------------------------------------------------------------- arguments


def arg_to_proto(arg: Arg, depth: int = 0) -> graph_pb2.Argument:
    """Raises GraphError for an integer or a depth of lists that has no place on a wire."""
    found = graph_pb2.Argument()
    match arg:
        case None:
            found.none = True
        case bool():
            found.boolean = arg
        case int():
            if not -(1 << 63) <= arg < 1 << 63:
                raise GraphError(f"an argument is {arg}: expected an integer of 64 bits")
            found.integer = arg
        case float():
            found.real = arg
        case str():
            found.text = arg
        case Ref(value):
            found.value = value
        case Size(times, plus):
            found.size.times, found.size.plus = times, plus
        case Dtype(name):
            found.dtype = dtype_to_proto(name)
        case MemoryFormat(name):
            found.memory_format = name
        case Device():
            found.device = True
        case tuple():
            if depth == MAX_NESTING:
                raise GraphError(f"an argument has more than {MAX_NESTING} lists in lists")
            found.list.items.extend(arg_to_proto(item, depth + 1) for item in arg)
            found.list.SetInParent()  # an empty list is a list too
    return found


def arg_from_proto(message: graph_pb2.Argument, depth: int = 0) -> Arg:
    """Read an argument of a node; raises GraphError."""
    match message.WhichOneof("kind"):
        case "none":
            return None
        case "boolean":
            return message.boolean
        case "integer":
            return message.integer
        case "real":
            return message.real
        case "text":
            if len(message.text) > MAX_TEXT:
                refuse(f"a text argument has {len(message.text)} characters")
            return message.text
        case "value":
            return Ref(message.value)
        case "size":
            return _size_from_proto(message.size)
        case "dtype":
            return Dtype(dtype_from_proto(message.dtype))
        case "memory_format":
            if message.memory_format not in _MEMORY_FORMATS:
                refuse(f"memory format {message.memory_format[:60]!r} is unknown")
            return MemoryFormat(message.memory_format)
        case "device":
            return Device()
        case "list":
            if depth == MAX_NESTING:
                refuse(f"an argument has more than {MAX_NESTING} lists in lists")
            return tuple(arg_from_proto(item, depth + 1) for item in message.list.items)
        case _:
            refuse("an argument is empty or of an unknown kind")
