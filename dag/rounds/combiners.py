"""What is made of contributions that may be wrong, of which each is known by itself.

n rows x_1 … x_n, one a client, of which at most f are arbitrary:

    median          of each element the middle one; of an even number the mean of the middle two
    trimmed-mean    of each element the mean without the f smallest and the f largest
                    (both: Yin et al. 2018, 1803.01498, definitions 1 and 2)
    krum            the row with the least score, the sum of its squared distances to the
                    n - f - 2 others that are nearest (Blanchard et al. 2017, 1703.02757, section 4)
    multi-krum      the mean of the n - f rows with the least scores
    flag            the mean of all as units, cut to a subspace, by the median length (below)

Of equal scores the first row counts. Rows of a vector that is divided into parts are chosen and
weighted by all parts together. Where fewer rows came than the rule needs for its f, f is what they
allow: (n - 1) // 2 of a trimmed mean, (n - 3) // 2 of the other two, at least 0.

The flag aggregate (Almansoori et al. 2023, 2302.05865; the flag median by reweighting: Mankovich et
al. 2022, 2203.04437, algorithm 1) is, of n rows, each brought to length 1: the subspace of
m = ceil((n + 1) / 2) dimensions, with the orthonormal basis Y, that loses least of them,

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

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = [
    "combined",
    "krum_scores",
    "median",
    "middle_integers",
    "squared_distances",
    "trimmed_mean",
]

_CHUNK = 1 << 16
"""Elements that are looked at once, so that what is made in between stays small."""
_AGAIN = 4
"""How often weights are made anew."""
_SMALL = 1e-7
"""The addend e: what a row that lies in the subspace is taken to lose."""
_NOTHING = 1e-11
"""Of the largest eigenvalue: below that there is no further dimension."""


def combined(rule: str, parts: Sequence[Tensor], f: int) -> list[Tensor]:
    """Return what a rule makes of each part. `parts`: (n, elements) each, float32, finite, of one
    vector, with rows in one order, n at least 1. Returns (elements,) each, float32."""
    if rule == "median":
        return [median(rows) for rows in parts]
    if rule == "trimmed-mean":
        return [trimmed_mean(rows, f) for rows in parts]
    n = len(parts[0])
    if rule == "flag":
        products = sum((_products(rows) for rows in parts), torch.zeros(n, n).double())
        shares = _flag_shares(products)
        return [_by_chunks(rows, lambda some: shares @ some.double()) for rows in parts]
    distances = sum((squared_distances(rows) for rows in parts), torch.zeros(n, n).double())
    scores = krum_scores(distances, f)
    count = 1 if rule == "krum" else n - _borne(f, n, 3)
    chosen = scores.argsort(stable=True)[:count].sort().values
    return [_by_chunks(rows[chosen], lambda some: some.double().mean(0)) for rows in parts]


def _borne(f: int, rows: int, beside: int) -> int:
    """How many of so many rows may be arbitrary, where a rule needs 2f + `beside` of them."""
    return min(f, max(0, (rows - beside) // 2))


def _by_chunks(rows: Tensor, of: Callable[[Tensor], Tensor]) -> Tensor:
    """What `of` makes, in float64, of some elements of all rows at once."""
    return torch.cat([of(some).float() for some in torch.split(rows, _CHUNK, 1)])


def _products(rows: Tensor) -> Tensor:
    found = torch.zeros(len(rows), len(rows), dtype=torch.float64)
    for chunk in torch.split(rows, _CHUNK, 1):
        some = chunk.double()
        found += some @ some.T
    return found


def trimmed_mean(rows: Tensor, f: int) -> Tensor:
    """Return the mean of each element without its f smallest and f largest. `rows`: (n, elements),
    float32. Returns (elements,), float32."""
    n = len(rows)
    f = _borne(f, n, 1)
    return _by_chunks(rows, lambda some: some.sort(0).values[f : n - f].double().mean(0))


def median(rows: Tensor) -> Tensor:
    """Return the median of each element. `rows`: (n, elements), float32. Returns (elements,),
    float32."""
    return trimmed_mean(rows, (len(rows) - 1) // 2)


def middle_integers(rows: Tensor) -> Tensor:
    """Return the middle one of each integer, of an even number the lower one of two. `rows`:
    (n, integers), int64. Returns (integers,), int64."""
    return rows.sort(0).values[(len(rows) - 1) // 2]


def squared_distances(rows: Tensor) -> Tensor:
    """Return the squared distance of each row from each other one. `rows`: (n, elements), float32.
    Returns (n, n), float64, symmetric to the bit."""
    n = len(rows)
    found = torch.zeros(n, n, dtype=torch.float64)
    for chunk in torch.split(rows, _CHUNK, 1):
        some = chunk.double()
        for i in range(n - 1):
            found[i, i + 1 :] += (some[i + 1 :] - some[i]).square().sum(1)
    return found + found.T


def krum_scores(distances: Tensor, f: int) -> Tensor:
    """Return the score of each of n rows by their squared distances, (n, n), float64: the smaller,
    the more the row is like others. Returns (n,), float64."""
    n = len(distances)
    nearest = max(1, n - _borne(f, n, 3) - 2)
    others = distances.clone().fill_diagonal_(torch.inf).sort(1).values
    return others[:, : min(nearest, n - 1)].sum(1)


def _flag_shares(products: Tensor) -> Tensor:
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
