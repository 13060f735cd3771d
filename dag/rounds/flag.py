"""The flag aggregate of contributions that may be wrong (Almansoori et al. 2023, 2302.05865; the
flag median by reweighting: Mankovich et al. 2022, 2203.04437, algorithm 1).

Of n rows, each brought to length 1: the subspace of m = ceil((n + 1) / 2) dimensions, with the
orthonormal basis Y, that loses least of them,

    min over Y of sum_i sqrt(1 - |Y' u_i|^2),    u_i = x_i / |x_i|.

It is found by least squares that are weighted anew. Y_0 are the first m left singular vectors of
all u_i side by side, and Y_(t+1) are those of w_i u_i with w_i = (1 - |Y_t' u_i|^2 + e)^(-1/4): who
is lost counts less. The aggregate is (s / n) Y Y' sum_i u_i, where s, the lower middle one of all
lengths, is ours: the paper goes by directions only, and a round wants a length.

So no length counts but s. With fewer than half of the rows wrong the aggregate is no longer than
the longest honest row, and each wrong one moves it by s / n at most beside what it does to Y. A row
of zeros has no direction, and counts in n and s alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["flag_shares"]

_AGAIN = 4
"""How often weights are made anew."""
_SMALL = 1e-7
"""The addend e: what a row that lies in the subspace is taken to lose."""
_NOTHING = 1e-11
"""Of the largest eigenvalue: below that there is no further dimension."""


def flag_shares(products: Tensor) -> Tensor:
    """Return what each row counts for in the flag aggregate, which is their sum by these numbers.
    `products`: (n, n), float64, of each row with each other one, of which the lower triangle is
    read. Returns (n,), float64."""
    n = len(products)
    lengths = products.diagonal().clamp(min=0).sqrt()
    scale = torch.where(lengths > 0, 1 / lengths, 0)
    cosines = products.tril() * scale[:, None] * scale
    cosines = cosines + cosines.tril(-1).T
    weights = torch.ones_like(lengths)
    for _ in range(1 + _AGAIN):
        basis = _basis(cosines, weights, n // 2 + 1)
        inside = cosines @ basis  # Y' u_i in rows
        weights = (1 - inside.square().sum(1)).clamp(min=0).add(_SMALL).pow(-1 / 4)
    return basis @ inside.sum(0) * scale * lengths.median() / n


def _basis(cosines: Tensor, weights: Tensor, most: int) -> Tensor:
    """Return the basis Y of the subspace that has most of the rows by their weights, as what of
    each row is in each vector of it: (n, dimensions), at most `most` of them. Products take the
    place of rows, which may have millions of elements."""
    values, vectors = torch.linalg.eigh(cosines * weights[:, None] * weights)
    values, vectors = values[-most:], vectors[:, -most:]
    there = values > _NOTHING * values[-1]
    found: Tensor = weights[:, None] * vectors[:, there] / values[there].sqrt()
    return found
