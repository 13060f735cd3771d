"""All of a run's data, looked through once for what the model cannot take: ids, positions and
labels beyond their tables. It is read in pieces, and the model is not run.

A label that a cross-entropy ignores is remembered as well: whether its mean is over all labels
decides how a batch may be divided.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from ...dag.analysis.lookups import Lookup, Lookups
from ...dag.ir.graph import Graph
from ...dag.permutation import Indices
from .manifest import DataError
from .reader import Reader

__all__ = ["Ignored", "not_finite", "refused", "survey"]

PIECE = 1 << 21
"""Elements of a value that are worked out at once, about."""
MOST_AT_ONCE = 1 << 14
"""Samples that are looked at together."""


class Ignored(NamedTuple):
    """Names of the cross-entropies that leave out a label of the data, and of those of whose labels
    that is not known."""

    seen: frozenset[str] = frozenset()
    unknown: frozenset[str] = frozenset()


def refused(what: str, item: int | None, kind: str, where: str = "") -> DataError:
    """The error about a value that the model has no row for (`MissingRow`, in words). item: the
    number of the sample or, of text and tokens, of the item; None: not known."""
    of = "sample" if kind == "arrays" else "a window at item"
    at = "the data" if item is None else f"{of} {item} of the data"
    return DataError(
        f"{at}{where}: {what}; expected data whose ids and labels the model has, or a model with "
        "more of them"
    )


def survey(graph: Graph, reader: Reader, *, private: bool = False) -> Ignored:
    """Look at all samples, trained on and held out. `private`: errors do not quote the data.

    Raises DataError for the first sample that asks for a row that is not there.
    """
    try:
        return _surveyed(graph, reader)
    except _MissingError as error:
        what = error.lookup.refusal(None if private else error.value)
        raise refused(what, error.item, reader.manifest.kind) from None


class _MissingError(Exception):
    """A row that is not there, and the item that asks for it."""

    def __init__(self, lookup: Lookup, value: int, item: int | None) -> None:
        super().__init__(item)
        self.lookup, self.value, self.item = lookup, value, item


def _surveyed(graph: Graph, reader: Reader) -> Ignored:
    manifest = reader.manifest
    given = [f"in:{i.name}" for i in graph.inputs if i.name in manifest.fields]
    tried = Lookups(graph.bind(2), given)
    if not tried.seen:
        return Ignored(unknown=tried.unseen)
    if manifest.kind == "arrays":
        every = range(manifest.total)
        return Ignored(_pieces(graph, reader, given, tried, every), tried.unseen)
    by_values = [x for x in tried.seen if x.index in tried.kept]
    seen = set[str]().union(*(_values(reader, lookup) for lookup in by_values))
    others = [x for x in tried.seen if x not in by_values]
    if others:
        rest = Lookups(graph.bind(2), given, {x.operator.name for x in others})
        last = manifest.total - manifest.length - 1
        starts = np.append(np.arange(0, last, manifest.length), last)  # side by side
        seen |= _pieces(graph, reader, given, rest, starts)
    # What several items decide together has more values than windows side by side show.
    unknown = tried.unseen | {x.operator.name for x in others if x.of_classes}
    return Ignored(frozenset(seen), unknown)


def not_finite(reader: Reader) -> Iterator[str]:
    """Say for each array how many of its samples have a NaN or an infinity, where any has, and
    which is the first: a loss of such a sample is one, too, and then all weights are."""
    for column in reader.manifest.columns:
        if np.dtype(column.dtype).kind != "f":
            continue
        count, first, at = 0, 0, 0
        for piece in reader.pieces(column.name):
            bad = ~np.isfinite(piece).reshape(len(piece), -1).all(1)
            if bad.any() and not count:
                first = at + int(np.flatnonzero(bad)[0])
            count, at = count + int(bad.sum()), at + len(piece)
        if count:
            yield (
                f"{column.name!r} has a NaN or an infinity in {count} of {at} samples, first in "
                f"sample {first}"
            )


def _values(reader: Reader, lookup: Lookup) -> set[str]:
    """Check every item of text or tokens, each of which is an id somewhere; give the operator's
    name where it is ignored somewhere."""
    found, first = set[str](), 0
    for piece in reader.pieces(reader.manifest.columns[0].name):
        ignores = lookup.ignored is not None and lookup.ignored >= 0
        if ignores and (piece == lookup.ignored).any():
            found.add(lookup.operator.name)
        if int(piece.max()) > lookup.most or int(piece.min()) < lookup.least:
            wrong = (piece > lookup.most) | (piece < lookup.least)
            if ignores:
                wrong &= piece != lookup.ignored
            if wrong.any():
                at = int(np.flatnonzero(wrong)[0])
                raise _MissingError(lookup, int(piece[at]), first + at)
        first += len(piece)
    return found


def _pieces(
    graph: Graph, reader: Reader, given: list[str], tried: Lookups, starts: range | Indices
) -> frozenset[str]:
    """Look at the samples that begin at these items, some at a time."""
    step = max(1, min(MOST_AT_ONCE, 2 * PIECE // tried.largest))
    names = [v.removeprefix("in:") for v in tried.reads]
    made: dict[int, Lookups] = {}
    ignoring: frozenset[str] = frozenset()
    for first in range(0, len(starts), step):
        items = np.asarray(starts[first : first + step])
        if len(items) not in made:
            only = {x.operator.name for x in tried.seen}
            made[len(items)] = Lookups(graph.bind(len(items)), given, only)
        batch = reader.samples(items, names) if names else {}
        known = {f"in:{name}": tensor for name, tensor in batch.items()}
        with torch.no_grad():
            found = made[len(items)].look(known)
        ignoring |= found.ignoring
        if found.missing is not None:
            sample = found.missing.sample
            item = None if sample is None else int(items[sample])
            raise _MissingError(found.missing.lookup, found.missing.value, item)
        if not names:
            break  # no value of the data has a say
    return ignoring
