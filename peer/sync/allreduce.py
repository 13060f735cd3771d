"""Exact sums of gradients among the holders of a stage.

The gradients of a stage become one flat vector in the order of the stage's parameters, followed by
one number per parameter that says whether there was a gradient at all (1 or 0): a parameter that no
microbatch of any holder reached must keep `None`, as in a plain loop, and not decay on zeros.
Padded with zeros, the vector is cut into P equal shards for P holders. Holder j adds up shard j of
all holders in holder order, in one place, so every holder ends with the same bits.

Many holders do it in rows (`dag/grid.py`): `gathered` shards go to who answers for them, are added
up twice, in rows and over rows, and `scattered` into the vector again.

Cost per holder, n bytes of gradients: 2·(P-1)/P·n sent and as much received.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from ...dag.graph import TensorSpec

__all__ = [
    "Layout",
    "add",
    "gathered",
    "grads_of",
    "parts_of",
    "scattered",
    "shards_of",
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
        """Length of the vector before padding: all elements, then one flag per parameter."""
        return sum(spec.elements for _, spec in self.parameters) + len(self.parameters)

    def shard_spec(self, shards: int) -> TensorSpec:
        """Of each shard when the vector is cut into so many."""
        name = str(self.dtype).removeprefix("torch.")
        return TensorSpec((math.ceil(self.elements / shards),), name)


def vector_of(
    layout: Layout, grads: Mapping[str, Tensor | None], device: torch.device, shards: int = 1
) -> Tensor:
    """A fresh flat vector of the gradients, padded for so many shards: (shards · shard length,)."""
    vector = torch.zeros(
        layout.shard_spec(shards).elements * shards, dtype=layout.dtype, device=device
    )
    at, flags = 0, layout.elements - len(layout.parameters)
    for i, (name, spec) in enumerate(layout.parameters):
        grad = grads[name]
        if grad is not None:
            vector[at : at + spec.elements].copy_(grad.reshape(-1))
            vector[flags + i] = 1
        at += spec.elements
    return vector


def shards_of(vector: Tensor, shards: int) -> tuple[Tensor, ...]:
    """The vector's equal parts, as views: nobody may change them."""
    return vector.view(shards, -1).unbind(0)


def gathered(vector: Tensor, shards: int, which: Sequence[int]) -> Tensor:
    """Those of the vector's equal parts, one behind the other, as a fresh tensor."""
    return vector.view(shards, -1)[list(which)].view(-1)


def scattered(parts: Sequence[tuple[Sequence[int], Tensor]], shards: int) -> Tensor:
    """The reverse: (which, those shards one behind the other), together all, make the vector."""
    which, first = parts[0]
    vector = first.new_empty(shards, first.numel() // len(which))
    for which, part in parts:
        vector[list(which)] = part.view(len(which), -1)
    return vector.view(-1)


def add(parts: Sequence[Tensor]) -> Tensor:
    """The sum in the given order, a fresh tensor."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part.to(total.device, non_blocking=True)
    return total


def grads_of(layout: Layout, vector: Tensor) -> dict[str, Tensor | None]:
    """The gradients in a summed vector; None where nobody had one. They are views of the vector
    where the dtypes agree: give the vector away."""
    found: dict[str, Tensor | None] = {}
    at, flags = 0, layout.elements - len(layout.parameters)
    there = vector[flags : layout.elements].tolist()
    for (name, spec), count in zip(layout.parameters, there, strict=True):
        dtype: torch.dtype = getattr(torch, spec.dtype)
        part = vector[at : at + spec.elements].view(spec.sizes).to(dtype)
        found[name] = part if count else None
        at += spec.elements
    return found


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
