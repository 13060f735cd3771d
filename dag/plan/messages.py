"""How many numbers the messages of strategies have that encode gradients themselves: pure functions
of the parameters, so that plans, costs, and both ends of a link know them.

A parameter of two or more dimensions is a matrix: its first one by all others. One that low rank
would not make `saving` times smaller goes as it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..ir.graph import TensorSpec

__all__ = [
    "Blocks",
    "FactorShape",
    "acp_sgd",
    "blocks_of",
    "demo",
    "gtopk",
    "lags",
    "layer_share",
    "low_rank",
    "powersgd",
    "share_of",
]


def share_of(numbers: int, ratio: float) -> int:
    """How many of so many numbers are sent: the `ratio`-th part, one at least."""
    return min(numbers, max(1, round(numbers / max(1.0, ratio))))


def gtopk(specs: Sequence[TensorSpec], options: Mapping[str, float], which: int) -> int:
    """Values, then places, of all parameters together."""
    return 2 * share_of(sum(spec.elements for spec in specs), options["ratio"])


MOST_SIDE = 128
"""Of a block, so that a place in it has 16 bits."""


class Blocks(NamedTuple):
    """A parameter in blocks."""

    height: int
    width: int
    rows: int
    """Of a block."""
    columns: int
    top: int
    """How many numbers of each block are sent."""

    @property
    def number(self) -> int:
        return -(-self.height // self.rows) * -(-self.width // self.columns)

    @property
    def sent(self) -> int:
        return self.number * self.top


def blocks_of(spec: TensorSpec, options: Mapping[str, float]) -> Blocks:
    sizes, side = spec.sizes, min(MOST_SIDE, int(options["block"]))
    height = sizes[0] if len(sizes) > 1 else 1
    width = spec.elements // max(1, height)
    rows, columns = max(1, min(height, side)), max(1, min(width, side))
    return Blocks(height, width, rows, columns, min(int(options["top"]), rows * columns))


def demo(specs: Sequence[TensorSpec], options: Mapping[str, float], which: int) -> int:
    """Values, and places of 16 bits, which are filled up to whole numbers of 8 bytes."""
    sent = sum(blocks_of(spec, options).sent for spec in specs)
    wide = any(spec.dtype == "float64" for spec in specs)
    return sent + -(-sent // 4) * (1 if wide else 2)


def layer_share(numbers: int, ratio: float) -> int:
    """How many pairs of value and place a parameter is sent as; 0: it goes as it is, for pairs
    would not be shorter."""
    k = share_of(numbers, ratio)
    return k if 2 * k < numbers else 0


def lags(specs: Sequence[TensorSpec], options: Mapping[str, float], which: int) -> int:
    """Values and places of each parameter, or all of it."""
    return sum(2 * layer_share(s.elements, options["ratio"]) or s.elements for s in specs)


class FactorShape(NamedTuple):
    """A parameter as a matrix of low rank: P (rows, rank) times the transpose of Q
    (columns, rank)."""

    rows: int
    columns: int
    rank: int
    first: bool
    """Of alternating factors, whether P's turn is in even steps; so that both kinds of steps have
    about as much to send."""

    def length(self, left: bool) -> int:
        return (self.rows if left else self.columns) * self.rank


def low_rank(
    specs: Sequence[TensorSpec], options: Mapping[str, float]
) -> tuple[FactorShape | None, ...]:
    """For each parameter; None: it goes as it is."""
    found: list[FactorShape | None] = []
    ahead = 0  # numbers that even steps have more than odd ones
    for spec in specs:
        rows = spec.sizes[0] if spec.sizes else 1
        columns = math.prod(spec.sizes[1:])
        rank = min(int(options["rank"]), rows, columns)
        if len(spec.sizes) < 2 or options["saving"] * rank * (rows + columns) > rows * columns:
            found.append(None)
            continue
        first = (rows > columns) == (ahead <= 0)
        ahead += rank * (rows - columns) * (1 if first else -1)
        found.append(FactorShape(rows, columns, rank, first))
    return tuple(found)


def _parts(
    specs: Sequence[TensorSpec], options: Mapping[str, float]
) -> tuple[int, tuple[FactorShape, ...]]:
    """Numbers that go as they are, and the matrices."""
    found = low_rank(specs, options)
    dense = sum(s.elements for s, matrix in zip(specs, found, strict=True) if matrix is None)
    return dense, tuple(m for m in found if m is not None)


def powersgd(specs: Sequence[TensorSpec], options: Mapping[str, float], which: int) -> int:
    """All P and what goes as it is; then all Q."""
    dense, matrices = _parts(specs, options)
    return sum(m.length(left=not which) for m in matrices) + (0 if which else dense)


def acp_sgd(specs: Sequence[TensorSpec], options: Mapping[str, float], which: int) -> int:
    """One factor of each matrix, of the kind of step that has more, and what goes as it is."""
    dense, matrices = _parts(specs, options)
    return dense + max(sum(m.length(m.first == even) for m in matrices) for even in (True, False))
