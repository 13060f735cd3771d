"""Rows that the data asks for and a table does not have, found without running the model.

An id beyond an embedding, a position beyond a table of positions, a label beyond the classes: which
rows are looked up is mostly said by the data alone, whatever the weights are. So only what leads
from the data to a look-up is run, on the data's own values: reshapes, ranges, comparisons. Where a
weight has a say (the experts that a router takes), nothing is looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ir.graph import Arg, Graph, Operator, Ref, TensorSpec
from ..ir.infer import call
from ..ir.operators import takes_key

__all__ = ["beyond", "ignoring"]

LARGEST = 1 << 24
"""Elements of a value that is still worked out: ids of a few samples have thousands."""

_CLASSES = frozenset(
    f"aten.{name}.default"
    for name in (
        "cross_entropy_loss",
        "nll_loss",
        "nll_loss_nd",
        "nll_loss2d",
        "nll_loss_forward",
        "nll_loss2d_forward",
    )
)
_ALONG = frozenset(
    f"aten.{name}"
    for name in ("gather.default", "index_select.default", "scatter.src", "scatter.value")
) | {"aten.scatter_add.default"}


@dataclass(frozen=True)
class _Lookup:
    """An operator that takes `index` for row numbers from `least` to `most`, or `ignored`."""

    operator: Operator
    index: str
    least: int
    most: int
    ignored: int | None = None


def beyond(graph: Graph, known: Mapping[str, Tensor]) -> str:
    """The first look-up of a row that is not there, in words; empty: none was found.

    `known`: values from outside (`in:x`, `buffer:table`) of as many samples as the graph is bound
    to, as int64 or what their specs say, on the CPU.
    """
    lookups = [x for op in graph.operators for x in _lookups(op, graph.spec)]
    values = _worked_out(graph, [x.index for x in lookups], known)
    for found in lookups:
        index = values.get(found.index)
        if index is None or index.dtype not in (torch.int64, torch.int32) or not index.numel():
            continue
        wrong = (index < found.least) | (index > found.most)
        if found.ignored is not None:
            wrong &= index != found.ignored
        if wrong.any():
            op = found.operator
            where = f"module {op.module!r}" if op.module else "the model itself"
            what = "class" if op.target in _CLASSES else "row"
            return (
                f"{where} ({op.target.split('.')[1]}) is asked for {what} {int(index[wrong][0])}, "
                f"and has {found.least} to {found.most}"
            )
    return ""


def ignoring(graph: Graph, known: Mapping[str, Tensor]) -> frozenset[str]:
    """Names of the cross-entropies that leave out some of the labels, or whose labels are more than
    the data says. As for `beyond`."""
    lookups = [
        x for op in graph.operators if op.target in _CLASSES for x in _lookups(op, graph.spec)
    ]
    values = _worked_out(graph, [x.index for x in lookups], known)
    return frozenset(
        x.operator.name for x in lookups if x.index not in values or x.ignored in values[x.index]
    )


def _lookups(op: Operator, specs: Mapping[str, TensorSpec]) -> Iterator[_Lookup]:
    args = op.args
    table = specs[args[0].value].sizes if args and isinstance(args[0], Ref) else ()

    def at(index: Arg, size: int, least: int = 0, ignored: int | None = None) -> Iterator[_Lookup]:
        if isinstance(index, Ref):
            yield _Lookup(op, index.value, least, size - 1, ignored)

    if op.target == "aten.embedding.default" and table:
        yield from at(args[1], table[0])
    elif op.target in _CLASSES and table:
        ignored = args[4] if len(args) > 4 else dict(op.kwargs).get("ignore_index", -100)
        if isinstance(ignored, int):
            yield from at(args[1], table[1 if len(table) > 1 else 0], ignored=ignored)
    elif op.target in _ALONG and table and isinstance(args[1], int):
        yield from at(args[2], table[args[1]])
    elif op.target == "aten.index.Tensor" and isinstance(args[1], tuple):
        for index, size in zip(args[1], table, strict=False):
            yield from at(index, size, -size)
    elif op.target == "aten.one_hot.default" and isinstance(classes := args[-1], int):
        yield from at(args[0], classes) if classes > 0 else ()


def _worked_out(graph: Graph, wanted: list[str], known: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of the wanted values that nothing but the known ones leads to."""
    needed = set(wanted)
    for op in reversed(graph.operators):
        if needed.intersection(op.values):
            needed.update(op.reads)
    values = dict(known)
    for op in graph.operators:
        if (
            not needed.intersection(op.values)
            or takes_key(op.target)
            or any(v not in values for v in op.reads)
            or any(o.spec and o.spec.elements > LARGEST for o in op.outputs)
        ):
            continue
        with torch.no_grad():
            made = call(op, values, torch.device("cpu"))
        values |= {v: t for v, t in zip(op.values, made, strict=True) if t is not None}
    return values
