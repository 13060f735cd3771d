"""From fx arguments and fake tensors to a graph's arguments, sizes and specs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from .capture_errors import CaptureError, line_of, refused
from .graph import ITEM_BYTES, Arg, Device, Dim, Dtype, MemoryFormat, Size, TensorSpec

__all__ = [
    "arg_of",
    "dtype_name",
    "is_plain",
    "module_of",
    "name_of",
    "size_of",
    "spec_of",
    "target_of",
]

_PROBES = (1, 2, 3, 5, 8, 13, 64, 97, 1000, 4096, 99991, 2**20, 2**31 - 1)
"""Batch sizes at which an expression must be affine."""


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def target_of(node: Node) -> str:
    """`aten.linear.default`; Python functions and higher-order operators keep their own name."""
    if isinstance(node.target, torch._ops.OpOverload):
        return name_of(node.target)
    return getattr(node.target, "__name__", str(node.target))


def name_of(operator: torch._ops.OpOverload[..., Any]) -> str:
    return f"{operator.namespace}.{operator._schema.name.split('::')[1]}.{operator._overloadname}"


def module_of(node: Node, prefix: str) -> str:
    """Path of the innermost submodule of the user's that was running ('' for the model itself)."""
    for path, _ in reversed(list((node.meta.get("nn_module_stack") or {}).values())):
        if path == prefix.rstrip(".") or path.startswith(prefix):
            # A module that is called again is listed as path@1, path@2, …
            return re.sub(r"@\d+", "", str(path)).removeprefix(prefix.rstrip(".")).lstrip(".")
    return ""


def size_of(value: Any, node: Node) -> Dim | float | bool:
    """A number that may depend on the microbatch size, as an int, a float or a Size.

    Raises CaptureError unless it is times·b + plus with integer factors.
    """
    if isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, torch.SymBool):
        raise refused(
            line_of(node),
            "a condition on the batch size cannot be captured",
            "a microbatch may have any size",
        )
    expression = value.node.expr
    symbols = sorted(expression.free_symbols, key=str)
    if any(str(s).startswith(("u", "zuf", "zf")) for s in symbols):
        raise refused(
            line_of(node),
            "a size or number that depends on data cannot be captured",
            "keep shapes fixed, e.g. torch.where or a mask instead of x[mask], nonzero() or "
            ".item(); of a mask that never changes, make mask.nonzero() once, in __init__",
        )

    def at(batch: int) -> Any:
        return expression.subs(dict.fromkeys(symbols, batch))

    plus = 2 * at(1) - at(2)
    times = at(2) - at(1)
    if any(at(b) != times * b + plus for b in _PROBES) or times != int(times) or plus != int(plus):
        raise refused(
            line_of(node),
            f"the size or number {expression} is not times·b + plus for batch size b",
            "pad to a fixed size, or divide tensors instead of sizes",
        )
    return Size(int(times), int(plus)) if times != 0 else int(plus)


def spec_of(value: Any, node: Node) -> TensorSpec:
    """Spec of a fake tensor; raises CaptureError for an element type that no wire carries."""
    if not isinstance(value, Tensor):
        raise CaptureError(f"{line_of(node)}\n  {type(value).__name__} instead of a tensor")
    name = dtype_name(value.dtype)
    if name not in ITEM_BYTES:
        raise CaptureError(
            f"{line_of(node)}\n  a tensor of {name}: expected one of {', '.join(ITEM_BYTES)}"
            + ("; write it with real and imaginary parts" if value.is_complex() else "")
        )
    return TensorSpec(tuple(_dim(d, node) for d in value.shape), name)


def _dim(value: Any, node: Node) -> Dim:
    size = size_of(value, node)
    assert isinstance(size, (int, Size))
    return size


def arg_of(value: Any, env: Mapping[Node, Any], node: Node) -> Arg:
    """An argument of `node`; `env` has the arguments of the nodes before it."""
    if isinstance(value, Node):
        made = env[value]
        if isinstance(made, list):
            raise CaptureError(f"{line_of(node)}\n  takes a whole tuple of {value.name} at once")
        return made  # type: ignore[no-any-return]  # the environment holds Args
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return size_of(value, node)
    if isinstance(value, (list, tuple)):
        return tuple(arg_of(item, env, node) for item in value)
    if isinstance(value, torch.dtype):
        return Dtype(dtype_name(value))
    if isinstance(value, torch.memory_format):
        return MemoryFormat(str(value).removeprefix("torch."))
    if isinstance(value, torch.device):
        return Device()
    raise CaptureError(f"{line_of(node)}\n  an argument of type {type(value).__name__}: {value}")


def is_plain(name: str, value: Any) -> bool:
    """Whether a keyword argument says only what every tensor here is: strided and not pinned."""
    return (name == "layout" and value in (None, torch.strided)) or (
        name in ("pin_memory", "non_blocking") and not value
    )
