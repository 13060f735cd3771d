"""The gradients of a stage as one flat vector, and its arithmetic for exchanges.

They stand in the order of the stage's parameters, followed by one number per parameter that says
whether there was a gradient at all (1 or 0): a parameter that no microbatch of any holder reached
must keep `None`, as in a plain loop, and not decay on zeros. What carries the vector to other
holders, and in how many shards, is for the collective (`dag/exchange/`); each shard is added up in
one place and one order, so every holder ends with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor, nn

from ...dag.ir.graph import TensorSpec

__all__ = [
    "Layout",
    "TensorSpace",
    "add",
    "grads_of",
    "parts_of",
    "set_grads",
    "vector_of",
]


@dataclass(frozen=True)
class Layout:
    """Where each parameter lies in the flat vector."""

    parameters: tuple[tuple[str, TensorSpec], ...]

    @cached_property
    def dtype(self) -> torch.dtype:
        """float32, or float64 where a parameter is: sums never lose what a holder had."""
        wide = any(spec.dtype == "float64" for _, spec in self.parameters)
        return torch.float64 if wide else torch.float32

    @cached_property
    def elements(self) -> int:
        """Length of the vector: all elements, then one flag per parameter."""
        return sum(spec.elements for _, spec in self.parameters) + len(self.parameters)

    def spec(self, elements: int | None = None) -> TensorSpec:
        """Spec of the vector, or of so many of its elements."""
        name = str(self.dtype).removeprefix("torch.")
        return TensorSpec((self.elements if elements is None else elements,), name)


def add(parts: Sequence[Tensor]) -> Tensor:
    """The sum in the given order, a fresh tensor."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part.to(total.device, non_blocking=True)
    return total


class TensorSpace:
    """Flat tensors of one exchange: (elements,) each. `bounds`: where its shards begin, and where
    the last one ends. `add`, `relay`: as of `VectorSpace`."""

    def __init__(
        self,
        bounds: Sequence[int],
        device: torch.device,
        add: Callable[[Sequence[Tensor]], Tensor] = add,
        relay: Callable[[Tensor], Tensor] = lambda total: total,
    ) -> None:
        self._lengths = [b - a for a, b in pairwise(bounds)]
        self._device, self._add, self._relay = device, add, relay

    def cut(self, vector: Tensor) -> Sequence[Tensor]:
        """Views: nobody may change them."""
        return torch.split(vector, self._lengths)

    def split(self, vector: Tensor, shards: Sequence[int]) -> Sequence[Tensor]:
        return torch.split(vector, [self._lengths[s] for s in shards])

    def concat(self, shards: Sequence[Tensor]) -> Tensor:
        return torch.cat([shard.to(self._device) for shard in shards])

    def join(self, shards: Sequence[Tensor]) -> Tensor:
        """A fresh one: who sends a total keeps it."""
        return self.concat(shards)

    def add(self, parts: Sequence[Tensor]) -> Tensor:
        return self._add(parts)

    def relay(self, total: Tensor) -> Tensor:
        return self._relay(total)


def vector_of(layout: Layout, grads: Mapping[str, Tensor | None], device: torch.device) -> Tensor:
    """A fresh flat vector of the gradients: (elements,)."""
    vector = torch.zeros(layout.elements, dtype=layout.dtype, device=device)
    at, flags = 0, layout.elements - len(layout.parameters)
    for i, (name, spec) in enumerate(layout.parameters):
        grad = grads[name]
        if grad is not None:
            vector[at : at + spec.elements].copy_(grad.reshape(-1))
            vector[flags + i] = 1
        at += spec.elements
    return vector


def grads_of(layout: Layout, vector: Tensor) -> dict[str, Tensor | None]:
    """The gradients in a summed vector; None where nobody had one. They are views of the vector
    where the dtypes agree: give the vector away."""
    there = vector[layout.elements - len(layout.parameters) : layout.elements].tolist()
    parts = parts_of(layout, vector)
    return {
        name: parts[name].to(getattr(torch, spec.dtype)) if count else None
        for (name, spec), count in zip(layout.parameters, there, strict=True)
    }


def parts_of(layout: Layout, vector: Tensor) -> dict[str, Tensor]:
    """Views of a flat vector by parameter, whatever lies behind the last one."""
    found, at = {}, 0
    for name, spec in layout.parameters:
        found[name] = vector[at : at + spec.elements].view(spec.sizes)
        at += spec.elements
    return found


def set_grads(parameters: Mapping[str, nn.Parameter], grads: Mapping[str, Tensor | None]) -> None:
    """Puts gradients in the place of those that accumulated."""
    for name, grad in grads.items():
        parameters[name].grad = grad
