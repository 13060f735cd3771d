"""Statistics of a classifier's hidden features by class, for clients that train what lies above
them on features of others as well (FedImpro, 2402.07011): a graph transform at submission.

Three buffers have, of each class, how many samples a step's batch had of it, the sum of their
features and that of their squares, as moving averages over steps, from zero:

    b <- (1 - share)·b + share·(what the batch has)

They are sums, so that their weighted mean over clients is that of all samples together: of class c
the mean is sum[c] / count[c], and the variance square[c] / count[c] less its square, between
clients as well as within. Rounds exchange them as other running statistics.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..ir.graph import (
    Arg,
    Buffer,
    BufferUpdate,
    Device,
    Dtype,
    Graph,
    GraphError,
    Input,
    Operator,
    Output,
    Ref,
    TensorSpec,
)
from ..ir.infer import infer, with_grads
from .classifier import Classifier, classifier_of, flat_width, upstream

__all__ = ["COUNT", "SQUARE", "SUM", "AboveFeatures", "above_features", "with_statistics"]

COUNT, SUM, SQUARE = (f"feature_statistics.{name}" for name in ("count", "sum", "square"))
_PREFIX = "feature_statistics_"
DRAWN = "drawn_features"
"""The input of what lies above features."""


def with_statistics(
    graph: Graph, share: float, *, features: str = "", logits: str = ""
) -> tuple[Graph, dict[str, tuple[int, ...]]]:
    """Return a graph, unbound, which makes statistics of features besides, and by name the shapes
    of its new buffers, float32. `features`, `logits`: as `classifier_of` takes them, and raises
    GraphError; so does this for names that are taken."""
    found = classifier_of(graph, features=features, logits=logits)
    names = {p.name for p in graph.parameters} | {b.name for b in graph.buffers}
    names |= {op.name for op in graph.operators} | {i.name for i in graph.inputs}
    if clash := [n for n in sorted(names) if n.startswith((_PREFIX, COUNT[:-5])) or n == DRAWN]:
        raise GraphError(f"the model has the name {clash[0]}: expected another one")
    at = graph.producer[found.features] + 1 if found.features in graph.producer else 0
    module = graph.operators[max(0, at - 1)].module
    added = _operators(graph, found, module)
    width = flat_width(graph, found.features)
    shapes: dict[str, tuple[int, ...]] = {COUNT: (found.classes,)}
    shapes |= dict.fromkeys((SUM, SQUARE), (found.classes, width))
    made = (f"{_PREFIX}{name}" for name in ("count", "sum", "square"))
    buffers = [
        Buffer(name, TensorSpec(shapes[name], "float32"), True, BufferUpdate("ema", value, share))
        for name, value in zip(shapes, made, strict=True)
    ]
    grown = replace(
        graph,
        buffers=(*graph.buffers, *buffers),
        operators=(*graph.operators[:at], *added, *graph.operators[at:]),
    )
    return with_grads(grown, infer(grown.bind(2))), shapes


def _operators(graph: Graph, found: Classifier, module: str) -> list[Operator]:
    """Return the operators of the statistics: of a batch's features of each class, how many, their
    sum and that of their squares."""
    classes, width = found.classes, flat_width(graph, found.features)
    batch = graph.spec[found.features].shape[0]
    made = list[Operator]()

    def add(name: str, target: str, args: tuple[Arg, ...], spec: TensorSpec, **kwargs: Arg) -> Ref:
        given = tuple(kwargs.items())
        operator = Operator(
            f"{_PREFIX}{name}", f"aten.{target}", args, given, (Output(spec),), module=module
        )
        made.append(operator)
        return Ref(operator.name)

    def numbers(*shape: int) -> TensorSpec:
        return TensorSpec(shape, "float32")

    each = TensorSpec((batch, classes), "bool")
    kinds = add(
        "kinds", "arange.default", (classes,), TensorSpec((classes,), "int64"), device=Device()
    )
    column = TensorSpec((batch, 1), "int64")
    labels = add("labels", "unsqueeze.default", (Ref(f"in:{found.labels}"), 1), column)
    same = add("same", "eq.Tensor", (labels, kinds), each)
    which = add(
        "which", "_to_copy.default", (same,), replace(each, dtype="float32"), dtype=Dtype("float32")
    )
    by_class = add("by_class", "t.default", (which,), TensorSpec((classes, batch), "float32"))
    rows = TensorSpec((batch, width), "float32")
    flat = add("flat", "reshape.default", (Ref(found.features), (batch, width)), rows)
    squares = add("squares", "mul.Tensor", (flat, flat), rows)
    add("count", "sum.dim_IntList", (which, (0,)), numbers(classes))
    add("sum", "matmul.default", (by_class, flat), numbers(classes, width))
    add("square", "matmul.default", (by_class, squares), numbers(classes, width))
    return made


@dataclass(frozen=True)
class AboveFeatures:
    """What lies above the features of a graph with statistics: `graph` makes its loss of features
    alone, which are its input DRAWN, (batch, *shape), and of labels."""

    graph: Graph
    labels: str
    shape: tuple[int, ...]
    classes: int


def above_features(
    graph: Graph, share: float, *, features: str = "", logits: str = ""
) -> AboveFeatures:
    """Return what lies above the features of a graph that `with_statistics` made with the same
    arguments. Raises GraphError for another one, and for logits that hang on samples past the
    features."""
    kept = tuple(op for op in graph.operators if not op.name.startswith(_PREFIX))
    buffers = tuple(b for b in graph.buffers if b.name not in (COUNT, SUM, SQUARE))
    own = replace(graph, operators=kept, buffers=buffers)
    if len(kept) == len(graph.operators):
        raise GraphError("the graph has no statistics of features: submit the job again")
    found = classifier_of(own, features=features, logits=logits)
    if with_statistics(own, share, features=features, logits=logits)[0] != graph:
        raise GraphError("the graph's statistics are not those of its features")
    if found.features == f"in:{found.inputs}":
        raise GraphError("its features are its samples, of which nothing is to be shared")
    needed = upstream(own, {own.loss}, found.features)
    if f"in:{found.inputs}" in needed:
        raise GraphError(
            f"its logits hang on samples past its features {found.features}: expected features "
            "that all goes by"
        )

    def drawn(arg: Arg) -> Arg:
        return Ref(f"in:{DRAWN}") if arg == Ref(found.features) else arg

    spec = own.spec[found.features]
    labels = next(i for i in own.inputs if i.name == found.labels)
    operators = tuple(
        op.mapped(drawn)
        for op in own.operators
        if {*op.values} & needed and found.features not in op.values
    )
    form = replace(
        own,
        inputs=(Input(DRAWN, spec), labels),
        operators=operators,
        parameters=tuple(p for p in own.parameters if f"param:{p.name}" in needed),
        buffers=tuple(replace(b, update=None) for b in buffers if f"buffer:{b.name}" in needed),
        metrics=(),
        state=(),
    )
    shape = tuple(d for d in spec.shape[1:] if isinstance(d, int))
    return AboveFeatures(form, found.labels, shape, found.classes)
