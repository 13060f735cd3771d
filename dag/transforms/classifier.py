"""Where a graph tells classes apart: its features, its logits and the labels they are judged by.

Without names, logits are the results of the linear that the loss is a cross entropy of, and
features are what that linear reads. A job may name the modules that give them in place of that.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..ir.graph import Arg, Graph, GraphError, Operator
from .head import linear_args

__all__ = ["Classifier", "classifier_of", "flat_width", "upstream", "value_of"]

_LOSS, _LINEAR = "aten.cross_entropy_loss.default", "aten.linear.default"
_NLL, _LOGARITHM = "aten.nll_loss_nd.default", "aten.log_softmax.int"
_PLAIN: tuple[Arg, ...] = (None, 1, -100, 0.0)
"""Class weights, reduction (the mean), the ignored label and smoothing of a plain cross entropy."""


@dataclass(frozen=True, slots=True)
class Classifier:
    """Where a model tells classes apart. features, logits: values, (batch, ...) and (batch,
    classes). inputs, labels: names of inputs. sample: shape of one. biased: whether logits are
    anything but a linear without a bias of features that nobody named."""

    features: str
    logits: str
    inputs: str
    labels: str
    sample: tuple[int, ...]
    classes: int
    biased: bool


def classifier_of(graph: Graph, *, features: str = "", logits: str = "") -> Classifier:
    """Return where a graph tells classes apart. `features`, `logits`: names of modules; empty: as
    the module's docstring has it. Raises GraphError, with the reason, for a graph that is not a
    classifier without doubt: one input in floating point, and one plain cross entropy, which is the
    loss, of labels over such logits, which are made of such features."""
    found, labels = _judged(graph)
    if logits and (named := value_of(graph, logits)) != found:
        raise GraphError(
            f'its logits "{logits}" are {named}, and its cross entropy is of {found}: expected one '
            "of the other"
        )
    linear = graph.operators[graph.producer[found]] if found in graph.producer else None
    if linear is None or (linear.target != _LINEAR and not logits):
        made = linear.target if linear else "the data"
        raise GraphError(
            f"its logits are {found}, of {made}: expected those of a linear, or the names of the "
            "modules that give features and logits"
        )
    inside = ""
    if features:
        inside = value_of(graph, features)
    elif linear.target == _LINEAR:
        inside = linear_args(linear)[0].value
    else:
        raise GraphError(f"its logits are {found}, of no linear: expected the name of features")
    bare = not features and len(linear_args(linear)) == 2
    return _checked(graph, inside, found, labels.removeprefix("in:"), not bare)


def _judged(graph: Graph) -> tuple[str, str]:
    """Return the values of logits and of labels that the loss compares. Raises GraphError."""
    losses = [op for op in graph.operators if op.target in (_LOSS, _NLL)]
    if len(losses) != 1 or graph.loss != losses[0].name:
        raise GraphError(
            f"the model has {len(losses)} cross entropies, and its loss is {graph.loss}: expected "
            "one, which is the loss"
        )
    if graph.weight:
        raise GraphError(f"the model weighs its losses by {graph.weight}: expected a plain mean")
    (loss,) = losses
    plain = _PLAIN if loss.target == _LOSS else _PLAIN[:3]
    names = ("weight", "reduction", "ignore_index", "label_smoothing")
    given = zip(range(2, 2 + len(plain)), names, plain, strict=False)
    if tuple(loss.arg(*one) for one in given) != plain:
        raise GraphError(
            "its cross entropy has class weights, a reduction, an ignored label or smoothing: "
            "expected a plain one"
        )
    logits, labels = loss.reads
    if loss.target == _NLL:
        logarithm = graph.operators[graph.producer[logits]] if logits in graph.producer else loss
        if logarithm.target != _LOGARITHM or logarithm.args[1] not in (1, -1):
            raise GraphError(f"its loss is of {logits}: expected logarithms of a softmax")
        (logits,) = logarithm.reads
    return logits, labels


def _checked(graph: Graph, features: str, logits: str, labels: str, biased: bool) -> Classifier:
    specs = graph.spec
    shape = specs[logits].shape
    others = [i for i in graph.inputs if i.name != labels]
    if len(shape) != 2 or f"in:{labels}" not in specs or specs[f"in:{labels}"].dtype != "int64":
        raise GraphError(f"its logits are {specs[logits]!r}: expected one label for a sample")
    if len(others) != 1 or others[0].spec.dtype != "float32":
        raise GraphError(f"its inputs are {others!r}: expected one beside labels, in float32")
    inside = specs[features]
    if (specs[logits].dtype, inside.dtype) != ("float32", "float32"):
        raise GraphError(f"its features are {inside!r}, its logits {specs[logits]!r}: not float32")
    if inside.shape[:1] != shape[:1] or not all(isinstance(d, int) for d in inside.shape[1:]):
        raise GraphError(f"its features are {inside!r}: expected some of each sample")
    if features == logits or features not in upstream(graph, {logits}):
        raise GraphError(f"its logits {logits} do not hang on its features {features}")
    sample, classes = others[0].spec.shape[1:], shape[1]
    assert isinstance(classes, int)
    sizes = tuple(d for d in sample if isinstance(d, int))
    if not sizes or len(sizes) != len(sample):
        raise GraphError(f"its samples are {others[0].spec!r}: expected each of one shape")
    return Classifier(features, logits, others[0].name, labels, sizes, classes, biased)


def value_of(graph: Graph, module: str) -> str:
    """Return the value that a module gives: the only one made in it that is read elsewhere. Raises
    GraphError where there is none, or another as well."""
    inside = [op for op in graph.operators if _within(op, module)]
    if not inside:
        names = sorted({op.module for op in graph.operators if op.module})
        raise GraphError(
            f'it has no module "{module}" that computes anything: expected one of '
            f"{', '.join(names[:20])}"
        )
    made = {value for op in inside for value in op.values}
    read = {v for op in graph.operators if not _within(op, module) for v in op.reads}
    results = {graph.loss, graph.weight, *(v for _, v in graph.metrics)}
    given = sorted(made & (read | results))
    if len(given) != 1:
        raise GraphError(
            f'its module "{module}" gives {", ".join(given) or "nothing"}: expected one value, of '
            "a module that is called once"
        )
    return given[0]


def _within(op: Operator, module: str) -> bool:
    return op.module == module or op.module.startswith(f"{module}.")


def upstream(graph: Graph, wanted: set[str], stop: str = "") -> set[str]:
    """Return the values that some hang on, themselves included; none that only `stop` hangs on."""
    found = set(wanted)
    for op in reversed(graph.operators):
        made = found.intersection(op.values) - {stop}
        if made:
            found |= {*op.reads}
    return found


def flat_width(graph: Graph, value: str) -> int:
    """Return how many numbers of each sample are in a value (batch, ...)."""
    width = 1
    for size in graph.spec[value].shape[1:]:
        assert isinstance(size, int)
        width *= size
    return width
