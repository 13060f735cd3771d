"""Weighted sums that do not depend on order: whoever adds what first, the same bits come out.

An element x of a contribution, below 2^exponent, counts with an integer weight w. Of all weights
together W, E = exponent + the bits of W: x·w is rounded once, to a multiple of 2^(E - 62), and the
multiples are added up as integers, which no order changes. The sum stays below 2^62, so it never
wraps around. Of the mean, that rounds off less than 2^(exponent - 61) for each contribution.

Of integers among them (`dag/rounds/vector.py`) the largest is found, which has no order either.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = [
    "EXPONENT",
    "FixedPoint",
    "IntegerSum",
    "LargeContributionError",
    "OverlapSum",
    "WeightedSum",
    "fits",
]

EXPONENT = 10
"""What contributions are taken to be below, until one is not: weights and their differences are."""


class LargeContributionError(ValueError):
    """An element is not below 2^exponent, or no number."""


def fits(values: Tensor, exponent: int, integers: Sequence[slice] = ()) -> bool:
    """Whether all elements are numbers below 2^exponent. `values`: (elements,), or rows of them,
    which have the same integers."""
    values = without(values, integers)
    return values.numel() == 0 or bool(values.abs().amax() < 2.0**exponent)


def without(values: Tensor, integers: Sequence[slice]) -> Tensor:
    """Return the values with 0 in the place of integers, whose bits may be those of no number."""
    if integers:
        values = values.clone()
        for at in integers:
            values[..., at] = 0.0
    return values


class FixedPoint:
    """The grid of a sum. weight: of all that will be added. step: what its numbers are multiples
    of."""

    def __init__(self, weight: int, exponent: int, step: float = 0.0) -> None:
        """`step`: 0: the finest with which no sum is too large."""
        self.weight, self.exponent = weight, exponent
        self.step = step or math.ldexp(1.0, exponent + weight.bit_length() - 62)

    def fixed(self, values: Tensor, weight: int) -> Tensor:
        """Return numbers × weight as multiples of the grid: (elements,), int64. Raises
        LargeContributionError."""
        if not fits(values, self.exponent):
            raise LargeContributionError(
                f"an element is {float(values.abs().amax()):g}: expected a number below "
                f"2^{self.exponent}"
            )
        return self.rounded(values.to("cpu", torch.float64) * float(weight))

    def most(self, weight: int) -> int:
        """Return the largest sum of contributions that weigh so much."""
        return math.ceil(math.ldexp(weight, self.exponent) / self.step) + weight

    def rounded(self, exact: Tensor) -> Tensor:
        """Return numbers, (elements,), float64, as multiples of the grid, int64."""
        return (exact / self.step).round_().to(torch.int64)

    def mean(self, total: Tensor) -> Tensor:
        """Return the mean, (elements,), float32, of a sum of such multiples."""
        found = total.to(torch.float64) * self.step
        return (found / float(self.weight)).to(torch.float32)


class WeightedSum:
    """A sum of vectors of one length, on the host. `weight`: of all that will be added; `integers`:
    which of the elements are."""

    def __init__(
        self, elements: int, weight: int, exponent: int, integers: Sequence[slice] = ()
    ) -> None:
        self.grid = FixedPoint(weight, exponent)
        self._largest: dict[int, tuple[slice, Tensor]] = {}
        self._integers = tuple(integers)
        self._sum = torch.zeros(elements, dtype=torch.int64)

    def add(self, values: Tensor, weight: int) -> None:
        """`values`: (elements,), float32. Raises LargeContributionError, and adds nothing."""
        exact = self.grid.fixed(without(values, self._integers), weight)
        for at in self._integers:
            self._add_largest(at, values[at].view(torch.int64))
        self._sum += exact

    def _add_largest(self, at: slice, given: Tensor) -> None:
        """Find the larger of integers, int64, one for each two elements of `at`."""
        _, most = self._largest.get(at.start, (at, given))
        self._largest[at.start] = at, torch.maximum(most, given)

    def add_sum(self, values: Tensor, weight: int) -> None:
        """Add what `total` is of another sum on the same grid, of contributions that weigh so much.
        Raises LargeContributionError for what no such sum comes to, and adds nothing."""
        total = values.view(torch.int64).clone()
        largest = [(at, total[at].view(-1, 2)[:, 0].clone()) for at in self._integers]
        for at in self._integers:
            total[at] = 0
        most = self.grid.most(weight)
        if total.numel() and (int(total.max()) > most or int(total.min()) < -most):
            raise LargeContributionError(
                f"a sum of contributions that weigh {weight} has an element beyond what these "
                f"come to below 2^{self.grid.exponent}"
            )
        for at, given in largest:
            self._add_largest(at, given)
        self._sum += total

    @property
    def total(self) -> Tensor:
        """Return the sum as multiples of the grid, int64, by their bits: (2 × elements,), float32.
        An integer, which has the place of two elements, is the first of them."""
        found = self._sum.clone()
        for at, most in self._largest.values():
            found[at] = torch.stack([most, torch.zeros_like(most)], dim=1).view(-1)
        return found.view(torch.float32)

    def add_noise(self, values: Tensor) -> None:
        """Add `values`, (elements,), float64, to the sum as it is, but for integers. They are
        rounded to the grid first: so what noise is added to shows in no digit of the result that
        the sum alone would not have."""
        self._sum += self.grid.rounded(without(values, self._integers))

    def mean(self) -> Tensor:
        """Return the mean, (elements,), float32."""
        mean = self.grid.mean(self._sum)
        for at, most in self._largest.values():
            mean[at] = most.view(torch.float32)
        return mean


class IntegerSum:
    """A sum of integers modulo 2^64, (elements,), which may be masked. Integers come and go as
    their bits, two float32 each."""

    def __init__(self, elements: int) -> None:
        self._sum = torch.zeros(elements, dtype=torch.int64)

    def add(self, values: Tensor, weight: int) -> None:
        """`values`: (2 × elements,), float32; their weight is in them."""
        self._sum += values.view(torch.int64)

    add_sum = add
    """Of a place's contributions: it is as they are."""

    def add_multiples(self, values: Tensor) -> None:
        """Add multiples of the grid, (elements,), int64."""
        self._sum += values

    @property
    def total(self) -> Tensor:
        """Return the sum, (2 × elements,), float32."""
        return self._sum.view(torch.float32)

    def mean(self) -> Tensor:
        """Return the sum, (2 × elements,), float32: its mean is known behind the masks alone."""
        return self.total


_MOST_SENDERS = 1 << 24
"""float32 has all integers up to there."""


class OverlapSum:
    """A weighted sum, and by element how many sent it: the mean of what 1 to `degree` did is
    multiplied by `gamma` (OPWA: Tang et al. 2024, 2408.14736). `total`: the sum of numbers."""

    def __init__(self, total: WeightedSum, elements: int, gamma: float, degree: int) -> None:
        self._total, self._gamma, self._degree = total, gamma, degree
        self._senders = torch.zeros(elements, dtype=torch.int64)

    def add(self, values: Tensor, weight: int) -> None:
        """`values`: (2, elements), float32, flat or not: numbers, and how many sent each. Raises
        LargeContributionError, and adds nothing."""
        numbers, senders = values.view(2, -1)
        known = (senders >= 0) & (senders < _MOST_SENDERS) & (senders == senders.floor())
        if not bool(known.all()):
            raise LargeContributionError(
                f"{float(senders[~known][0]):g} clients sent an element: expected a whole number "
                f"below {_MOST_SENDERS}"
            )
        self._total.add(numbers, weight)
        self._senders += senders.to("cpu", torch.int64)

    def add_sum(self, values: Tensor, weight: int) -> None:
        """Refuse the sum of a place. Raises LargeContributionError."""
        raise LargeContributionError("a sum does not say how many clients sent an element")

    def mean(self) -> Tensor:
        """Return the mean, (elements,), float32."""
        mean, senders = self._total.mean(), self._senders
        few = (senders >= 1) & (senders <= self._degree)
        mean[few] *= self._gamma
        return mean
