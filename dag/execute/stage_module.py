"""From an interval of operators to an `fx.GraphModule` that runs at the speed of eager code.

The generated function takes the values that come from outside positionally, reads parameters and
buffers as attributes, lets go of every intermediate value after its last use, and checks nothing:
specs are checked once, when a tensor arrives (`execute.check_spec`).

Two things differ from the operators as they stand in the graph:

- Operators whose kernels trust strides or numbers are run by what stands in their place
  (stand_ins.py): `view` becomes `reshape`.
- Random operators get the microbatch's key as keyword `key`.

fx runs what it generates, so nothing that a graph from the network says may become code (I7). The
source holds the `repr` of numbers and strings, names of operators on the allow-list, numbered names
of our own for arguments and attributes (fx writes those as they are), and names of results, which
fx reduces to letters, digits and underscores.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..analysis.weight_gradients import WeightGradient
from ..ir.graph import Graph, Operator
from ..ir.infer import python_arg
from ..ir.operators import takes_key
from ..ir.rules.rules import check
from .stand_ins import function_of, linear
from .weight_half import Noted, WaitingOperator, note

__all__ = ["StageModule", "build"]


@dataclass(frozen=True, slots=True)
class StageModule:
    """Operators [start, stop) as one function: `run(*values in the order of takes[, key])` returns
    the values of `gives`, in order, and behind them what `note` took down at each of `waiting`."""

    module: fx.GraphModule
    run: Callable[..., tuple[Any, ...]]
    takes: tuple[str, ...]
    takes_key: bool
    gives: tuple[str, ...]
    waiting: tuple[WaitingOperator, ...] = ()

    def made(self, args: Sequence[object]) -> tuple[dict[str, Tensor], tuple[Noted | None, ...]]:
        """What `run` returns: values by name, and what was taken down."""
        found = self.run(*args)
        values, notes = found[: len(self.gives)], found[len(self.gives) :]
        return dict(zip(self.gives, values, strict=True)), notes


def build(
    graph: Graph,
    start: int,
    stop: int,
    gives: Sequence[str],
    tensors: Mapping[str, Tensor],
    device: torch.device,
    waits: Sequence[WeightGradient] = (),
) -> StageModule:
    """The operators [start, stop) of a bound graph; `waits`: those of them whose weights' gradients
    wait. `tensors` holds every parameter and buffer that
    they read, by value name (`param:…`, `buffer:…`); they become attributes, not copies. What is in
    `gives` and not made here (a result that is a data input) is passed through. Raises GraphError
    for an operator whose arguments break a rule (dag/ir/rules/rules.py)."""
    assert graph.batch is not None, "a stage is built from a bound graph"
    operators = graph.operators[start:stop]
    made = {value for op in operators for value in op.values}
    read = dict.fromkeys(v for op in operators for v in op.reads if v not in made)
    read |= dict.fromkeys(v for v in gives if v not in made)

    built = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    attributes: dict[str, Tensor] = {}
    takes = tuple(value for value in read if not _is_attribute(value))
    for i, value in enumerate(takes):
        nodes[value] = built.placeholder(f"take_{i}")  # fx does not clean these names: see above
    random = any(takes_key(op.target) for op in operators)
    key = built.placeholder("random_key") if random else None
    for value in read:
        if _is_attribute(value):
            name = f"{value.partition(':')[0]}_{len(attributes)}"
            attributes[name] = tensors[value]
            nodes[value] = built.get_attr(name)

    live = {v for op in operators for v in op.reads} | set(gives)
    waiting = {w.index: WaitingOperator(graph, w) for w in waits}
    notes: list[fx.Node] = []
    for i, op in enumerate(operators, start):
        check(op, graph.spec)
        apart = waiting.get(i)
        _add(built, op, nodes, live, key, device, frozen=apart is not None and not apart.whole)
        if apart:
            results = tuple(nodes[value] for value in apart.made)
            weights = tuple(nodes[value] for _, value in apart.weights if not apart.whole)
            kept = tuple(python_arg(a, nodes, device) for a in apart.args)
            notes.append(built.call_function(note, (results, weights, kept)))
    built.output((*(nodes[value] for value in gives), *notes))

    module = fx.GraphModule(_root(attributes), built, class_name="StageModule")
    # Else the two hold each other, and the tensors stay until a garbage collection.
    module.graph.owning_module = None
    # The bound forward: `module(...)` would add a wrapper and the hooks of nn.Module to each call.
    return StageModule(module, module.forward, takes, random, tuple(gives), tuple(waiting.values()))


def _is_attribute(value: str) -> bool:
    return value.startswith(("param:", "buffer:"))


def _root(attributes: Mapping[str, Tensor]) -> nn.Module:
    root = nn.Module()
    for name, tensor in attributes.items():
        if isinstance(tensor, nn.Parameter):
            root.register_parameter(name, tensor)
        else:
            root.register_buffer(name, tensor)
    return root


def _add(
    built: fx.Graph,
    op: Operator,
    nodes: dict[str, fx.Node],
    live: set[str],
    key: fx.Node | None,
    device: torch.device,
    *,
    frozen: bool = False,
) -> None:
    """Adds one operator, and the picking of those of its results that are used. `frozen`: the
    gradients of its weights are computed apart."""
    args = tuple(python_arg(a, nodes, device) for a in op.args)
    kwargs = {k: python_arg(a, nodes, device) for k, a in op.kwargs}
    function, count = function_of(op.target)
    args = args[:count]
    if takes_key(op.target):
        kwargs["key"] = key
    if frozen and function is linear:
        kwargs["frozen"] = True
    node = built.create_node("call_function", function, args, kwargs, name=f"op_{op.name}")
    if not op.returns_tuple:
        nodes[op.name] = node
        return
    for i, value in enumerate(op.values):
        if value in live:
            nodes[value] = built.create_node(
                "call_function", operator.getitem, (node, i), name=f"op_{value}"
            )
