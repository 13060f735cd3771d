"""Aggregates that bear with wrong clients, the boring way: lists of numbers, sorted.

median          of each element the middle one, or the mean of the middle two
trimmed-mean    the mean without the f smallest and the f largest of each element
krum            the client whose n - f - 2 nearest others are nearest in sum of squares
multi-krum      the mean of the n - f clients of whom that is so
flag            units, projected onto the subspace that loses least of them, by a singular value
                decomposition of all that clients moved; their mean, as long as the middle client
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

import torch

from .client_methods import Named

__all__ = ["AGGREGATES", "Aggregate"]

Aggregate = Callable[[Sequence[Named], int], Named]
"""What clients moved, by parameter in float64, and f; f is less where so few clients do not allow
it."""


def _by_element(middle: Callable[[list[float], int], float]) -> Aggregate:
    def aggregate(moved: Sequence[Named], f: int) -> Named:
        found = {}
        for name, like in moved[0].items():
            columns = zip(*(m[name].flatten().tolist() for m in moved), strict=True)
            each = [middle(sorted(column), f) for column in columns]
            found[name] = torch.tensor(each, dtype=torch.float64).view(like.shape)
        return found

    return aggregate


def _median(column: list[float], f: int) -> float:
    return statistics.median(column)


def _trimmed(column: list[float], f: int) -> float:
    f = min(f, (len(column) - 1) // 2)
    return statistics.fmean(column[f : len(column) - f])


def _best(moved: Sequence[Named], f: int) -> list[int]:
    """Clients in order of their scores."""
    flat = [torch.cat([t.flatten() for t in m.values()]) for m in moved]
    scores = []
    for i, a in enumerate(flat):
        apart = sorted(float(((a - b) ** 2).sum()) for j, b in enumerate(flat) if j != i)
        scores.append(sum(apart[: max(1, len(flat) - f - 2)]))
    return sorted(range(len(flat)), key=lambda i: scores[i])


def _krum(moved: Sequence[Named], f: int) -> Named:
    f = max(0, min(f, (len(moved) - 3) // 2))
    return moved[_best(moved, f)[0]]


def _multi_krum(moved: Sequence[Named], f: int) -> Named:
    f = max(0, min(f, (len(moved) - 3) // 2))
    chosen = [moved[i] for i in _best(moved, f)[: len(moved) - f]]
    return {n: torch.stack([m[n] for m in chosen]).mean(0) for n in moved[0]}


def _flag(moved: Sequence[Named], f: int) -> Named:
    flat = torch.stack([torch.cat([t.flatten() for t in m.values()]) for m in moved], dim=1)
    lengths = [float(column.norm()) for column in flat.T]
    units = torch.stack(
        [c / size if size else c for c, size in zip(flat.T, lengths, strict=True)], dim=1
    )
    n, weights = len(moved), [1.0] * len(moved)
    for _ in range(5):
        weighted = units * torch.tensor(weights, dtype=torch.float64)
        basis = torch.linalg.svd(weighted, full_matrices=False)[0][:, : (n + 2) // 2]
        lost = [1 - float((basis.T @ unit).norm()) ** 2 for unit in units.T]
        weights = [(max(0.0, each) + 1e-7) ** -0.25 for each in lost]
    whole = (basis @ (basis.T @ units)).mean(1) * statistics.median_low(lengths)
    sizes = [t.numel() for t in moved[0].values()]
    pieces = zip(moved[0].items(), whole.split(sizes), strict=True)
    return {name: piece.view(like.shape) for (name, like), piece in pieces}


AGGREGATES: Mapping[str, Aggregate] = {
    "median": _by_element(_median),
    "trimmed-mean": _by_element(_trimmed),
    "krum": _krum,
    "multi-krum": _multi_krum,
    "flag": _flag,
}
