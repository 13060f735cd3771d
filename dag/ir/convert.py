"""Graphs, to the wire and back, as `dag/schedule/convert_plan.py` does for plans. The only places
where their messages are read or written.

Reading validates: what these functions return keeps every rule of `graph.py`, however hostile the
message was. A bad message raises GraphError and nothing else. Whether an operator is allowed is
left to `operators.py`.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable
from functools import lru_cache

from google.protobuf.message import DecodeError

from ...proto import graph_pb2
from .convert_args import (
    MAX_NAME,
    MAX_TEXT,
    arg_from_proto,
    arg_to_proto,
    dtype_from_proto,
    dtype_to_proto,
    name_of,
    refuse,
    spec_from_proto,
    spec_to_proto,
)
from .graph import (
    Buffer,
    BufferUpdate,
    Graph,
    GraphError,
    Input,
    Lowered,
    Operator,
    OperatorSet,
    Output,
    Parameter,
)

__all__ = [
    "MAX_TEXT",
    "graph_from_bytes",
    "graph_from_proto",
    "graph_to_bytes",
    "graph_to_proto",
    "lowered_from_bytes",
    "lowered_to_bytes",
    "name_of",
    "spec_from_proto",
    "spec_to_proto",
]

VERSION = 1
MAX_GRAPH_BYTES = 64 << 20  # a graph of 100,000 operators has about 20 MB
MAX_RECIPE_BYTES = 64 << 20  # of starting weights; some 150 bytes a tensor
MAX_OPERATORS = 100_000
"""The most operators of a graph; reading so many takes seconds and 100 MB. A model of 80 layers has
some 3,000."""
_OPERATOR_SETS: dict[OperatorSet, graph_pb2.OperatorSet] = {
    "full": graph_pb2.OperatorSet.FULL,
    "core": graph_pb2.OperatorSet.CORE,
}
# No colon: `in:`, `param:` and `eval:` are never theirs. A slash numbers the steps of a core form.
_OPERATOR_NAME = re.compile(r"\w[\w./]*")
_TARGET = re.compile(r"[A-Za-z_]\w*\.[A-Za-z_]\w*\.\w+", re.ASCII)
_KEYWORD = re.compile(r"[A-Za-z_]\w*", re.ASCII)


def _distinct(names: Iterable[str], what: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            refuse(f"{what} {name!r} occurs twice")
        seen.add(name)


# ---------------------------------------------------------------- graphs


def graph_to_bytes(graph: Graph) -> bytes:
    """The serialised graph; the same graph always gives the same bytes, for its content hash."""
    return graph_to_proto(graph).SerializeToString(deterministic=True)


@lru_cache(maxsize=2)
def graph_from_bytes(data: bytes) -> Graph:
    """Raises GraphError when the bytes are no valid graph. The newest ones are remembered: runs
    are planned more than once, and often many of one graph."""
    return graph_from_proto(_parsed(data))


def _parsed(data: bytes) -> graph_pb2.Graph:
    if len(data) > MAX_GRAPH_BYTES:
        refuse(f"{len(data)} bytes: expected at most {MAX_GRAPH_BYTES}")
    try:
        message = graph_pb2.Graph.FromString(data)
    except DecodeError as error:
        raise GraphError(
            f"graph message: {len(data)} bytes that are no message: {error}"
        ) from error
    if len(message.operators) > MAX_OPERATORS:
        refuse(f"{len(message.operators)} operators: expected at most {MAX_OPERATORS}")
    return message


def lowered_to_bytes(lowered: Lowered) -> bytes:
    """The serialised core form, with its map of intervals."""
    message = graph_to_proto(lowered.graph)
    message.starts.extend(lowered.start)
    return message.SerializeToString(deterministic=True)


def lowered_from_bytes(data: bytes) -> Lowered:
    """Raises GraphError when the bytes are no valid core form."""
    message = _parsed(data)
    graph, start = graph_from_proto(message), tuple(message.starts)
    if graph.operator_set != "core":
        refuse(f"operator set {graph.operator_set}: expected the core form")
    steps = all(a <= b for a, b in itertools.pairwise(start))
    if not start or not steps or (start[0], start[-1]) != (0, len(graph.operators)):
        refuse(
            f"the starts of the core form are {start[:5]}…: expected ascending numbers from 0 to "
            f"{len(graph.operators)}"
        )
    return Lowered(graph, start)


def graph_to_proto(graph: Graph) -> graph_pb2.Graph:
    return graph_pb2.Graph(
        version=VERSION,
        inputs=[
            graph_pb2.GraphInput(name=i.name, spec=spec_to_proto(i.spec)) for i in graph.inputs
        ],
        parameters=[
            graph_pb2.Parameter(
                name=p.name, spec=spec_to_proto(p.spec), trainable=p.trainable, tied=p.tied
            )
            for p in graph.parameters
        ],
        buffers=[_buffer_to_proto(b) for b in graph.buffers],
        operators=[_operator_to_proto(op) for op in graph.operators],
        loss=graph.loss,
        weight=graph.weight,
        metrics=[graph_pb2.Metric(name=name, value=value) for name, value in graph.metrics],
        operator_set=_OPERATOR_SETS[graph.operator_set],
        batch=graph.batch or 0,
        state=[
            graph_pb2.StateEntry(name=name, tensor=tensor, dtype=dtype_to_proto(dtype))
            for name, tensor, dtype in graph.state
        ],
    )


def _buffer_to_proto(buffer: Buffer) -> graph_pb2.Buffer:
    found = graph_pb2.Buffer(
        name=buffer.name, spec=spec_to_proto(buffer.spec), persistent=buffer.persistent
    )
    if buffer.update:
        rules = {"ema": graph_pb2.BufferUpdate.EMA, "add": graph_pb2.BufferUpdate.ADD}
        found.update.rule = rules[buffer.update.rule]
        found.update.value = buffer.update.value
        found.update.factor = buffer.update.factor
    return found


def _operator_to_proto(op: Operator) -> graph_pb2.Operator:
    return graph_pb2.Operator(
        name=op.name,
        target=op.target,
        args=[arg_to_proto(a) for a in op.args],
        kwargs=[graph_pb2.NamedArgument(name=k, value=arg_to_proto(a)) for k, a in op.kwargs],
        outputs=[
            graph_pb2.Output(spec=spec_to_proto(o.spec) if o.spec else None, grad=o.grad)
            for o in op.outputs
        ],
        returns_tuple=op.returns_tuple,
        module=op.module,
    )


def graph_from_proto(message: graph_pb2.Graph) -> Graph:
    """Raises GraphError when a rule of the graph is broken."""
    if message.version != VERSION:
        refuse(f"version {message.version}: expected {VERSION}; one side is older than the other")
    sets = [name for name, number in _OPERATOR_SETS.items() if number == message.operator_set]
    if not sets:
        refuse(f"operator set {message.operator_set} is unknown")
    graph = Graph(
        inputs=tuple(
            Input(name_of(i.name, "an input's name"), spec_from_proto(i.spec))
            for i in message.inputs
        ),
        parameters=tuple(
            Parameter(
                name_of(p.name, "a parameter's name"),
                spec_from_proto(p.spec),
                p.trainable,
                tuple(name_of(t, f"a further name of parameter {p.name}") for t in p.tied),
            )
            for p in message.parameters
        ),
        buffers=tuple(_buffer_from_proto(b) for b in message.buffers),
        operators=tuple(_operator_from_proto(op) for op in message.operators),
        loss=message.loss,
        weight=message.weight,
        metrics=tuple((name_of(m.name, "a metric's name"), m.value) for m in message.metrics),
        operator_set=sets[0],
        batch=message.batch or None,
        state=tuple(
            (
                name_of(e.name, "a name of the state"),
                name_of(e.tensor, f"the tensor of {e.name:.60}"),
                dtype_from_proto(e.dtype),
            )
            for e in message.state
        ),
    )
    _check_names(graph)
    _check_values(graph)
    return graph


def _buffer_from_proto(message: graph_pb2.Buffer) -> Buffer:
    name, spec = name_of(message.name, "a buffer's name"), spec_from_proto(message.spec)
    if not message.HasField("update"):
        return Buffer(name, spec, message.persistent)
    update, where = message.update, f"the update of buffer {name}"
    if not math.isfinite(update.factor):
        refuse(f"{where} has factor {update.factor}")
    if update.rule == graph_pb2.BufferUpdate.EMA:
        found = BufferUpdate("ema", update.value, update.factor)
    elif update.rule == graph_pb2.BufferUpdate.ADD:
        if update.value:
            refuse(f"{where} adds a number and names value {update.value[:60]!r}")
        found = BufferUpdate("add", "", update.factor)
    else:
        refuse(f"{where} has rule {update.rule}, which is unknown")
    return Buffer(name, spec, message.persistent, found)


def _operator_from_proto(message: graph_pb2.Operator) -> Operator:
    name = name_of(message.name, "an operator's name")
    if not _OPERATOR_NAME.fullmatch(name):
        refuse(f"an operator's name is {name!r}: expected letters, digits, _ . /")
    if len(message.target) > MAX_NAME or not _TARGET.fullmatch(message.target):
        refuse(f"{name} has target {message.target[:60]!r}: expected namespace.name.overload")
    if len(message.module) > MAX_NAME:
        refuse(f"{name} has a module path of {len(message.module)} characters")
    for argument in message.kwargs:
        if len(argument.name) > MAX_NAME or not _KEYWORD.fullmatch(argument.name):
            refuse(f"{name} has a keyword {argument.name[:60]!r}")
    _distinct((k.name for k in message.kwargs), f"{name} has keyword arguments:")
    outputs = tuple(
        Output(spec_from_proto(o.spec) if o.HasField("spec") else None, o.grad)
        for o in message.outputs
    )
    if not message.returns_tuple and (len(outputs) != 1 or outputs[0].spec is None):
        refuse(f"{name} returns one tensor and has {len(outputs)} outputs, or one without a spec")
    for output in outputs:
        if output.grad and not (output.spec and output.spec.is_floating):
            refuse(f"{name} has a gradient for an output of spec {output.spec!r}")
    return Operator(
        name,
        message.target,
        tuple(arg_from_proto(a) for a in message.args),
        tuple((k.name, arg_from_proto(k.value)) for k in message.kwargs),
        outputs,
        message.returns_tuple,
        message.module,
    )


def _check_names(graph: Graph) -> None:
    _distinct((i.name for i in graph.inputs), "input")
    _distinct((n for p in graph.parameters for n in (p.name, *p.tied)), "parameter")
    _distinct((b.name for b in graph.buffers), "buffer")
    _distinct((n for n, _ in graph.metrics), "metric")
    _distinct((n for n, _, _ in graph.state), "state entry")
    _distinct((v for op in graph.operators for v in op.values), "value")


def _check_values(graph: Graph) -> None:
    """Every value that is named somewhere is there, and before its use."""
    outside = {f"in:{i.name}" for i in graph.inputs} | {f"param:{p.name}" for p in graph.parameters}
    known = outside | {f"buffer:{b.name}" for b in graph.buffers}
    for op in graph.operators:
        for value in op.reads:
            if value not in known:
                refuse(f"{op.name} reads {value[:60]!r}, which nothing before it makes")
        known |= {v for v, o in zip(op.values, op.outputs, strict=True) if o.spec}
    if graph.loss not in graph.producer or not graph.spec[graph.loss].is_floating:
        refuse(f"the loss is {graph.loss[:60]!r}: expected a floating value of an operator")
    for value in graph.results:
        if value not in known:
            refuse(f"result {value[:60]!r} is no value of the graph")
    for buffer in graph.buffers:
        if buffer.update and buffer.update.rule == "ema":
            value = buffer.update.value
            if value not in graph.producer:
                refuse(f"buffer {buffer.name} is updated from {value[:60]!r}, which nothing makes")
            if graph.spec[value].shape != buffer.spec.shape:
                refuse(f"buffer {buffer.name} is {buffer.spec!r}, its update {graph.spec[value]!r}")
