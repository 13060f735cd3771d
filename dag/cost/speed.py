"""Amounts of work by class, and how fast a device does each: the compute part of the cost model.

    seconds(work, speeds) = Σ over classes of amount / speed(class) + calls · call_s

Matrix products, convolutions and attention are counted in FLOPs; everything else waits for memory
and is counted in bytes read and written, apart for what also computes per element (exponentials,
GELU, softmax, normalisation). `count.py` counts, `peer/host/fit.py` fits (docs/architecture.md,
"One cost model").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["FLOPS_PER_BYTE", "Speeds", "Work", "work_array"]

FLOPS_PER_BYTE = 4
"""FLOPs that a device does in the time in which it moves one byte, where its speeds are not known:
a CPU core with 80 GFLOP/s in matrix products moves some 18 GB/s."""


class Work(NamedTuple):
    """Amounts, for one microbatch. Adds up with `+`."""

    product: float = 0.0
    """FLOPs of matrix products."""
    convolution: float = 0.0
    """FLOPs of convolutions."""
    attention: float = 0.0
    """FLOPs of fused attention."""
    memory: float = 0.0
    """Bytes read and written by pointwise operators, reductions, copies."""
    special: float = 0.0
    """Bytes read and written by operators that compute an exponential or the like per element."""
    calls: float = 0.0
    """Kernels."""

    def __add__(self, other: object) -> Work:
        """The sum of each, not a longer tuple."""
        if not isinstance(other, Work):
            return NotImplemented
        return Work(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, factor: float) -> Work:
        return Work(*(factor * a for a in self))

    @property
    def flops(self) -> float:
        """One number for devices of unknown kind: bytes count FLOPS_PER_BYTE each."""
        heavy = self.product + self.convolution + self.attention
        return heavy + FLOPS_PER_BYTE * (self.memory + self.special)


@dataclass(frozen=True, kw_only=True, slots=True)
class Speeds:
    """How fast a device does each class of work. Raises ValueError for one that is not positive and
    finite (`call_s` may be 0)."""

    product: float
    """FLOP/s."""
    convolution: float
    """FLOP/s."""
    attention: float
    """FLOP/s."""
    memory: float
    """Bytes/s."""
    special: float
    """Bytes/s."""
    call_s: float = 0.0
    """Fixed seconds of each kernel."""
    error: float = 0.0
    """Median relative error of the fit that these come from; 0: not fitted."""
    busy: float = 1.0
    """Share that a CPU thread keeps while every core of its machine computes, in (0, 1]."""
    slowed: float = 1.0
    """By what factor `slower` has changed what was measured. It is about a model's kernels: what
    handling a frame takes stays as measured."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), field.name in ("call_s", "error")
            if not (math.isfinite(value) and (value > 0 or (least and value == 0))):
                raise ValueError(f"speed {field.name} is {value}: expected a positive number")
        if self.busy > 1:
            raise ValueError(f"busy is {self.busy}: expected at most 1, the whole of a thread")

    @classmethod
    def of_flops(cls, flops_per_s: float, call_s: float = 0.0) -> Speeds:
        """A device of which one number is known."""
        bytes_per_s = flops_per_s / FLOPS_PER_BYTE
        return cls(
            product=flops_per_s,
            convolution=flops_per_s,
            attention=flops_per_s,
            memory=bytes_per_s,
            special=bytes_per_s,
            call_s=call_s,
        )

    @property
    def per_unit(self) -> NDArray[np.float64]:
        """Seconds per unit of each class, in the order of Work; shape (6,)."""
        rates = (self.product, self.convolution, self.attention, self.memory, self.special)
        return np.array([*(1.0 / r for r in rates), self.call_s])

    def seconds(self, work: Work) -> float:
        return (
            work.product / self.product
            + work.convolution / self.convolution
            + work.attention / self.attention
            + work.memory / self.memory
            + work.special / self.special
            + work.calls * self.call_s
        )

    def slower(self, factor: float) -> Speeds:
        """The speeds of the same device at 1/factor of its speed."""
        rates = ("product", "convolution", "attention", "memory", "special")
        changed = {name: getattr(self, name) / factor for name in rates}
        return replace(self, **changed, call_s=self.call_s * factor, slowed=self.slowed * factor)


def work_array(works: Sequence[Work]) -> NDArray[np.float64]:
    """Shape (len, 6), classes in the order of Work."""
    return np.array(works, dtype=np.float64).reshape(len(works), len(Work._fields))
