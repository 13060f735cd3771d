"""Batch statistics of a stage with several holders.

A holder sends those of the microbatches that it ran, one after the other in ascending order, each
with the stage's statistics in a fixed order, as one flat float64 vector: exact for every dtype.
Every holder then applies all of them in microbatch order, and so all end with the same buffers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...dag.ir.graph import TensorSpec
from .gradient_vector import Layout, parts_of

__all__ = ["Statistics"]


@dataclass(frozen=True)
class Statistics:
    """The stage's buffers with an `ema` update, and the spec of each one's statistic."""

    buffers: tuple[tuple[str, TensorSpec], ...]

    def spec(self, microbatches: int) -> TensorSpec:
        """Spec of the vector for so many microbatches."""
        elements = sum(spec.elements for _, spec in self.buffers)
        return TensorSpec((elements * microbatches,), "float64")

    def pack(self, found: Sequence[Mapping[str, Tensor]], device: torch.device) -> Tensor:
        """The vector of these microbatches' statistics, by buffer name."""
        parts = [one[name].reshape(-1).double() for one in found for name, _ in self.buffers]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64, device=device)

    def unpack(self, vector: Tensor, microbatches: int) -> list[dict[str, Tensor]]:
        """What `pack` was given, in float64, as views."""
        layout, width = Layout(self.buffers), sum(spec.elements for _, spec in self.buffers)
        return [parts_of(layout, vector[m * width :]) for m in range(microbatches)]
