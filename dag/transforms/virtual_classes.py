"""Further classes of a classifier, for labelled noise that it is trained on as well (VHL,
2206.02465): a graph transform at submission.

    features -> linear -> cross entropy
    features -> linear ----------+-> virtual_logits -> masked_logits -> cross entropy
             -> virtual_linear --+   all classes       the first C

What the graph computes stays what it was, to the bit, and so do the user's parameters and the
export (`Graph.state`). The further rows of the last linear are parameters of their own, which begin
at zero. A client trains what lies above the loss, on batches of samples and noise (`above_loss`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..ir.graph import Arg, Graph, GraphError, Operator, Output, Parameter, Ref, TensorSpec
from ..ir.infer import infer, with_grads
from .head import linear_args
from .simplify import renamed

__all__ = ["AboveLoss", "Classifier", "above_loss", "classifier_of", "with_classes"]

_LOSS, _LINEAR = "aten.cross_entropy_loss.default", "aten.linear.default"
_PLAIN: tuple[Arg, ...] = (None, 1, -100, 0.0)
"""Class weights, reduction (the mean), the ignored label and smoothing of a plain cross entropy."""
_ROWS, _ALL, _FIRST = "virtual_linear", "virtual_logits", "masked_logits"
WEIGHT, BIAS = "virtual_classes.weight", "virtual_classes.bias"


@dataclass(frozen=True, slots=True)
class Classifier:
    """Where a model tells classes apart. inputs, labels: names of inputs. sample: shape of one."""

    linear: Operator
    inputs: str
    labels: str
    sample: tuple[int, ...]
    classes: int


def classifier_of(graph: Graph) -> Classifier:
    """Return the linear whose results are a graph's logits. Raises GraphError, with the reason, for
    a graph that is not a classifier without doubt: one input in floating point, and one plain cross
    entropy of labels over one linear, which is the loss."""
    losses = [op for op in graph.operators if op.target == _LOSS]
    if len(losses) != 1 or graph.loss != losses[0].name:
        raise GraphError(
            f"the model has {len(losses)} cross entropies, and its loss is {graph.loss}: expected "
            "one, which is the loss"
        )
    if graph.weight:
        raise GraphError(f"the model weighs its losses by {graph.weight}: expected a plain mean")
    (loss,) = losses
    names = ("weight", "reduction", "ignore_index", "label_smoothing")
    given = dict(zip(names, _PLAIN, strict=True)) | dict(zip(names, loss.args[2:], strict=False))
    given |= {k: v for k, v in loss.kwargs if k in names}
    if tuple(given.values()) != _PLAIN:
        raise GraphError(
            "its cross entropy has class weights, a reduction, an ignored label or smoothing: "
            "expected a plain one"
        )
    logits, labels = loss.reads
    linear = graph.operators[graph.producer[logits]] if logits in graph.producer else loss
    if linear.target != _LINEAR:
        raise GraphError(f"its logits are {logits}, of {linear.target}: expected those of a linear")
    return _checked(graph, linear, labels.removeprefix("in:"))


def _checked(graph: Graph, linear: Operator, labels: str) -> Classifier:
    specs = graph.spec
    shape = specs[linear.name].shape
    others = [i for i in graph.inputs if i.name != labels]
    if len(shape) != 2 or f"in:{labels}" not in specs or specs[f"in:{labels}"].dtype != "int64":
        raise GraphError(f"its logits are {specs[linear.name]!r}: expected one label for a sample")
    if len(others) != 1 or others[0].spec.dtype != "float32":
        raise GraphError(f"its inputs are {others!r}: expected one beside labels, in float32")
    kinds = {specs[a.value].dtype for a in linear_args(linear)}
    if kinds != {"float32"}:
        raise GraphError(f"its last linear is of {', '.join(sorted(kinds))}: expected float32")
    sample, classes = others[0].spec.shape[1:], shape[1]
    assert isinstance(classes, int)
    sizes = tuple(d for d in sample if isinstance(d, int))
    if not sizes or len(sizes) != len(sample):
        raise GraphError(f"its samples are {others[0].spec!r}: expected each of one shape")
    return Classifier(linear, others[0].name, labels, sizes, classes)


def with_classes(graph: Graph, count: int) -> Graph:
    """Return a graph, unbound, with `count` further classes, which it masks. Raises GraphError as
    `classifier_of` does, and for names that are taken."""
    found = classifier_of(graph)
    linear, specs = found.linear, graph.spec
    taken = {p.name for p in graph.parameters} | {b.name for b in graph.buffers}
    taken |= {op.name for op in graph.operators}
    if clash := taken & {WEIGHT, BIAS, _ROWS, _ALL, _FIRST}:
        raise GraphError(f"the model has the name {min(clash)}: expected another one")
    features, *weights = linear_args(linear)
    width = specs[weights[0].value].shape[1]
    batch = specs[linear.name].shape[0]
    rows = [Parameter(WEIGHT, TensorSpec((count, width), "float32"))]
    rows += [Parameter(BIAS, TensorSpec((count,), "float32"))][: len(weights) - 1]

    def made(name: str, target: str, args: tuple[Arg, ...], classes: int) -> Operator:
        spec = TensorSpec((batch, classes), "float32")
        return Operator(name, target, args, (), (Output(spec),), module=linear.module)

    total = found.classes + count
    own = tuple(Ref(f"param:{p.name}") for p in rows)
    grown = (
        made(_ROWS, _LINEAR, (features, *own), count),
        made(_ALL, "aten.cat.default", ((Ref(linear.name), Ref(_ROWS)), 1), total),
        made(_FIRST, "aten.slice.Tensor", (Ref(_ALL), 1, 0, found.classes), found.classes),
    )
    at = graph.producer[linear.name] + 1
    below = (renamed(op, {linear.name: _FIRST}) for op in graph.operators[at:])
    made_of = replace(
        graph,
        parameters=(*graph.parameters, *rows),
        operators=(*graph.operators[:at], *grown, *below),
    )
    return with_grads(made_of, infer(made_of.bind(2)))


@dataclass(frozen=True)
class AboveLoss:
    """A graph with further classes without what is made of its logits. features, logits: values,
    (batch, width) and (batch, classes + further ones)."""

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


def above_loss(graph: Graph) -> AboveLoss:
    """Return what clients train of a graph that `with_classes` made. Raises GraphError for another
    one."""
    own, further = _without_classes(graph)
    found = classifier_of(own)
    if with_classes(own, further).operators != graph.operators:
        raise GraphError("the graph's virtual classes are not those of its classifier")
    features = linear_args(found.linear)[0].value
    statistics = {b.update.value for b in graph.buffers if b.update and b.update.value}
    needed = _needed(graph, {_ALL, features, *statistics})
    form = replace(
        graph,
        operators=tuple(op for op in graph.operators if needed(op)),
        loss=_ALL,
        metrics=(),
    )
    where = (found.inputs, found.labels, found.sample)
    return AboveLoss(form, *where, features, _ALL, found.classes, further)


def _without_classes(graph: Graph) -> tuple[Graph, int]:
    """Return the graph that `with_classes` got, and how many it was to make. Raises GraphError."""
    names = [op.name for op in graph.operators]
    rows = graph.spec.get(f"param:{WEIGHT}")
    count = rows.shape[0] if rows and rows.shape else 0
    if _ROWS not in names[1:] or not isinstance(count, int) or count < 1:
        raise GraphError("the graph has no virtual classes: submit the job again")
    linear = names[names.index(_ROWS) - 1]
    kept = (op for op in graph.operators if op.name not in (_ROWS, _ALL, _FIRST))
    own = replace(
        graph,
        operators=tuple(renamed(op, {_FIRST: linear}) for op in kept),
        parameters=tuple(p for p in graph.parameters if p.name not in (WEIGHT, BIAS)),
    )
    return own, count


def _needed(graph: Graph, wanted: set[str]) -> Callable[[Operator], bool]:
    found = set(wanted)
    for op in reversed(graph.operators):
        if found & {*op.values}:
            found |= {*op.reads}
    return lambda op: bool(found & {*op.values})
