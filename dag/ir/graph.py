"""The graph: a model as data (docs/architecture.md, "Two planes").

Values have names. What an operator returns is `NAME`, or `NAME.0`, `NAME.1`, … where it returns a
tuple. What comes from outside carries its kind before a colon: `in:x` (data), `param:emb.weight`,
`buffer:bn.running_mean`. Sizes that depend on the microbatch size b are `Size(times, plus)`, that
is times·b + plus; `Graph.bind(b)` turns every one of them into a plain integer, so that nothing
symbolic ever reaches a stage or a link.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeVar

__all__ = [
    "Arg",
    "Buffer",
    "BufferUpdate",
    "Device",
    "Dim",
    "Dtype",
    "Graph",
    "GraphError",
    "Input",
    "Lowered",
    "MemoryFormat",
    "Operator",
    "OperatorSet",
    "Output",
    "Parameter",
    "Ref",
    "Size",
    "TensorSpec",
]

OperatorSet = Literal["full", "core"]
T = TypeVar("T")

ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
}
"""Bytes of one element by dtype name (the names of torch, without `torch.`)."""

FLOATING = frozenset({"float16", "bfloat16", "float32", "float64"})


class GraphError(ValueError):
    """A graph that breaks a rule of this module; the message names the operator and the rule."""


@dataclass(frozen=True, slots=True)
class Size:
    """times·b + plus, for microbatch size b."""

    times: int
    plus: int = 0

    def bind(self, batch: int) -> int:
        return self.times * batch + self.plus

    def __repr__(self) -> str:
        times = "b" if self.times == 1 else f"{self.times}b"
        return times if self.plus == 0 else f"{times}{self.plus:+d}"


Dim = int | Size


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of one tensor; the dtype is torch's name without `torch.`."""

    shape: tuple[Dim, ...]
    dtype: str

    def bind(self, batch: int) -> TensorSpec:
        return TensorSpec(
            tuple(d.bind(batch) if isinstance(d, Size) else d for d in self.shape), self.dtype
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape of a bound spec; raises GraphError while it still depends on b."""
        if any(isinstance(d, Size) for d in self.shape):
            raise GraphError(f"spec {self!r} still depends on the microbatch size: bind it first")
        return self.shape  # type: ignore[return-value]  # checked one line above

    @property
    def elements(self) -> int:
        return math.prod(self.sizes)

    @property
    def size_bytes(self) -> int:
        return self.elements * ITEM_BYTES[self.dtype]

    @property
    def is_floating(self) -> bool:
        return self.dtype in FLOATING

    def __repr__(self) -> str:
        return f"{self.dtype}[{', '.join(str(d) for d in self.shape)}]"


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument that is a value of the graph."""

    value: str

    def __repr__(self) -> str:
        return f"%{self.value}"


@dataclass(frozen=True, slots=True)
class Dtype:
    """An argument that is a dtype, e.g. Dtype("float32")."""

    name: str

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class MemoryFormat:
    """An argument that is a memory format, e.g. MemoryFormat("contiguous_format")."""

    name: str

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Device:
    """An argument that is a device: always the one of the holder that runs the operator."""

    def __repr__(self) -> str:
        return "device"


Arg = (
    None | bool | int | float | str | Size | Ref | Dtype | MemoryFormat | Device | tuple["Arg", ...]
)
"""What an operator's argument may be; lists are tuples."""


def refs(arg: Arg) -> Iterator[str]:
    """Names of the values in an argument, in order, repeated ones too."""
    if isinstance(arg, Ref):
        yield arg.value
    elif isinstance(arg, tuple):
        for item in arg:
            yield from refs(item)


def map_arg(arg: Arg, change: Callable[[Arg], Arg]) -> Arg:
    """The argument with `change` applied to every leaf."""
    if isinstance(arg, tuple):
        return tuple(map_arg(item, change) for item in arg)
    return change(arg)


@dataclass(frozen=True, slots=True)
class Output:
    """One result of an operator. `grad`: whether a gradient of the loss can flow back through it
    (it is floating, something trainable is above it, the loss is below it)."""

    spec: TensorSpec | None
    grad: bool = False


@dataclass(frozen=True, slots=True)
class Operator:
    """One node. `target` is `namespace.name.overload`; `module` the path of the submodule that
    called it in the user's model (empty: the model itself)."""

    name: str
    target: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    outputs: tuple[Output, ...]
    returns_tuple: bool = False
    module: str = ""

    @property
    def values(self) -> tuple[str, ...]:
        """Value names of the outputs, in order."""
        if not self.returns_tuple:
            return (self.name,)
        return tuple(f"{self.name}.{i}" for i in range(len(self.outputs)))

    @property
    def mentions(self) -> list[str]:
        """Names of the values in its arguments, in order, repeated ones too."""
        return [v for a in (*self.args, *(a for _, a in self.kwargs)) for v in refs(a)]

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the values that it reads, each once, in order of first use."""
        return tuple(dict.fromkeys(self.mentions))

    def arg(self, index: int, name: str, default: Arg = None) -> Any:
        """Return the argument at a place, or that keyword."""
        return self.args[index] if index < len(self.args) else dict(self.kwargs).get(name, default)

    def mapped(self, change: Callable[[Arg], Arg]) -> Operator:
        """The operator with `change` applied to every leaf of its arguments."""
        args = tuple(map_arg(a, change) for a in self.args)
        return replace(
            self, args=args, kwargs=tuple((k, map_arg(a, change)) for k, a in self.kwargs)
        )

    def renamed(self, names: Mapping[str, str]) -> Operator:
        """The operator with values that it reads under other names."""
        return self.mapped(lambda a: Ref(names.get(a.value, a.value)) if isinstance(a, Ref) else a)

    def __repr__(self) -> str:
        args = [repr(a) for a in self.args] + [f"{k}={a!r}" for k, a in self.kwargs]
        specs = ", ".join(repr(o.spec) for o in self.outputs)
        return f"%{self.name} = {self.target}({', '.join(args)}) -> {specs}"


@dataclass(frozen=True, slots=True)
class Input:
    """What the data brings for every microbatch; its value is `in:NAME`."""

    name: str
    spec: TensorSpec


@dataclass(frozen=True, slots=True)
class Parameter:
    """A weight, named as in the user's state_dict; its value is `param:NAME`. `tied`: its further
    names there (one tensor, several names)."""

    name: str
    spec: TensorSpec
    trainable: bool = True
    tied: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BufferUpdate:
    """How a buffer changes after each microbatch, in microbatch order, at the end of a step.

    ema: buffer ← (1 - factor)·buffer + factor·value (batch norm; `value` is the microbatch's
    statistic). add: buffer ← buffer + factor (counters; `value` is empty).
    """

    rule: Literal["ema", "add"]
    value: str
    factor: float


@dataclass(frozen=True, slots=True)
class Buffer:
    """State that is no parameter, or a constant of the model; its value is `buffer:NAME`."""

    name: str
    spec: TensorSpec
    persistent: bool = True
    update: BufferUpdate | None = None


@dataclass(frozen=True)
class Graph:
    """An operator DAG in topological order, with a scalar loss. Immutable; see the module."""

    inputs: tuple[Input, ...]
    parameters: tuple[Parameter, ...]
    buffers: tuple[Buffer, ...]
    operators: tuple[Operator, ...]
    loss: str
    weight: str = ""
    metrics: tuple[tuple[str, str], ...] = ()
    operator_set: OperatorSet = "full"
    state: tuple[tuple[str, str, str], ...] = ()
    """The tensors of the module's state_dict in its order, which are what a run exports: the name
    there, the parameter or buffer here (unsplit), the dtype there."""
    batch: int | None = field(default=None)
    """The microbatch size that the graph is bound to; None while sizes may depend on it."""

    @cached_property
    def found(self) -> dict[Hashable, Any]:
        """What was found out about it and is asked for again and again; kept as long as it is."""
        return {}

    def once(self, what: Hashable, find: Callable[[], T]) -> T:
        """What `find` finds out about it; asked again, the same object."""
        if what not in self.found:
            self.found[what] = find()
        known: T = self.found[what]
        return known

    def bind(self, batch: int) -> Graph:
        """This graph for microbatches of `batch` samples: no Size is left in it. Asked again, the
        same object."""
        return self.once(("bound", batch), lambda: self._bind(batch))

    def _bind(self, batch: int) -> Graph:
        def fix(arg: Arg) -> Arg:
            return arg.bind(batch) if isinstance(arg, Size) else arg

        return replace(
            self,
            batch=batch,
            inputs=tuple(replace(i, spec=i.spec.bind(batch)) for i in self.inputs),
            operators=tuple(
                replace(
                    op.mapped(fix),
                    outputs=tuple(
                        replace(o, spec=o.spec and o.spec.bind(batch)) for o in op.outputs
                    ),
                )
                for op in self.operators
            ),
        )

    @property
    def trained_elements(self) -> int:
        """Numbers of all trained parameters."""
        return sum(p.spec.elements for p in self.parameters if p.trainable)

    @cached_property
    def producer(self) -> dict[str, int]:
        """Index of the operator that makes each value."""
        return {v: i for i, op in enumerate(self.operators) for v in op.values}

    @cached_property
    def readers(self) -> dict[str, list[int]]:
        """Indices of the operators that read each value, ascending; what is read first comes
        first."""
        found: dict[str, list[int]] = {}
        for i, op in enumerate(self.operators):
            for value in op.reads:
                found.setdefault(value, []).append(i)
        return found

    @cached_property
    def spec(self) -> dict[str, TensorSpec]:
        """Spec of every value, inputs, parameters and buffers included."""
        found = {f"in:{i.name}": i.spec for i in self.inputs}
        found |= {f"param:{p.name}": p.spec for p in self.parameters}
        found |= {f"buffer:{b.name}": b.spec for b in self.buffers}
        for op in self.operators:
            found |= {v: o.spec for v, o in zip(op.values, op.outputs, strict=True) if o.spec}
        return found

    @cached_property
    def parameter_bytes(self) -> dict[str, int]:
        """Bytes of every parameter, by its name; the graph is bound."""
        return {p.name: p.spec.size_bytes for p in self.parameters}

    @cached_property
    def grads(self) -> frozenset[str]:
        """Values through which a gradient of the loss can flow."""
        return frozenset(
            v for op in self.operators for v, o in zip(op.values, op.outputs, strict=True) if o.grad
        )

    @property
    def results(self) -> tuple[str, ...]:
        """Values that leave the graph: loss, weight, metrics, and what updates buffers."""
        found = [self.loss, self.weight, *(v for _, v in self.metrics)]
        found += [b.update.value for b in self.buffers if b.update]
        return tuple(v for v in dict.fromkeys(found) if v)

    def giving(self, names: Mapping[str, str]) -> Graph:
        """The graph with loss, weight and metrics under other names."""
        loss, weight = (names.get(v, v) for v in (self.loss, self.weight))
        metrics = tuple((k, names.get(v, v)) for k, v in self.metrics)
        return replace(self, loss=loss, weight=weight, metrics=metrics)

    def __repr__(self) -> str:
        trainable = sum(p.trainable for p in self.parameters)
        batch = "any batch" if self.batch is None else f"batch {self.batch}"
        return (
            f"<Graph {len(self.operators)} operators ({self.operator_set}), "
            f"{len(self.parameters)} parameters ({trainable} trainable), "
            f"{len(self.buffers)} buffers, {batch}>"
        )


@dataclass(frozen=True)
class Lowered:
    """The core form of a full graph, bound to a microbatch size or for any: operator i of the full
    form is operators [start[i], start[i + 1]) of `graph`, so a cut of one is a cut of the other."""

    graph: Graph
    start: tuple[int, ...]
