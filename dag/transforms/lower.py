"""Lowering: the graph in core ATen, for peers that announce the `core` operator set.

Each operator is decomposed on its own, so a cut of the full graph is a cut of the lowered one, and
the values that cross it keep their names. Shoal's own operators stay as they are, and so does an
operator that core already has.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor, fx
from torch._decomp import core_aten_decompositions
from torch._subclasses.functional_tensor import dispatch_functionalize
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..ir.fx_args import arg_of, is_plain, target_of
from ..ir.graph import Arg, Graph, GraphError, Lowered, Operator, Output, Ref, TensorSpec, map_arg
from ..ir.infer import Inferred, call, outside, results_of, with_grads
from ..ir.operators import allowed
from ..ir.rules.rules import check_graph

__all__ = ["lower"]


@dataclass(frozen=True)
class _Step:
    """One core operator of a recipe. Refs are `<i` (argument i of the recipe) and `>j` or `>j.k`
    (result of step j)."""

    target: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    returns_tuple: bool


@dataclass(frozen=True)
class _Recipe:
    """The core form of an operator for given specs and constants; `results` name a step's result,
    an argument, or nothing (None)."""

    steps: tuple[_Step, ...]
    results: tuple[str | None, ...]


def lower(graph: Graph) -> Lowered:
    """The core form of a bound full graph.

    Every value of the full graph that something reads, or that is a result, has its name and its
    spec here too. Raises GraphError naming an operator without a core form.
    """
    if graph.batch is None:
        raise GraphError("lowering needs a bound graph: call graph.bind(microbatch size) first")
    check_graph(graph)
    wanted = {v for op in graph.operators for v in op.reads} | set(graph.results)
    known = outside(graph)
    made: list[Operator] = []
    start: list[int] = []
    for op in graph.operators:
        start.append(len(made))
        for core in _lowered(op, graph.spec, wanted):
            results = results_of(core, known)
            core = replace(core, outputs=tuple(Output(r[0] if r else None) for r in results))
            known |= {v: r for v, r in zip(core.values, results, strict=True) if r}
            made.append(core)
    lowered = replace(graph, operators=tuple(made), operator_set="core")
    return Lowered(_with_same_ports(lowered, graph, known), (*start, len(made)))


def _with_same_ports(lowered: Graph, graph: Graph, known: Inferred) -> Graph:
    """Gradients of the lowered graph; where the full one has a value, it is that value's."""
    full = {v: o for op in graph.operators for v, o in zip(op.values, op.outputs, strict=True)}
    read = {v for op in graph.operators for v in op.reads} | set(graph.results)
    for value, output in full.items():
        if (
            value in known
            and value in read
            and (known[value][0] != output.spec or known[value][1] < output.grad)
        ):
            raise GraphError(
                f"the core form of value {value} is {known[value][0]} with gradient "
                f"{known[value][1]}, expected {output.spec} with {output.grad}"
            )
    derived = with_grads(lowered, known)
    return replace(
        derived,
        parameters=graph.parameters,
        operators=tuple(
            replace(
                op,
                outputs=tuple(
                    replace(o, grad=full[v].grad if v in full else o.grad)
                    for v, o in zip(op.values, op.outputs, strict=True)
                ),
            )
            for op in derived.operators
        ),
    )


def _lowered(op: Operator, specs: dict[str, TensorSpec], wanted: set[str]) -> list[Operator]:
    """The core operators in the place of one full one, their outputs not filled yet."""
    if allowed(op.target, "core"):
        return [op]
    reads = op.reads
    numbers = {value: Ref(f"<{i}") for i, value in enumerate(reads)}

    def anonymous(arg: Arg) -> Arg:
        return numbers[arg.value] if isinstance(arg, Ref) else arg

    template = replace(op.mapped(anonymous), name="", module="")
    try:
        recipe = _recipe(repr(template), template, tuple(specs[v] for v in reads))
    except _NoCoreFormError as error:
        raise GraphError(f"operator {op.name} ({op.target}) has no core form: {error}") from None
    return _written(op, recipe, wanted)


class _NoCoreFormError(Exception):
    """An operator needs what core does not have; says what."""


@lru_cache(1024)
def _recipe(text: str, template: Operator, specs: tuple[TensorSpec, ...]) -> _Recipe:
    """Make the recipe for specs and constants. Blocks repeat, and so do models: equal ones have
    theirs once. `text` tells 1 from 1.0 and True, which are equal as keys."""
    given = [torch.empty(s.sizes, dtype=getattr(torch, s.dtype), device="meta") for s in specs]

    def run(*tensors: Tensor) -> list[Any]:
        values: dict[str, Any] = {f"<{i}": t for i, t in enumerate(tensors)}
        return call(template, values, torch.device("meta"))

    # No autograd here: it would leave `detach` in the recipe. In-place steps of a decomposition
    # (the cells of an LSTM) are made functional.
    with sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        traced = make_fx(dispatch_functionalize(run), decomposition_table=_table())(*given)
    _tidy(traced.graph)
    env: dict[Node, Any] = {}
    steps: list[_Step] = []
    results: tuple[str | None, ...] = ()
    inputs = iter(range(len(given)))
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            env[node] = Ref(f"<{next(inputs)}")
        elif node.op == "output":
            out = [env[n] if isinstance(n, Node) else None for n in node.args[0]]
            results = tuple(r.value if isinstance(r, Ref) else None for r in out)
        elif node.target is operator.getitem:
            env[node] = Ref(f"{env[node.args[0]][0]}.{node.args[1]}")
        else:
            _add_step(node, env, steps)
    return _Recipe(tuple(steps), results)


def _tidy(graph: fx.Graph) -> None:
    """Takes out uninitialised tensors, which decompositions use as shapes only, and the batch norm
    that writes to its buffers, where it has none."""
    aten = torch.ops.aten
    for node in list(graph.nodes):
        if node.target is aten.full_like.default:
            value = node.meta["val"]
            node.kwargs = {"dtype": value.dtype, "device": value.device}
            node.args, node.target = (list(value.shape), node.args[1]), aten.full.default
        elif node.target is aten.native_batch_norm.default and node.args[3:6] == (None, None, True):
            node.args = (*node.args[:3], *node.args[5:])
            node.target = aten._native_batch_norm_legit.no_stats
        elif node.target is aten.copy.default:  # which has no derivative
            part, source = node.args[:2]
            shape, dtype = list(part.meta["val"].shape), part.meta["val"].dtype
            if source.meta["val"].dtype != dtype:
                with graph.inserting_before(node):
                    source = graph.call_function(aten._to_copy.default, (source,), {"dtype": dtype})
            node.target, node.args, node.kwargs = aten.expand.default, (source, shape), {}
    graph.eliminate_dead_code()


def _add_step(node: Node, env: dict[Node, Any], steps: list[_Step]) -> None:
    if node.op != "call_function":
        raise _NoCoreFormError(f"it needs a {node.op}")
    target = target_of(node)
    # Strides at run time are not those of the tracing: see dag/capture/rewrite.py.
    if target in ("aten.view.default", "aten._unsafe_view.default"):
        target = "aten.reshape.default"
    if not allowed(target, "core"):
        raise _NoCoreFormError(
            f"{target} is not on the 'core' allow-list; leave peers with the core operator set out "
            "of the plan"
        )
    returns_tuple = len(node.target._schema.returns) > 1 or (  # type: ignore[union-attr]
        str(node.target._schema.returns[0].type) == "List[Tensor]"  # type: ignore[union-attr]
    )
    name = f">{len(steps)}"
    steps.append(
        _Step(
            target,
            tuple(arg_of(a, env, node) for a in node.args),
            tuple((k, arg_of(a, env, node)) for k, a in node.kwargs.items() if not is_plain(k, a)),
            returns_tuple,
        )
    )
    env[node] = [name] if returns_tuple else Ref(name)


def _written(op: Operator, recipe: _Recipe, wanted: set[str]) -> list[Operator]:
    """The steps of a recipe as operators of the graph. A step that makes a result has that result's
    name; a result that is one of several of a step, or an argument, gets it through an alias."""
    finals = {
        value: made
        for value, made in zip(op.values, recipe.results, strict=True)
        if value in wanted and made is not None
    }
    names = {f"<{i}": value for i, value in enumerate(op.reads)}
    direct = {made: value for value, made in reversed(finals.items())}
    made_ops: list[Operator] = []
    for j, step in enumerate(recipe.steps):
        name = direct.get(f">{j}", f"{op.name}/{j}")
        names[f">{j}"] = name
        made_ops.append(
            Operator(
                name=name,
                target=step.target,
                args=tuple(map_arg(a, _renaming(names)) for a in step.args),
                kwargs=tuple((k, map_arg(a, _renaming(names))) for k, a in step.kwargs),
                outputs=(),
                returns_tuple=step.returns_tuple,
                module=op.module,
            )
        )
    for value, made in finals.items():
        source = _renaming(names)(Ref(made))
        if source != Ref(value):
            made_ops.append(
                Operator(value, "aten.alias.default", (source,), (), (), module=op.module)
            )
    return made_ops


def _renaming(names: dict[str, str]) -> Callable[[Arg], Arg]:
    def change(arg: Arg) -> Arg:
        if not isinstance(arg, Ref):
            return arg
        step, dot, item = arg.value.partition(".")
        return Ref(names[step] + dot + item)

    return change


@cache
def _table() -> dict[Any, Callable[..., Any]]:
    """torch's rules for core ATen, and those that it has not. The gradient of each is that of the
    operator in its place (max and amax share it evenly among equal elements)."""
    aten = torch.ops.aten
    return dict(core_aten_decompositions()) | {
        aten.max.default: lambda x: aten.amax.default(x),
        aten.min.default: lambda x: aten.amin.default(x),
        aten.exp2.default: lambda x: aten.pow.Scalar(2.0, x),
        aten.var_mean.correction: _var_mean,
        aten._safe_softmax.default: _safe_softmax,
    }


def _safe_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Zeros where a whole row is -inf, and no gradient. torch's rule takes the softmax of that row
    first, whose NaN comes back in the backward pass."""
    aten = torch.ops.aten
    x = x if dtype is None else x.to(dtype)
    dead = aten.eq.Scalar(aten.amax.default(x, [dim], True), -math.inf)
    alive = aten.masked_fill.Scalar(x, dead, 0.0)
    weights: Tensor = aten._softmax.default(alive, dim, False)
    return weights.masked_fill(dead, 0.0)


def _var_mean(
    x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    aten = torch.ops.aten
    dims = list(range(x.dim())) if dim is None else dim
    var = aten.var.correction(x, dims, correction=correction, keepdim=keepdim)
    return var, aten.mean.dim(x, dims, keepdim)
