"""The rules that every graph keeps, however it came here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from .graph import ITEM_BYTES, Graph, GraphError, Size, TensorSpec
from .operators import OperatorError, check, takes_key

__all__ = ["validate"]


def validate(graph: Graph) -> Graph:
    """Returns the graph when it keeps every rule; raises GraphError naming the operator or value
    and the rule that is broken.

    Names are unique; an operator reads only values made before it; specs have known dtypes and, in
    a bound graph, no Size; every operator is on the allow-list of its set; loss, weight and metrics
    are scalars; an update reads a value of its buffer's spec.
    """
    _unique("input", (i.name for i in graph.inputs))
    names = [n for p in graph.parameters for n in (p.name, *p.tied)]
    _unique("parameter", names)
    _unique("buffer", (b.name for b in graph.buffers))
    _unique("operator", (op.name for op in graph.operators))
    _unique("value", (v for op in graph.operators for v in op.values))
    outside = [(f"in:{i.name}", i.spec) for i in graph.inputs]
    outside += [(f"param:{p.name}", p.spec) for p in graph.parameters]
    outside += [(f"buffer:{b.name}", b.spec) for b in graph.buffers]
    for value, spec in outside:
        _spec(value, spec, graph)
    _operators(graph, {value for value, _ in outside})
    _results(graph)
    _updates(graph)
    return graph


def _unique(kind: str, names: Iterable[str]) -> None:
    for name, count in Counter(names).items():
        if count > 1 or not name:
            raise GraphError(f"{kind} name {name!r} appears {count} times: expected unique names")


def _spec(value: str, spec: TensorSpec, graph: Graph) -> None:
    if spec.dtype not in ITEM_BYTES:
        raise GraphError(
            f"value {value} has dtype {spec.dtype!r}: expected one of {', '.join(ITEM_BYTES)}"
        )
    for dim in spec.shape:
        if isinstance(dim, Size) and graph.batch is not None:
            raise GraphError(f"value {value} is {spec!r} in a graph bound to batch {graph.batch}")
        least = dim.bind(1) if isinstance(dim, Size) else dim
        if least < 0 or (isinstance(dim, Size) and dim.times < 0):
            raise GraphError(f"value {value} is {spec!r}: a size is negative")


def _operators(graph: Graph, known: set[str]) -> None:
    randoms: set[int] = set()
    for op in graph.operators:
        try:
            check(op.target, graph.operator_set)
        except OperatorError as error:
            raise GraphError(f"operator {op.name}: {error}") from None
        for value in op.reads:
            if value not in known:
                raise GraphError(
                    f"operator {op.name} ({op.target}) reads {value}, which is not made before it"
                )
        if op.target == "aten.embedding.default" and (
            any(op.args[4:]) or dict(op.kwargs).get("sparse")
        ):
            raise GraphError(f"embedding {op.name} has a sparse gradient: expected sparse=False")
        if not op.outputs or (len(op.outputs) != 1 and not op.returns_tuple):
            raise GraphError(
                f"operator {op.name} has {len(op.outputs)} results and "
                f"returns_tuple={op.returns_tuple}: expected one result, or a tuple of one or more"
            )
        if takes_key(op.target):
            number = op.args[-1] if op.args else None
            if type(number) is not int or number in randoms:
                raise GraphError(
                    f"random operator {op.name} has number {number!r} as its last argument: "
                    "expected an integer of its own"
                )
            randoms.add(number)
        for value, output in zip(op.values, op.outputs, strict=True):
            if output.spec is not None:
                _spec(value, output.spec, graph)
                known.add(value)


def _results(graph: Graph) -> None:
    results = [("loss", graph.loss), *((f"metric {name}", v) for name, v in graph.metrics)]
    results += [("weight", graph.weight)] if graph.weight else []
    _unique("metric", (name for name, _ in graph.metrics))
    for what, value in results:
        if value not in graph.producer:
            raise GraphError(f"the {what} is {value!r}, which no operator makes")
        spec = graph.spec.get(value)
        if spec is None or spec.shape != () or not spec.is_floating:
            raise GraphError(f"the {what} {value} is {spec!r}: expected a floating scalar")


def _updates(graph: Graph) -> None:
    for buffer in graph.buffers:
        update = buffer.update
        if update is None:
            continue
        if update.rule == "ema":
            spec = graph.spec.get(update.value) if update.value in graph.producer else None
            if spec != buffer.spec:
                raise GraphError(
                    f"buffer {buffer.name} ({buffer.spec!r}) is updated from {update.value!r} "
                    f"({spec!r}): expected a value of the same spec, made by an operator"
                )
        elif update.value:
            raise GraphError(
                f"counter {buffer.name} is updated from {update.value!r}: expected no value"
            )
