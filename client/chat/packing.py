"""Documents of ids laid into samples of one length.

A document of n ids is n - 1 positions: each id, with the label of the id that follows it. What is
longer than a sample is cut off. A sample is one document, or, packed, as many as fit in the order
in which they come; the rest of it is padding, a document of its own that nothing is learned from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from .templates import IGNORED

__all__ = ["Document", "Sample", "samples"]

Document = tuple[list[int], list[int]]
"""Ids and labels, as many of both."""


@dataclass
class Sample:
    """Positions of one sample; `documents` counts from 0 in it, `positions` in each document."""

    inputs: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    documents: list[int] = field(default_factory=list)

    def add(self, inputs: list[int], targets: list[int]) -> None:
        """Lay a document behind the others."""
        number = self.documents[-1] + 1 if self.documents else 0
        self.inputs += inputs
        self.targets += targets
        self.positions += range(len(inputs))
        self.documents += [number] * len(inputs)


def samples(documents: Iterable[Document], length: int, pad: int, pack: bool) -> Iterator[Sample]:
    """Return the samples of documents, each of `length` positions. pad: id of padding."""
    sample = Sample()
    for ids, labels in documents:
        inputs, targets = ids[:-1][:length], labels[1:][:length]
        if sample.inputs and (not pack or len(sample.inputs) + len(inputs) > length):
            yield _filled(sample, length, pad)
            sample = Sample()
        sample.add(inputs, targets)
    if sample.inputs:
        yield _filled(sample, length, pad)


def _filled(sample: Sample, length: int, pad: int) -> Sample:
    rest = length - len(sample.inputs)
    if rest:
        sample.add([pad] * rest, [IGNORED] * rest)
    return sample
