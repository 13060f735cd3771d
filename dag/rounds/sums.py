"""Weighted sums that do not depend on order: whoever adds what first, the same bits come out.

An element x of a contribution, below 2^exponent, counts with an integer weight w. Of all weights
together W, E = exponent + the bits of W: x·w is rounded once, to a multiple of 2^(E - 62), and the
multiples are added up as integers, which no order changes. The sum stays below 2^62, so it never
wraps around. Of the mean, that rounds off less than 2^(exponent - 61) for each contribution.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["EXPONENT", "LargeContributionError", "WeightedSum", "fits"]

EXPONENT = 10
"""What contributions are taken to be below, until one is not: weights and their differences are."""


class LargeContributionError(ValueError):
    """An element is not below 2^exponent, or no number."""


def fits(values: Tensor, exponent: int) -> bool:
    """Whether all elements are numbers below 2^exponent."""
    return values.numel() == 0 or bool(values.abs().amax() < 2.0**exponent)


class WeightedSum:
    """Of vectors of one length, on the host. `weight`: of all that will be added."""

    def __init__(self, elements: int, weight: int, exponent: int) -> None:
        self.weight, self.exponent = weight, exponent
        self._scale = 62 - exponent - weight.bit_length()
        """The grid is 2^-scale."""
        self._sum = torch.zeros(elements, dtype=torch.int64)

    def add(self, values: Tensor, weight: int) -> None:
        """`values`: (elements,), float32. Raises LargeContributionError, and adds nothing."""
        if not fits(values, self.exponent):
            raise LargeContributionError(
                f"an element is {float(values.abs().amax()):g}: expected a number below "
                f"2^{self.exponent}"
            )
        exact = values.to("cpu", torch.float64) * float(weight)
        self._sum += (exact * math.ldexp(1.0, self._scale)).round_().to(torch.int64)

    def mean(self) -> Tensor:
        """(elements,), float32."""
        found = self._sum.to(torch.float64) * math.ldexp(1.0, -self._scale)
        return (found / float(self.weight)).to(torch.float32)
