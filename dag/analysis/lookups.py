"""Rows that the data asks for and a table does not have, found without running the model.

An id beyond an embedding, a position beyond a table of positions, a label beyond the classes: which
rows are looked up is mostly said by the data alone, whatever the weights are. So only what leads
from the data to a look-up is run, on the data's own values: reshapes, ranges, comparisons. Where a
weight has a say (the experts that a router takes), nothing is looked at.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..ir.graph import Arg, Graph, Operator, Ref, TensorSpec
from ..ir.infer import call
from ..ir.operators import aten, takes_key

__all__ = ["Found", "Lookup", "Lookups", "MissingRow", "beyond", "lookups_of"]

LARGEST = 1 << 24
"""Elements of a value that is still worked out: ids of a few samples have thousands."""

_CLASSES = aten(
    "cross_entropy_loss nll_loss nll_loss_nd nll_loss2d nll_loss_forward nll_loss2d_forward"
)
_ALONG = aten(
    "gather index_select scatter.src scatter.value scatter_add scatter_reduce.two index_add",
    "index_copy index_fill.int_Scalar",
)
_BY_TUPLE = aten("index.Tensor _unsafe_index.Tensor index_put _unsafe_index_put")
_KEEPS = frozenset(
    (
        *("view", "_unsafe_view", "reshape", "flatten", "unflatten", "_to_copy", "to", "alias"),
        *("clone", "contiguous", "detach", "slice", "select", "narrow", "transpose", "permute"),
        *("t", "unsqueeze", "squeeze", "expand", "flip"),
    )
)
"""Operators whose results have no other values than what they read."""


@dataclass(frozen=True)
class Lookup:
    """An operator that takes `index` for row numbers from `least` to `most`, or `ignored`."""

    operator: Operator
    index: str
    least: int
    most: int
    ignored: int | None = None

    @property
    def of_classes(self) -> bool:
        """Whether the rows are classes, of a cross-entropy."""
        return self.operator.target in _CLASSES

    def refusal(self, value: int | None) -> str:
        """Say what is wrong with a row number; None: without it, for data that is private."""
        op = self.operator
        number = "that is not there" if value is None else str(value)
        where = f"module {op.module!r}" if op.module else "the model itself"
        return (
            f"{where} ({op.target.split('.')[1]}) is asked for "
            f"{'class' if self.of_classes else 'row'} {number}, and has {self.least} to {self.most}"
        )


class MissingRow(NamedTuple):
    """A row number that is not there, `lookup` asks for it; sample: which of the microbatch, None
    where that is not known."""

    lookup: Lookup
    value: int
    sample: int | None

    def __str__(self) -> str:
        return self.lookup.refusal(self.value)


class Found(NamedTuple):
    """What one batch showed. ignoring: names of the cross-entropies that leave out some label."""

    missing: MissingRow | None
    ignoring: frozenset[str]


class Lookups:
    """The look-ups of a bound graph whose rows nothing says but values from outside.

    given: names of those values (`in:x`, `buffer:table`). What leads from them to the rows is found
    once, so that `look` runs that alone. only: names of operators; others are not looked at.

    seen: the look-ups. kept: by value, the input that has all its values. unseen: names of the
    cross-entropies of whose labels something else has a say.
    """

    def __init__(
        self, graph: Graph, given: Collection[str], only: Collection[str] | None = None
    ) -> None:
        self._batch = graph.batch or 0
        known, order = set(given), list[tuple[Operator, list[Lookup], bool]]()
        self.kept = {value: value for value in given}
        of_classes: set[str] = set()
        for op in graph.operators:
            wanted = only is None or op.name in only
            found = [x for x in lookups_of(op, graph.spec) if wanted and x.index in known]
            if op.target in _CLASSES:
                of_classes.add(op.name)
            runs = (
                all(v in known for v in op.reads)
                and not takes_key(op.target)
                and all(o.spec is None or o.spec.elements <= LARGEST for o in op.outputs)
            )
            if runs:
                known.update(op.values)
                sources = {self.kept.get(v, "") for v in op.reads}
                if op.target.split(".")[1] in _KEEPS and len(sources) == 1 and "" not in sources:
                    self.kept |= dict.fromkeys(op.values, sources.pop())
            if found or runs:
                order.append((op, found, runs))
        self.seen = tuple(x for _, found, _ in order for x in found)
        self.unseen = frozenset(of_classes - {x.operator.name for x in self.seen})
        needed, kept = {x.index for x in self.seen}, []
        for op, found, runs in reversed(order):
            runs = runs and not needed.isdisjoint(op.values)
            if runs:
                needed.update(op.reads)
            if found or runs:
                kept.append((op, found, runs))
        self._order = kept[::-1]
        self.reads = tuple(v for v in given if v in needed)
        self.largest = max(
            (o.spec.elements for op, _, runs in kept if runs for o in op.outputs if o.spec),
            default=1,
        )

    def look(self, known: Mapping[str, Tensor]) -> Found:
        """What these values ask for: int64 or what their specs say, on the CPU, of as many samples
        as the graph is bound to."""
        values, ignoring = dict(known), set[str]()
        for op, lookups, runs in self._order:
            for lookup in lookups:
                index = values[lookup.index]
                is_ignored = index == lookup.ignored if lookup.ignored is not None else None
                if is_ignored is not None and is_ignored.any():
                    ignoring.add(op.name)
                if index.dtype not in (torch.int64, torch.int32) or not index.numel():
                    continue
                wrong = (index < lookup.least) | (index > lookup.most)
                if is_ignored is not None:
                    wrong &= ~is_ignored
                if wrong.any():
                    missing = MissingRow(lookup, int(index[wrong][0]), self._sample(wrong))
                    return Found(missing, frozenset(ignoring))
            if runs:
                with torch.no_grad():
                    made = call(op, values, torch.device("cpu"))
                values |= {v: t for v, t in zip(op.values, made, strict=True) if t is not None}
        return Found(None, frozenset(ignoring))

    def _sample(self, wrong: Tensor) -> int | None:
        """The sample of the first wrong row number, where the rows are in the samples' order."""
        if not wrong.dim() or not self._batch or len(wrong) % self._batch:
            return None
        return int(wrong.nonzero()[0, 0]) // (len(wrong) // self._batch)


def beyond(graph: Graph, known: Mapping[str, Tensor]) -> str:
    """The first look-up of a row that is not there, in words; empty: none was found. `known`: as
    for `Lookups.look`."""
    missing = Lookups(graph, known).look(known).missing
    return str(missing) if missing else ""


def lookups_of(op: Operator, specs: Mapping[str, TensorSpec]) -> Iterator[Lookup]:
    """The row numbers that an operator of a bound graph takes."""
    args = op.args
    table = specs[args[0].value].sizes if args and isinstance(args[0], Ref) else ()

    def at(index: Arg, size: int, least: int = 0, ignored: int | None = None) -> Iterator[Lookup]:
        if isinstance(index, Ref):
            yield Lookup(op, index.value, least, size - 1, ignored)

    if op.target == "aten.embedding.default" and table:
        yield from at(args[1], table[0])
    elif op.target == "shoal.int8_embedding.default" and table:
        yield from at(args[2], table[0])
    elif op.target in _CLASSES and table:
        ignored = op.arg(4, "ignore_index", -100)
        if isinstance(ignored, int):
            yield from at(args[1], table[1 if len(table) > 1 else 0], ignored=ignored)
    elif op.target in _ALONG and table and isinstance(args[1], int):
        yield from at(args[2], table[args[1]])
    elif op.target in _BY_TUPLE and isinstance(args[1], tuple):
        masks = any(
            isinstance(a, Ref) and specs[a.value].dtype in ("bool", "uint8") for a in args[1]
        )
        for index, size in () if masks else zip(args[1], table, strict=False):
            yield from at(index, size, -size)
    elif op.target == "aten.one_hot.default" and isinstance(classes := args[-1], int):
        yield from at(args[0], classes) if classes > 0 else ()
