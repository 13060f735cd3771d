"""What clients that one peer has trained come to together: their mean by weight, the mean of what
they moved where they are hidden, or each by itself. Clients without finite numbers are in none."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ...dag.rounds.vector import PIECE
from .cohort import Trained, as_rows

__all__ = ["finite", "hidden_mean", "mean_of", "pieces", "rows_of"]


def finite(trained: Iterable[Trained], squares: Mapping[int, float]) -> Iterator[Trained]:
    """Pass on clients that moved by finite numbers. `squares`: as in `hidden_mean`."""
    for some in trained:
        there = [i for i, n in enumerate(some.participants) if math.isfinite(squares[n])]
        if len(there) == len(some.participants):
            yield some
        elif there:
            yield Trained(
                tuple(some.participants[i] for i in there),
                {name: values[there] for name, values in some.values.items()},
                tuple(some.steps[i] for i in there),
                some.losses[there],
                some.skipped,
            )


def rows_of(trained: Iterable[Trained], participants: Sequence[int]) -> dict[str, Tensor]:
    """Return, by name, what these participants came to, in this order: (participants, elements),
    float32, on the host; integers as two float32 with the bits of an int64."""
    found: dict[str, Tensor] = {}
    at = {number: i for i, number in enumerate(participants)}
    for some in trained:
        places = [at[n] for n in some.participants]
        for name, values in some.values.items():
            dtype = torch.float32 if values.is_floating_point() else torch.int64
            rows = as_rows(values.detach().to("cpu", dtype)).view(torch.float32)
            if name not in found:
                found[name] = torch.empty(len(participants), rows.shape[1])
            found[name][places] = rows
    return found


def hidden_mean(
    trained: Iterable[Trained],
    began: Mapping[str, Tensor],
    squares: Mapping[int, float],
    *,
    clip: float,
    count: int,
) -> dict[str, Tensor]:
    """Return, by name, the mean of what participants moved away from `began`, (elements,), float32,
    on the host; each is shortened to a 2-norm of `clip` at most, and one that moved by what is no
    finite number counts as one that moved by nothing. `squares`: by participant, the squared norm
    of what it moved, of those that have come out of `trained`. `count`: of all.

    The mean is rounded to float32 and counts as often as there are participants: they get that much
    less than clip, so that one more or less never changes their sum by more."""
    sums = {n: torch.zeros_like(t).double() for n, t in began.items() if t.is_floating_point()}
    most = clip / (1.0 + count * 2.0**-22)
    for some in finite(trained, squares):
        norms = torch.tensor([squares[n] for n in some.participants], dtype=torch.float64).sqrt()
        by = torch.where(norms <= most, 1.0, most / norms)
        for name, values in some.values.items():
            if values.is_floating_point():
                moved = values.detach().double() - began[name].detach().double()
                sums[name] += torch.tensordot(by.to(moved.device), moved, 1)
    return {n: (s / count).reshape(-1).to("cpu", torch.float32) for n, s in sums.items()}


def mean_of(
    trained: Iterable[Trained],
    weights: Mapping[int, int],
    moves: Mapping[int, float] | None = None,
    began: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Return, by name, the weighted mean of what participants came to, in float64; of integers the
    largest. `weights`: by participant, above 0. `moves`: what each counts for in place of that
    where the tensor `began` as given, so that it is not the mean that this adds up to. Nothing of
    nobody."""
    moves, began = moves or {}, began or {}
    sums: dict[str, Tensor] = {}
    total, moved = 0, 0.0
    for some in trained:
        mine = [weights[n] for n in some.participants]
        other = [moves[n] for n in some.participants] if began else []
        total, moved = total + sum(mine), moved + sum(other)
        for name, values in some.values.items():
            found = _added(values.detach(), other if name in began else mine)
            before = sums.get(name)
            if before is not None:
                whole = not values.is_floating_point()
                found = torch.maximum(before, found) if whole else before + found
            sums[name] = found
    for name, tensor in began.items() if sums else ():
        sums[name] += (total - moved) * tensor.detach().double()
    return {n: s.div_(total) if s.is_floating_point() else s for n, s in sums.items()}


def _added(values: Tensor, weights: Sequence[float]) -> Tensor:
    if not values.is_floating_point():
        return values.amax(0)
    by = torch.tensor(weights, dtype=torch.float64, device=values.device)
    rows = as_rows(values)
    found = torch.empty(rows.shape[1], dtype=torch.float64, device=values.device)
    for at in pieces(len(found)):
        found[at] = torch.tensordot(by, rows[:, at].double(), 1)
    return found.view(values.shape[1:])


def pieces(elements: int) -> Iterator[slice]:
    """Yield parts of a tensor, so that no large one has a copy in float64."""
    for start in range(0, max(1, elements), PIECE):
        yield slice(start, start + PIECE)
