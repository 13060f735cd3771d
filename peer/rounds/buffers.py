"""What becomes of buffers in a round, whatever the method does with parameters: of running
statistics the mean counts, without momentum and whole, and of integers the largest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...dag.rounds.vector import Entry
from ...job.settings import Settings
from .strategy import RoundStrategy, State

__all__ = ["elements_of", "in_place", "minus", "plus", "strategy_of_entry"]


class _Mean(RoundStrategy):
    """Shared state, of which there is none, stays as it began."""

    def apply(self, value: str, base: Tensor, mean: Tensor, state: State) -> tuple[Tensor, State]:
        return base - mean, state


class _Whole(_Mean):
    """The exchange finds what all go on with: of integers the largest, and of statistics the mean
    where replicas do not begin a round with the same ones."""

    gives_values = True

    def contribution(self, value: str, base: Tensor, now: Tensor, own: State) -> Tensor:
        return now

    def apply(self, value: str, base: Tensor, mean: Tensor, state: State) -> tuple[Tensor, State]:
        return mean, state


def strategy_of_entry(entry: Entry, strategy: RoundStrategy) -> RoundStrategy:
    """`strategy`: the method's."""
    if not entry.is_buffer:
        return strategy
    return (_Whole if entry.integer or strategy.apart else _Mean)(Settings())


def elements_of(tensor: Tensor, entry: Entry) -> Tensor:
    """A copy, as it is in the run's vector: (elements,), float32, on the host."""
    if entry.integer:
        tensor = tensor.detach().to("cpu", torch.int64, copy=True)
        return tensor.reshape(-1).view(torch.float32)
    return tensor.detach().to("cpu", torch.float32, copy=True).reshape(-1)


def in_place(values: Tensor, entry: Entry, like: Tensor) -> Tensor:
    """The same back: of the shape of `like`."""
    return (values.view(torch.int64) if entry.integer else values).view(like.shape)


def minus(a: Tensor, b: Tensor, entry: Entry) -> Tensor:
    """(elements,), float32, as in the run's vector."""
    if entry.integer:
        return (a.view(torch.int64) - b.view(torch.int64)).view(torch.float32)
    return a - b


def plus(a: Tensor, b: Tensor, entry: Entry) -> Tensor:
    """(elements,), float32, as in the run's vector."""
    if entry.integer:
        return (a.view(torch.int64) + b.view(torch.int64)).view(torch.float32)
    return a + b
