"""Further classes of a classifier, for labelled noise that it is trained on as well (VHL,
2206.02465): a graph transform at submission.

    features -> linear -> cross entropy
    features -> linear ----------+-> virtual_logits -> masked_logits -> cross entropy
             -> virtual_linear --+   all classes       the first C

In place of the linear there may be whatever makes logits of features (`classifier.py`). What the
graph computes stays what it was, to the bit, and so do the user's parameters and the
export (`Graph.state`). The further rows of the last linear are parameters of their own, which begin
at zero. A client trains what lies above the loss, on batches of samples and noise (`above_loss`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..ir.graph import Arg, Graph, GraphError, Operator, Output, Parameter, Ref, TensorSpec
from ..ir.infer import infer, with_grads
from .classifier import classifier_of, flat_width, upstream

__all__ = ["AboveLoss", "above_loss", "with_classes"]

_LINEAR = "aten.linear.default"
_FLAT, _ROWS, _ALL, _FIRST = "flat_features", "virtual_linear", "virtual_logits", "masked_logits"
WEIGHT, BIAS = "virtual_classes.weight", "virtual_classes.bias"


def with_classes(graph: Graph, count: int, *, features: str = "", logits: str = "") -> Graph:
    """Return a graph, unbound, with `count` further classes, which it masks. `features`, `logits`:
    as `classifier_of` takes them, and raises GraphError; so does this for names that are taken."""
    found = classifier_of(graph, features=features, logits=logits)
    specs = graph.spec
    taken = {p.name for p in graph.parameters} | {b.name for b in graph.buffers}
    taken |= {op.name for op in graph.operators}
    if clash := taken & {WEIGHT, BIAS, _FLAT, _ROWS, _ALL, _FIRST}:
        raise GraphError(f"the model has the name {min(clash)}: expected another one")
    at = graph.producer[found.logits]
    last = graph.operators[at]
    if last.returns_tuple:
        raise GraphError(f"its logits are {found.logits}, one of several results of {last.name}")
    width, batch = flat_width(graph, found.features), specs[found.logits].shape[0]
    rows = [Parameter(WEIGHT, TensorSpec((count, width), "float32"))]
    rows += [Parameter(BIAS, TensorSpec((count,), "float32"))][: found.biased]

    def made(name: str, target: str, args: tuple[Arg, ...], columns: int) -> Operator:
        spec = TensorSpec((batch, columns), "float32")
        return Operator(name, target, args, (), (Output(spec),), module=last.module)

    total, own = found.classes + count, tuple(Ref(f"param:{p.name}") for p in rows)
    inside, grown = found.features, list[Operator]()
    if len(specs[inside].shape) != 2:
        shape = (batch, width)
        grown.append(made(_FLAT, "aten.reshape.default", (Ref(inside), shape), width))
        inside = _FLAT
    grown += [
        made(_ROWS, _LINEAR, (Ref(inside), *own), count),
        made(_ALL, "aten.cat.default", ((Ref(last.name), Ref(_ROWS)), 1), total),
        made(_FIRST, "aten.slice.Tensor", (Ref(_ALL), 1, 0, found.classes), found.classes),
    ]
    below = (op.renamed({last.name: _FIRST}) for op in graph.operators[at + 1 :])
    made_of = replace(
        graph,
        parameters=(*graph.parameters, *rows),
        operators=(*graph.operators[: at + 1], *grown, *below),
    )
    return with_grads(made_of, infer(made_of.bind(2)))


@dataclass(frozen=True)
class AboveLoss:
    """A graph with further classes without what is made of its logits. features, logits: values,
    (batch, ...) and (batch, classes + further ones)."""

    graph: Graph
    inputs: str
    labels: str
    sample: tuple[int, ...]
    features: str
    logits: str
    classes: int
    further: int

    @property
    def reads(self) -> tuple[str, ...]:
        """What a loss of it reads."""
        return self.logits, self.features


def above_loss(graph: Graph, *, features: str = "", logits: str = "") -> AboveLoss:
    """Return what clients train of a graph that `with_classes` made with the same names. Raises
    GraphError for another one."""
    own, further = _without_classes(graph)
    found = classifier_of(own, features=features, logits=logits)
    again = with_classes(own, further, features=features, logits=logits)
    if again.operators != graph.operators:
        raise GraphError("the graph's virtual classes are not those of its classifier")
    statistics = {b.update.value for b in graph.buffers if b.update and b.update.value}
    needed = upstream(graph, {_ALL, found.features, *statistics})
    form = replace(
        graph,
        operators=tuple(op for op in graph.operators if needed & {*op.values}),
        loss=_ALL,
        metrics=(),
    )
    where = (found.inputs, found.labels, found.sample)
    return AboveLoss(form, *where, found.features, _ALL, found.classes, further)


def _without_classes(graph: Graph) -> tuple[Graph, int]:
    """Return the graph that `with_classes` got, and how many it was to make. Raises GraphError."""
    names = [op.name for op in graph.operators]
    rows = graph.spec.get(f"param:{WEIGHT}")
    count = rows.shape[0] if rows and rows.shape else 0
    first = _FLAT if _FLAT in names else _ROWS
    if first not in names[1:] or not isinstance(count, int) or count < 1:
        raise GraphError("the graph has no virtual classes: submit the job again")
    last = names[names.index(first) - 1]
    kept = (op for op in graph.operators if op.name not in (_FLAT, _ROWS, _ALL, _FIRST))
    own = replace(
        graph,
        operators=tuple(op.renamed({_FIRST: last}) for op in kept),
        parameters=tuple(p for p in graph.parameters if p.name not in (WEIGHT, BIAS)),
    )
    return own, count
