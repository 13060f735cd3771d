"""The vector of a run: all that replicas exchange, end to end in one order, however each is cut.

It has every trained parameter once, and every buffer that steps update. They stand in the
order of the first operators that read them (of buffers, of the operator that owns the update), so
that those of a stage, which is an interval of operators, are an interval of the vector. A tied
parameter belongs to the stage of its first reader; the others have copies.

Elements are float32. An integer of a buffer takes two of them, which have the bits of an int64: of
integers the largest counts, and no sum.

What is encoded, summed and hashed at once is a *piece*: PIECE elements of one entry at most,
counted from its beginning. Pieces follow from the graph alone, so that neither a cut nor who adds
up what changes a bit. The hash of a version, which says whether replicas have made the same, is

    Σ over pieces of XXH3-64(value, first element, bytes in float32)    modulo 2^64

Sums have no order: so the sums of a replica's holders are equal to those of another one's, however
each is cut. A *part* is what one frame has: whole pieces side by side. Where numbers go
as they are, it begins and ends anywhere, for sums are the same however they are cut
(`part_elements`); then a piece may be in several parts, and what is in one is a piece there.

Rounds may exchange one *fragment* of it at a time (Streaming DiLoCo): block i of the model is in
fragment i mod N, and so strided over its depth; what is in no block is in the first one. The first
number in a parameter's name is that of its block: `h.3.attn.weight` is of block 3.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter

from torch import Tensor
from xxhash import xxh3_64

from ..ir.graph import Graph, TensorSpec
from ..plan.cut import Cutter
from ..plan.outline import Outline

__all__ = [
    "PIECE",
    "Entry",
    "RunVector",
    "Span",
    "VectorPiece",
    "blocks",
    "digest",
    "part_elements",
    "with_elements",
]

PIECE = 1 << 20
"""Elements of a piece, and of a part, at most: 4 MB in fp32, as a frame's buffers are."""
_LEAST, _LONG = 1 << 12, 1 << 16
"""Elements of a part, at least, and of one of which few on their way fill a link: 16 and 256 KB."""
_MOST_SHARES = 16
_BLOCK = re.compile(r"(?:^|\.)(\d+)\.")


def part_elements(elements: int, members: int) -> int:
    """Return how many elements a part has at most where numbers go as they are, of a vector of
    `elements` that so many members add up. Each pair has its share of the vector in four parts, as
    many as a link has frames on their way; where these are long in up to sixteen, for results go
    while other parts come. Of more than 16 members each has fewer: it has frames with all."""
    share = elements // max(1, min(members, _MOST_SHARES))
    return min(PIECE, max(_LEAST, min(share // 4, _LONG), share // 16))


def blocks(names: Iterable[str]) -> int:
    """How many blocks there are in a model with these parameters."""
    return len({found[1] for name in names if (found := _BLOCK.search(name))})


Span = tuple[int, int]
"""Elements [start, stop) of the vector."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in the vector. `value`: its name in the graph, `param:NAME` or `buffer:NAME`.
    `spec`: of its elements. `operator`: index of the one that it belongs to. `integer`: see the
    module."""

    value: str
    spec: TensorSpec
    start: int
    operator: int
    integer: bool = False

    @property
    def stop(self) -> int:
        return self.start + self.spec.elements

    @property
    def name(self) -> str:
        return self.value.partition(":")[2]

    @property
    def is_buffer(self) -> bool:
        return self.value.startswith("buffer:")


@dataclass(frozen=True, slots=True)
class VectorPiece:
    """Elements [start, stop) of one entry, counted from its beginning."""

    entry: Entry
    start: int
    stop: int

    @property
    def whole_start(self) -> int:
        """Where the piece begins that the graph has here; `start`, unless it is cut."""
        return self.start - self.start % PIECE

    @property
    def elements(self) -> int:
        return self.stop - self.start


class RunVector:
    """entries: in order. elements: of all. fragments: into which rounds divide it."""

    def __init__(self, entries: Sequence[Entry], fragments: int = 1) -> None:
        self.entries, self.fragments = tuple(entries), fragments
        self.elements = self.entries[-1].stop if self.entries else 0

    @classmethod
    def of(cls, graph: Graph, fragments: int = 1) -> RunVector:
        """That of a graph whose sizes are bound."""
        cutter, at = Cutter(graph), dict[str, int]()
        for i, operator in enumerate(graph.operators):
            for value in operator.reads:
                at.setdefault(value, i)
        found: list[tuple[int, str, TensorSpec]] = []
        for parameter in graph.parameters:
            value = f"param:{parameter.name}"
            if parameter.trainable and value in at:
                found.append((at[value], value, parameter.spec))
        for buffer in graph.buffers:
            owner = cutter.owners.get(buffer.name)
            if owner is not None:
                found.append((owner, f"buffer:{buffer.name}", buffer.spec))
        found.sort(key=lambda x: x[0])  # in one place, as in the graph
        entries, start = [], 0
        for operator_index, value, given in found:
            integer, spec = not given.is_floating, given
            if integer:
                spec = TensorSpec((2 * given.elements,), "float32")
            entries.append(Entry(value, spec, start, operator_index, integer))
            start += spec.elements
        return cls(entries, fragments)

    def span(self, start: int, stop: int) -> Span:
        """The elements that belong to the operators [start, stop)."""
        first, last = (
            bisect_right(self.entries, at - 1, key=attrgetter("operator")) for at in (start, stop)
        )
        return self._at(first), self._at(last)

    def _at(self, entry: int) -> int:
        return self.entries[entry].start if entry < len(self.entries) else self.elements

    def aligned(self, position: int) -> int:
        """Where the piece of an element begins; of the end, the end."""
        entry = self._entry_at(position)
        return self.elements if entry is None else position - (position - entry.start) % PIECE

    def _uncut(self, position: int) -> int:
        """Where the number of an element begins: an integer has two."""
        entry = self._entry_at(position)
        if entry is None:
            return self.elements
        return position - (position - entry.start) % 2 if entry.integer else position

    def _entry_at(self, position: int) -> Entry | None:
        """The entry that an element is of; None for the end."""
        if position >= self.elements:
            return None
        return self.entries[bisect_right(self.entries, position, key=attrgetter("start")) - 1]

    def spans(self, fragment: int) -> list[Span]:
        """The elements of a fragment, from 1; 0: of all."""
        if not fragment:
            return [(0, self.elements)]
        found: list[Span] = []
        for entry in self.entries:
            if self.is_in(entry, fragment):
                if found and found[-1][1] == entry.start:
                    found[-1] = found[-1][0], entry.stop
                else:
                    found.append((entry.start, entry.stop))
        return found

    def is_in(self, entry: Entry, fragment: int) -> bool:
        """Whether an entry is in a fragment, from 1; 0: of all."""
        if not fragment:
            return True
        block = _BLOCK.search(entry.name)
        return fragment == (int(block[1]) % self.fragments + 1 if block else 1)

    def parts(self, start: int, stop: int, most: int = 0) -> list[Span]:
        """The parts of the elements from `start` to `stop`, each rounded down to a piece's
        beginning; of at most so many elements each where `most`, 2 at least, is not 0: then they
        are nearly equal, and rounded down to where a number begins."""
        down = self._uncut if most else self.aligned
        begin, end, found = down(start), down(stop), list[Span]()
        size = PIECE
        if most and begin < end:
            size = -(-(end - begin) // -(-(end - begin) // max(2, most)))
        while begin < end:
            found.append((begin, down(min(begin + size, end))))
            begin = found[-1][1]
        return found

    def pieces(self, span: Span) -> Iterator[VectorPiece]:
        """Return the pieces of a part, in order."""
        start, stop = span
        i = max(0, bisect_right(self.entries, start, key=attrgetter("start")) - 1)
        while i < len(self.entries) and (entry := self.entries[i]).start < stop:
            at, end = max(start, entry.start) - entry.start, min(stop, entry.stop) - entry.start
            while at < end:
                piece = VectorPiece(entry, at, min(at - at % PIECE + PIECE, end))
                yield piece
                at = piece.stop
            i += 1

    def integers(self, span: Span) -> list[slice]:
        """Which elements of a part are integers, counted from its beginning."""
        start, found = span[0], list[slice]()
        for entry in self._integers:
            if entry.start < span[1] and start < entry.stop:
                found.append(slice(max(0, entry.start - start), min(entry.stop, span[1]) - start))
        return found

    @cached_property
    def _integers(self) -> list[Entry]:
        return [e for e in self.entries if e.integer]

    def of_value(self, value: str) -> Entry | None:
        """The entry of a parameter or buffer of the graph."""
        return self._by_value.get(value)

    @cached_property
    def _by_value(self) -> dict[str, Entry]:
        return {entry.value: entry for entry in self.entries}


def with_elements(outline: Outline, graph: Graph, bounds: Sequence[tuple[int, int]]) -> Outline:
    """The outline of these stages of a bound graph, with where they are in the run's vector."""
    vector = RunVector.of(graph)
    spans = [vector.span(*at) for at in bounds]
    entries = {g.parameter: vector.of_value(f"param:{g.parameter}") for g in outline.tied}
    return Outline(
        tuple(
            replace(s, elements=stop - start)
            for s, (start, stop) in zip(outline.stages, spans, strict=True)
        ),
        tuple(
            replace(g, start=e.start, elements=e.spec.elements)
            for g in outline.tied
            if (e := entries[g.parameter]) is not None
        ),
    )


def digest(value: str, version: Tensor) -> int:
    """The digest of one entry; `version`: (elements,), float32, on the host."""
    total, data = 0, version.contiguous().numpy()
    for start in range(0, len(data), PIECE):
        piece = xxh3_64(f"{value}\0{start}\0".encode())
        piece.update(data[start : start + PIECE].data)
        total += piece.intdigest()
    return total % 2**64
