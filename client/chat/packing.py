"""Documents of ids laid into samples of one length.

A document of n ids is n - 1 positions: each id, with the label of the id that follows it. What is
longer than a sample is cut off. A sample is one document, or, packed, several; the rest of it is
padding, a document of its own that nothing is learned from.

Packed, documents of about WINDOW positions, one after the other, are laid by best-fit decreasing:
the longest first, each into the fullest sample that has room for it. None is split, and nothing is
drawn: the same documents make the same samples.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from .templates import IGNORED

__all__ = ["WINDOW", "Document", "Sample", "best_fit", "samples"]

WINDOW = 2**20
"""Positions that are packed at once, such as 512 samples of 2,048."""

Document = tuple[list[int], list[int]]
"""Ids and labels, as many of both."""


@dataclass
class Sample:
    """Positions of one sample; `documents` counts from 0 in it, `positions` in each document."""

    inputs: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    documents: list[int] = field(default_factory=list)
    padding: int = 0
    """How many of them are padding."""

    def add(self, inputs: list[int], targets: list[int]) -> None:
        """Lay a document behind the others."""
        number = self.documents[-1] + 1 if self.documents else 0
        self.inputs += inputs
        self.targets += targets
        self.positions += range(len(inputs))
        self.documents += [number] * len(inputs)


def samples(
    documents: Iterable[Document], length: int, pad: int, pack: bool, window: int = WINDOW
) -> Iterator[Sample]:
    """Return the samples of documents, each of `length` positions, in the order of the first
    document of each. pad: id of padding. window: positions that are packed at once."""
    cut = ((ids[:-1][:length], labels[1:][:length]) for ids, labels in documents)
    for part in _parts(cut, window if pack else 0):
        for group in best_fit([len(inputs) for inputs, _ in part], length):
            sample = Sample()
            for number in group:
                sample.add(*part[number])
            sample.padding = length - len(sample.inputs)
            if sample.padding:
                sample.add([pad] * sample.padding, [IGNORED] * sample.padding)
            yield sample


def best_fit(sizes: Sequence[int], room: int) -> list[list[int]]:
    """Return which of these sizes lie together within `room`, by their numbers, ascending: the
    largest first, each where the least room is left; of equal ones the first."""
    groups: list[list[int]] = []
    left: list[tuple[int, int]] = []  # room in a group, and its number, ascending
    for number in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        at = bisect_left(left, (sizes[number], 0))
        rest, group = left.pop(at) if at < len(left) else (room, len(groups))
        if group == len(groups):
            groups.append([])
        groups[group].append(number)
        insort(left, (rest - sizes[number], group))
    return sorted(sorted(group) for group in groups)


def _parts(documents: Iterable[Document], window: int) -> Iterator[list[Document]]:
    """Neighbours that have `window` positions together, or a document each."""
    part: list[Document] = []
    count = 0
    for document in documents:
        part.append(document)
        count += len(document[0])
        if count >= window:
            yield part
            part, count = [], 0
    if part:
        yield part
