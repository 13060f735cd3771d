"""Finding the vocabulary head of a graph: a linear operator over a parameter of its own, and the
cross entropy that alone reads its logits. What it may be is what `vocabulary.py` can split."""

from __future__ import annotations

from dataclasses import dataclass

from ..ir.graph import Graph, GraphError, Operator, Ref
from ..ir.operators import aten

__all__ = ["LOWEST", "MEAN", "RESHAPE", "SUM", "Head", "find_head", "linear_args"]

_LOSS = "aten.cross_entropy_loss.default"
_LINEARS = {
    "aten.linear.default": ("input", "weight", "bias"),
    "shoal.int8_linear.default": ("x", "weight", "scale", "bias"),
}
"""With the names of their arguments; all but the first have a row for each output."""
_CAST = "aten._to_copy.default"
_SLICE = "aten.slice.Tensor"
RESHAPE = frozenset({"aten.reshape.default", "aten.view.default"})
_EACH = aten(
    "_to_copy alias clone contiguous mul.Tensor mul.Scalar div.Tensor div.Scalar neg tanh clamp",
    "to.dtype",
)
"""Operators that change each logit by itself, when they read nothing else."""

MEAN, SUM = 1, 2  # torch's numbers of reductions; 0 is none
LOWEST = {"float32": -3.4028234663852886e38, "float64": -1.7976931348623157e308}
"""A block whose logits are all -inf (padding words) has this maximum, so that -inf - m is -inf."""


@dataclass(frozen=True)
class Head:
    """Where the head of a graph is."""

    linear: Operator
    chain: tuple[Operator, ...]
    """What stands between the linear and the loss, in order."""
    loss: Operator
    weights: tuple[tuple[str, Operator | None], ...]
    """Names of the weight and, if any, the scale and the bias, each with the cast that it goes
    through."""
    target: str
    reduction: int
    ignore: int

    @property
    def logits(self) -> str:
        """The value that the loss reads."""
        return (self.linear, *self.chain)[-1].name

    @property
    def gone(self) -> frozenset[str]:
        """Names of the operators that the blocks replace; the loss is not among them."""
        casts = (cast.name for _, cast in self.weights if cast)
        return frozenset({self.linear.name, *(op.name for op in self.chain), *casts})


def find_head(graph: Graph) -> Head:
    """The head of a graph; raises GraphError with the reason why there is none to split."""
    if graph.operator_set != "full":
        raise GraphError("a head is split in the full form only, not for the core operator set")
    losses = [op for op in graph.operators if op.target == _LOSS and op.name in graph.spec]
    if len(losses) != 1:
        raise GraphError(f"the model has {len(losses)} cross entropies: expected one, over a head")
    (loss,) = losses
    logits, target = loss.arg(0, "self"), loss.arg(1, "target")
    reduction, ignore = loss.arg(3, "reduction", MEAN), loss.arg(4, "ignore_index", -100)
    if loss.arg(2, "weight") is not None:
        raise GraphError("its cross entropy has class weights: only an unweighted one is split")
    if loss.arg(5, "label_smoothing", 0.0):
        raise GraphError("its cross entropy smooths labels: only one without smoothing is split")
    if not isinstance(logits, Ref) or not isinstance(target, Ref):
        raise GraphError(f"{loss.name} does not read its logits and labels as tensors")
    if type(reduction) is not int or type(ignore) is not int:
        raise GraphError(f"{loss.name} has reduction {reduction!r}, ignored label {ignore!r}")
    spec, labels = graph.spec[logits.value], graph.spec[target.value]
    if len(spec.shape) != 2 or labels.shape != spec.shape[:1] or labels.dtype != "int64":
        raise GraphError(
            f"its cross entropy compares logits {spec!r} with labels {labels!r}: "
            "expected (tokens, words) and one int64 label for each token"
        )
    if spec.dtype not in LOWEST:
        raise GraphError(f"its logits reach the loss as {spec.dtype}: expected float32 or float64")

    chain: list[Operator] = []
    value = logits.value
    while True:
        op = graph.operators[graph.producer[value]] if value in graph.producer else loss
        if op.name != value or op is loss:
            raise GraphError(f"its logits are {value}: expected them from a linear operator")
        if _times_read(graph, value) != 1:
            raise GraphError(f"the logits {value} are read elsewhere, too: only the loss may")
        if op.target in _LINEARS:
            break
        _check_between(op, graph)
        chain.insert(0, op)
        value = op.reads[0]
    matrices = linear_args(op)[1:]
    weights = tuple(_weight(graph, op, ref) for ref in matrices)
    words = spec.shape[1]
    shapes = [graph.spec[f"param:{name}"].shape for name, _ in weights]
    flat = [len(shape) for shape in shapes] in ([2], [2, 1], [2, 2], [2, 2, 1])
    if not flat or {s[0] for s in shapes} != {words}:
        raise GraphError(f"the head's weights are {shapes} for {words} words: expected a row each")
    return Head(op, tuple(chain), loss, weights, target.value, reduction, ignore)


def _times_read(graph: Graph, value: str) -> int:
    """How often a value is read, by operators and as a result."""
    return len(graph.readers.get(value, ())) + (value in graph.results)


def _check_between(op: Operator, graph: Graph) -> None:
    """Raises GraphError unless the operator treats every word alike and keeps words last."""
    if len(op.reads) == 1 and op.args and isinstance(op.args[0], Ref) and not op.returns_tuple:
        before, after = graph.spec[op.reads[0]].shape, graph.spec[op.name].shape
        if op.target in _EACH and before == after:
            return
        if before and after and before[-1] == after[-1]:
            sizes = op.args[1] if len(op.args) > 1 else ()
            if op.target in RESHAPE and isinstance(sizes, tuple) and sizes:
                return
            axis = op.args[1] if len(op.args) > 1 else 0
            if op.target == _SLICE and type(axis) is int and axis not in (-1, len(before) - 1):
                return
    raise GraphError(
        f"{op.name} ({op.target}) stands between head and loss: "
        "expected reshapes, slices of tokens, casts and scales only"
    )


def linear_args(op: Operator) -> tuple[Ref, ...]:
    """The arguments of a linear operator: input, weight, scale where it has one, and bias, if there
    is one."""
    found = (op.arg(i, name) for i, name in enumerate(_LINEARS[op.target]))
    return tuple(a for a in found if isinstance(a, Ref))


def _weight(graph: Graph, linear: Operator, ref: Ref) -> tuple[str, Operator | None]:
    """The parameter behind an argument of the head, and the cast between them."""
    cast, value = None, ref.value
    if value in graph.producer:
        cast = graph.operators[graph.producer[value]]
        one = _times_read(graph, value) == len(cast.reads) == 1 and not cast.returns_tuple
        if cast.target != _CAST or not one:
            raise GraphError(
                f"the head's matrix is {value} ({cast.target}): expected a parameter of the model"
            )
        value = cast.reads[0]
    if not value.startswith("param:"):
        raise GraphError(f"the head's matrix is {value}: expected a parameter of the model")
    name = value.removeprefix("param:")
    if _times_read(graph, value) != 1:
        others = [graph.operators[i] for i in graph.readers[value]]
        others = [op for op in others if op not in (linear, cast)]
        lookup = any(op.target == "aten.embedding.default" for op in others)
        what = "the embedding" if lookup else "something else"
        names = ", ".join(op.name for op in others) or "its own head"
        raise GraphError(
            f"the head is tied to {what} ({name} is read by {names}, too): a matrix that "
            "is needed whole elsewhere is not split; place the first and the last stage accordingly"
        )
    return name, cast
