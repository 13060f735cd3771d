"""What each operator costs, from shapes alone: every operator runs once on fake tensors, forward
and backward (`trial.py`), and nothing is computed.

    forward(op)     = Σ over the ATen operators that it becomes, each in its class of Work:
                        2·m·n·k FLOPs for matrix products, convolution and attention likewise
                          (formulas of torch.utils.flop_counter; attention counts the full square),
                        0 for views,
                        bytes read and written for others (they wait for memory; those that compute
                          a function per element are a class of their own),
                        and one call each
    backward        = the same sum over what autograd runs for the gradients that are needed
    flops_forward   = one number for it: a byte counts FLOPS_PER_BYTE; flops_backward likewise
    saves(op)       = the storages that autograd keeps from its forward to its backward;
                      parameters, buffers, data not counted
    parameter_bytes = bytes of the parameters that it is the first to read

In an interval, parameters and storages count once (`stage_cost`); a value that two stages keep is
memory in both. Equal operators on equal layouts are tried once, also those of different graphs (a
model of 80 layers and its forms with a split head have some 80 different ones), and the newest
MOST_TRIALS are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ..ir.graph import Graph, Operator, Ref
from ..ir.operators import takes_key
from ..ir.rules.rules import check_graph
from .speed import FLOPS_PER_BYTE, Work
from .trial import Lies, Like, Trial, trial

__all__ = ["FLOPS_PER_BYTE", "OperatorCost", "StageCost", "cost", "stage_cost"]


MOST_TRIALS = 4096
"""Some kilobytes each."""
_TRIALS: dict[tuple[Any, ...], Trial] = {}
"""By what decides a trial: target, arguments, results, layouts of what is read."""


@dataclass(frozen=True, slots=True)
class _Cost:
    """Work for one microbatch."""

    forward: Work
    backward: Work

    @property
    def flops_forward(self) -> int:
        return int(self.forward.flops)

    @property
    def flops_backward(self) -> int:
        return int(self.backward.flops)


@dataclass(frozen=True, slots=True)
class OperatorCost(_Cost):
    """Cost of one operator for one microbatch; the formulas are in the module's docstring."""

    parameter_bytes: int
    output_bytes: int
    """Sum of the sizes of its results, views included: what would cross a cut behind it."""
    reads: tuple[tuple[str, int], ...] = ()
    """Parameters and buffers that it reads, by value name, with their bytes."""
    saves: tuple[tuple[int, int], ...] = ()
    """Storages that it keeps for its backward: (number in the graph, bytes)."""
    makes: tuple[tuple[int, int], ...] = ()
    """By result, the storage that it lies in: (number in the graph, bytes of the whole storage);
    -1 for a result that is absent or lies in a parameter, a buffer or data."""
    peak_forward: int = 0
    """Most bytes that its kernels' results take at once, what it returns included."""
    peak_backward: int = 0
    """The same in its backward, the gradients that it gives included."""


@dataclass(frozen=True, slots=True)
class StageCost(_Cost):
    """Cost of an interval of operators for one microbatch; bytes of shared things count once."""

    parameter_bytes: int


def cost(graph: Graph) -> tuple[OperatorCost, ...]:
    """The cost of every operator of a bound graph, in its order; found once for a graph.
    Raises GraphError for one that breaks a rule (dag/ir/rules/rules.py)."""
    assert graph.batch is not None, "costs are those of a bound graph"
    if "costs" not in graph.found:
        check_graph(graph)
        ledger = _Ledger(graph)
        # Constants that random operators keep between calls may be real tensors.
        with FakeTensorMode(allow_non_fake_inputs=True):
            graph.found["costs"] = tuple(ledger.enter(op) for op in graph.operators)
    costs: tuple[OperatorCost, ...] = graph.found["costs"]
    return costs


def stage_cost(costs: Sequence[OperatorCost], start: int, stop: int) -> StageCost:
    """Cost of operators [start, stop)."""
    part = costs[start:stop]
    reads = dict(item for c in part for item in c.reads)
    return StageCost(
        sum((c.forward for c in part), Work()),
        sum((c.backward for c in part), Work()),
        sum(size for value, size in reads.items() if value.startswith("param:")),
    )


class _Ledger:
    """Puts the trials together: gives storages numbers across operators, and counts each thing at
    the first operator that needs it."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._trainable = frozenset(f"param:{p.name}" for p in graph.parameters if p.trainable)
        self._like: dict[str, Like] = {}
        self._storage: dict[str, int | None] = {}  # None: not counted (parameters, buffers, data)
        self._bytes: list[int] = []  # by number of the storage
        self._counted_parameters: set[str] = set()

    def enter(self, op: Operator) -> OperatorCost:
        reads = op.reads
        for value in reads:
            if value not in self._like:
                self._like[value] = self._outside(value)
                self._storage[value] = None
        found = self._trial(op)
        made: list[int | None] = []
        for value, output, lies in zip(op.values, op.outputs, found.outputs, strict=True):
            made.append(None)
            if lies is not None and output.spec is not None:
                made[-1] = self._place(lies, reads, made)
                self._storage[value] = made[-1]
                spec = output.spec
                self._like[value] = Like(spec.sizes, lies.strides, spec.dtype, output.grad)
        numbers = dict.fromkeys(self._place(lies, reads, made) for lies in found.saved)
        saves = {n: self._bytes[n] for n in numbers if n is not None}
        outside = {
            v: self._graph.spec[v].size_bytes for v in reads if v.startswith(("param:", "buffer:"))
        }
        parameters = {v for v in outside if v.startswith("param:")} - self._counted_parameters
        self._counted_parameters |= parameters
        return OperatorCost(
            found.forward,
            found.backward,
            sum(outside[v] for v in parameters),
            sum(o.spec.size_bytes for o in op.outputs if o.spec),
            tuple(outside.items()),
            tuple(saves.items()),
            tuple((-1, 0) if n is None else (n, self._bytes[n]) for n in made),
            found.peak_forward,
            found.peak_backward,
        )

    def _outside(self, value: str) -> Like:
        """What comes from outside the graph is contiguous."""
        spec = self._graph.spec[value]
        strides = torch.empty(spec.sizes).stride()
        grad = value in self._trainable
        return Like(spec.sizes, strides, spec.dtype, grad, parameter=grad)

    def _trial(self, op: Operator) -> Trial:
        place = {value: i for i, value in enumerate(op.reads)}
        likes = tuple(self._like[value] for value in op.reads)
        args = op.args[:-1] if takes_key(op.target) else op.args  # its number changes no cost
        key = (op.target, _placed(args, place), _placed(op.kwargs, place), op.outputs, likes)
        found = _TRIALS.pop(key, None) or trial(op, likes)
        _TRIALS[key] = found  # the newest at the end
        if len(_TRIALS) > MOST_TRIALS:
            _TRIALS.pop(next(iter(_TRIALS)), None)
        return found

    def _place(self, lies: Lies, reads: Sequence[str], made: Sequence[int | None]) -> int | None:
        """The number of a storage; a new one unless it is that of an input or of a result."""
        if lies.input is not None:
            return self._storage[reads[lies.input]]
        if lies.output is not None and lies.output < len(made) and made[lies.output] is not None:
            return made[lies.output]
        self._bytes.append(lies.bytes)
        return len(self._bytes) - 1


def _placed(arg: Any, place: dict[str, int]) -> Any:
    """An argument as a key: values by their place among those read, numbers with their type."""
    match arg:
        case tuple():
            return tuple(_placed(item, place) for item in arg)
        case Ref(value):
            return (Ref, place[value])
        case _:
            return (type(arg), arg)  # 1, 1.0 and True are three things
