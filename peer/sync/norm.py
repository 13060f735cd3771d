"""The global norm and the results of a step: small float64 vectors to the hub and back.

To the hub:    [squares, then loss, weight, metric… of each microbatch whose loss the peer made]
From the hub:  [norm, weight, loss, metric…] of the step

Squares are those of the gradients of Σ weight·loss that the peer answers for, accumulated in
float64; the hub adds them in peer order. With W = Σ weight, the norm is √(Σ squares) / W and the
loss Σ weight·loss / W in microbatch order. In exact arithmetic this is the single process's norm;
that one is taken in float32, so the two agree to about 1e-6, relative.

A microbatch with weight 0 has no say, whatever its loss is (the mean over nothing is NaN).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...dag.ir.graph import TensorSpec

__all__ = [
    "Score",
    "ScoreTotals",
    "combine",
    "pack",
    "scores_spec",
    "square_of",
    "square_of_all",
    "total_spec",
]

Score = tuple[Tensor | float, ...]
"""(loss, weight, metric…) of one microbatch, scalars."""


@dataclass(frozen=True, slots=True)
class ScoreTotals:
    """A step, or an evaluation (norm 0), over all its microbatches. Without any weight, loss and
    metrics are NaN."""

    norm: float
    weight: float
    loss: float
    metrics: tuple[float, ...]

    def pack(self, device: torch.device) -> Tensor:
        numbers = [self.norm, self.weight, self.loss, *self.metrics]
        return torch.tensor(numbers, dtype=torch.float64, device=device)

    @classmethod
    def unpack(cls, vector: Tensor) -> ScoreTotals:
        norm, weight, loss, *metrics = vector.tolist()
        return cls(norm, weight, loss, tuple(metrics))


def square_of(grad: Tensor) -> Tensor:
    """The squared 2-norm, a float64 scalar where the gradient is."""
    norm: Tensor = torch.linalg.vector_norm(grad, dtype=torch.float64)
    return norm.square()


def square_of_all(grads: Iterable[Tensor], device: torch.device) -> Tensor:
    """The sum of their squared 2-norms, a float64 scalar on the device, which has them all. On a
    card these are a few launches, and not some for each parameter."""
    there = list(grads)
    if not there:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch._foreach_norm(there, 2, dtype=torch.float64)
    return torch.stack(norms).square().sum()


def scores_spec(microbatches: int, metrics: int, *, squares: bool) -> TensorSpec:
    """Spec of what a peer sends to the hub."""
    return TensorSpec((int(squares) + microbatches * (2 + metrics),), "float64")


def total_spec(metrics: int) -> TensorSpec:
    """Spec of what the hub sends back."""
    return TensorSpec((3 + metrics,), "float64")


def pack(squares: Tensor | None, scores: Sequence[Score], device: torch.device) -> Tensor:
    """What a peer sends to the hub; `squares` is None in an evaluation."""
    numbers = [] if squares is None else [squares]
    numbers += [_number(n, device) for score in scores for n in score]
    return torch.stack(numbers) if numbers else torch.zeros(0, dtype=torch.float64, device=device)


def combine(
    parts: Sequence[tuple[Sequence[int], Tensor]], metrics: int, *, squares: bool
) -> ScoreTotals:
    """Adds up what the peers sent, in their order: (the peer's microbatches, its vector) each."""
    square, scores = 0.0, dict[int, list[float]]()
    for microbatches, vector in parts:
        numbers = vector.tolist()
        if squares:
            square += numbers.pop(0)
        width = 2 + metrics
        for i, m in enumerate(microbatches):
            scores[m] = numbers[i * width : (i + 1) * width]
    return _total(square, scores)


def _total(square: float, scores: Mapping[int, Sequence[float]]) -> ScoreTotals:
    counted = [scores[m] for m in sorted(scores) if scores[m][1] != 0]
    weight = math.fsum(score[1] for score in counted)
    metrics = len(next(iter(scores.values()), (0, 0))) - 2
    if not weight:
        return ScoreTotals(0.0, 0.0, math.nan, (math.nan,) * metrics)
    loss, *means = (
        sum(score[at] * score[1] for score in counted) / weight
        for at in (0, *range(2, 2 + metrics))
    )
    return ScoreTotals(math.sqrt(square) / abs(weight), weight, loss, tuple(means))


def _number(value: Tensor | float, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().reshape(()).to(device, torch.float64)
    return torch.tensor(value, dtype=torch.float64, device=device)
