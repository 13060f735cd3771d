"""Records of what a function does with tensors of some shapes: its operators, one after the other.

A record is made by `make_fx`, and comes to the same bits with fewer operators: what gives back what
it is given (a view of the same shape and strides, a product with 1) is left out, and so is what was
computed before.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

__all__ = ["record"]

_aten = torch.ops.aten
_PRODUCTS = {_aten.mul.Scalar, _aten.mul.Tensor}
_VIEWS = {_aten.view.default, _aten.expand.default, _aten._unsafe_view.default}


def record(call: Callable[..., Any], values: Sequence[Tensor]) -> Callable[..., Any]:
    """Return what does the same as `call` with tensors of the shapes and strides of `values`, and
    with whatever else it depends on as it is now. What comes out is for reading: results may lie in
    one another. Raises RuntimeError for what cannot be recorded."""
    found = make_fx(call)(*values)
    shorten(found.graph)
    found.recompile()
    return found.forward


def shorten(graph: fx.Graph) -> None:
    """Leave out what changes nothing, unless something is written in place or drawn at random."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    if not all(_is_function(node) for node in calls):
        return
    known: dict[Any, fx.Node] = {}
    for node in calls:
        key = (node.target, _frozen(node.args), _frozen(node.kwargs))
        before = _first(node) if _gives_back(node) else known.setdefault(key, node)
        # What is given may not be what comes out: the caller changes one without the other.
        if before is not node and not (_is_given(before) and _comes_out(node)):
            node.replace_all_uses_with(before)
    graph.eliminate_dead_code()


def _is_function(node: fx.Node) -> bool:
    """Whether it comes to the same for the same, and changes nothing else."""
    called = node.target
    if called is operator.getitem:
        return True
    if not isinstance(called, torch._ops.OpOverload) or called._schema.is_mutable:
        return False
    return torch.Tag.nondeterministic_seeded not in called.tags


def _gives_back(node: fx.Node) -> bool:
    if node.target is _aten.detach.default:  # nothing has a gradient any more
        return True
    if node.target in _VIEWS:
        made, given = node.meta["val"], _first(node).meta["val"]
        return bool(made.shape == given.shape and made.stride() == given.stride())
    if node.target in _PRODUCTS and node.args[1] == 1 and not isinstance(node.args[1], fx.Node):
        return bool(node.meta["val"].dtype == _first(node).meta["val"].dtype)
    return False


def _is_given(node: fx.Node) -> bool:
    """Whether it may be, or lie in, what the call is given."""
    while node.op == "call_function":
        if isinstance(called := node.target, torch._ops.OpOverload) and (
            called._schema.returns[0].alias_info is None
        ):
            return False
        node = _first(node)
    return True


def _first(node: fx.Node) -> fx.Node:
    """What a call is given first."""
    given = node.args[0]
    assert isinstance(given, fx.Node), f"{node} is given {given!r}"
    return given


def _comes_out(node: fx.Node) -> bool:
    return any(user.op == "output" for user in node.users)


def _frozen(value: Any) -> Any:
    """As a key: numbers of one value and other types are others."""
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(v) for v in value)
    if isinstance(value, dict):
        return tuple((k, _frozen(v)) for k, v in value.items())
    return value if isinstance(value, fx.Node) else (type(value), repr(value))
