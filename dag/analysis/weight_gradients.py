"""Operators whose weights' gradients can wait, so that a stage's backward falls into two halves.

    input half    gradients of what the stage received: what other stages wait for
    weight half   gradients of its parameters: nobody waits for them until the step ends

A *weight* here is a trained parameter, or a value made of such, buffers and constants alone (a
transposed matrix, a sum of a matrix and an adapter). The gradient of a weight can wait where an
operator that reads it beside data

- is one of `SPLIT`: torch computes the two halves of its gradient apart, so that the weight half
  needs the gradient of its result, and what `keeps` names, and costs nothing twice; or
- reads nothing else that a gradient goes to (an embedding, the first convolution of a picture):
  then all of its backward can wait.

Weights that one operator reads together, or that one is made of another, wait together or not at
all. They do not wait where an operator of another kind reads one of them (attention with a learned
bias, a recurrent layer), where one leaves the stage, where several operators read one of them that
something else is made of and the order of their sum would change, or where dtypes are mixed.
Gradients that do not wait are computed in the input half, as in an undivided backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..ir.graph import Graph, Operator, Ref, refs
from ..ir.operators import aten

__all__ = ["SPLIT", "WeightGradient", "WeightGradients", "splittable", "weight_gradients"]

_BOTH = (0, 1)

SPLIT: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(aten("linear convolution conv1d conv2d conv3d"), (1, 2)),
    **dict.fromkeys(aten("conv_transpose1d conv_transpose2d.input conv_transpose3d.input"), (1, 2)),
    **dict.fromkeys(aten("addmm"), (0, 2)),
    **dict.fromkeys(aten("mm matmul"), (1,)),
    **dict.fromkeys(aten("layer_norm native_layer_norm"), (2, 3)),
    **dict.fromkeys(aten("_native_batch_norm_legit_no_training"), (1, 2)),
    **dict.fromkeys(aten("rms_norm _fused_rms_norm"), (2,)),
    **dict.fromkeys(aten("mul.Tensor add.Tensor"), _BOTH),
}
"""By operator, the positions of arguments that may be weights whose gradients wait. Batch norms by
the statistics of a microbatch and group norms are none: the gradient of their input is made of the
sums that the weights' are, which would be computed twice."""


@dataclass(frozen=True, slots=True)
class WeightGradient:
    """An operator whose weights' gradients wait."""

    index: int
    """Of the operator in its graph."""
    weights: tuple[tuple[int, str], ...]
    """(position of the argument, value) of each weight that it reads and a gradient goes to;
    where its backward waits as a whole, (place, value)."""
    keeps: tuple[str, ...]
    """Values that must be there until then, beside the weights."""
    whole: bool
    """Whether all of its backward waits, as nothing else takes a gradient from it."""
    direct: bool
    """Whether its weights are parameters that only operators of `SPLIT` read, beside data."""


def splittable(graph: Graph, op: Operator, weights: Sequence[int]) -> bool:
    """Whether the gradients of the arguments at these positions can be computed apart."""
    allowed = SPLIT.get(op.target)
    if allowed is None or op.kwargs or not set(weights) <= set(allowed):
        return False
    spec = graph.spec
    if any(o.grad for o in op.outputs[1:]):
        return False
    read = [spec[v] for v in op.reads if v in spec]
    if len({s.dtype for s in read if s.is_floating} | {spec[op.values[0]].dtype}) != 1:
        return False
    ranks = [len(spec[a.value].shape) if isinstance(a, Ref) else 0 for a in op.args]
    match op.target.split(".")[1]:
        case "linear":
            return ranks[0] >= 2 and ranks[1] == 2
        case "matmul":
            return ranks[0] >= 2 and ranks[1] == 2
        case "mul" | "add":
            return len(weights) == 1
        case "rms_norm" | "_fused_rms_norm":  # others are cast on the way (on a CPU)
            return spec[op.values[0]].dtype in ("float32", "float64")
        case "convolution":
            return ranks[0] == ranks[1]  # with a batch
        case name if name.startswith("conv"):
            return ranks[0] == ranks[1] and not any(isinstance(a, str) for a in op.args)
        case _:
            return True


@dataclass(frozen=True, slots=True)
class WeightGradients:
    """What waits of an interval's backward."""

    operators: tuple[WeightGradient, ...] = ()
    """In the order of the graph."""
    parameters: frozenset[str] = frozenset()
    """Values of the parameters whose gradients wait."""
    makers: tuple[int, ...] = ()
    """Operators that make one weight of others, and whose backward waits as well."""


def weight_gradients(
    graph: Graph, start: int, stop: int, roots: Collection[str]
) -> WeightGradients:
    """What waits of the backward of operators [start, stop). `roots`: values made there that
    gradients start from or come back for."""
    found = _Weights(graph, start, stop)
    waits = found.waiting(roots)
    operators = tuple(
        WeightGradient(
            i, weights, _kept(graph.operators[i], weights), whole, found.is_direct(weights)
        )
        for i, (weights, whole) in found.readers.items()
        if weights and all(found.group(value) in waits for _, value in weights)
    )
    read = {found.group(value) for w in operators for _, value in w.weights}
    parameters = (f"param:{p.name}" for p in graph.parameters if p.trainable)
    return WeightGradients(
        operators,
        frozenset(value for value in parameters if found.group(value) in read),
        tuple(i for i, value in found.makers.items() if found.group(value) in read),
    )


def _kept(op: Operator, weights: Sequence[tuple[int, str]]) -> tuple[str, ...]:
    """The values that its rule needs (`dag/execute/weight_half.py`): its data, or nothing."""
    if op.target == "aten.add.Tensor":
        return ()
    mine = {value for _, value in weights}
    data = op.args[:2] if op.target in ("aten.addmm.default", "aten.mul.Tensor") else op.args[:1]
    return tuple(v for a in data for v in refs(a) if v not in mine)


class _Weights:
    """The weights of an interval, in groups that wait together, and the operators that read them
    beside data."""

    def __init__(self, graph: Graph, start: int, stop: int) -> None:
        self._graph = graph
        self._parent: dict[str, str] = {
            f"param:{p.name}": f"param:{p.name}" for p in graph.parameters if p.trainable
        }
        made = {v for op in graph.operators[start:stop] for v in op.values}
        self._data: set[str] = set()
        self._flows: set[str] = set()  # data that a gradient goes to
        self._uses: Counter[str] = Counter()
        self._mixed: set[str] = set()  # weights whose gradients, too, come through autograd
        self.readers: dict[int, tuple[tuple[tuple[int, str], ...], bool]] = {}
        """By operator that reads weights beside data: which, and whether its backward is whole."""
        self.makers: dict[int, str] = {}
        """By operator that makes weights: one of them."""
        for i in range(start, stop):
            op = graph.operators[i]
            for value in op.reads:
                if value not in made and not value.startswith(("param:", "buffer:")):
                    self._data.add(value)
                    if value in graph.grads:
                        self._flows.add(value)
            self._enter(i, op)

    def _enter(self, i: int, op: Operator) -> None:
        weights = [v for v in op.reads if v in self._parent]
        data = self._data.intersection(op.reads)
        flowing = [
            v
            for v, o in zip(op.values, op.outputs, strict=True)
            if o.grad and (weights or data & self._flows)
        ]
        if data:
            self._data.update(op.values)
            self._flows.update(flowing)
        if not weights or not flowing:
            return
        self._uses.update(weights)
        if not data:
            self.makers[i] = weights[0]
            self._mixed.update(weights)
            for value in flowing:
                self._parent[value] = value
                self._mixed.add(value)
        self._join([*weights, *(flowing if not data else ())])
        if data:
            placed = [(at, a.value) for at, a in enumerate(op.args) if isinstance(a, Ref)]
            whole = data.isdisjoint(self._flows)
            if whole:
                self._mixed.update(weights)
                placed = list(enumerate(weights))
            self.readers[i] = tuple(p for p in placed if p[1] in weights), whole

    def _join(self, values: Sequence[str]) -> None:
        for value in values[1:]:
            self._parent[self.group(value)] = self.group(values[0])

    def group(self, value: str) -> str:
        while self._parent[value] != value:
            value = self._parent[value]
        return value

    def waiting(self, roots: Collection[str]) -> set[str]:
        """The groups whose gradients wait."""
        never = {self.group(v) for v in self._stopping(roots)}
        return {self.group(v) for v in self._parent} - never

    def is_direct(self, weights: Sequence[tuple[int, str]]) -> bool:
        return self.group(weights[0][1]) not in {self.group(v) for v in self._mixed}

    def _stopping(self, roots: Collection[str]) -> Iterator[str]:
        """Weights that keep their group from waiting."""
        yield from (v for v in roots if v in self._parent)
        for i, (weights, whole) in self.readers.items():
            op = self._graph.operators[i]
            read = [v for v in op.reads if v in self._parent]
            apart = splittable(self._graph, op, [at for at, _ in weights])
            if not whole and (not apart or sorted(read) != sorted(v for _, v in weights)):
                yield from read
        yield from (v for v in self._mixed if self._uses[v] > 2)
