"""Masks that both ends of a pair know: values at k positions, and nothing else on the wire.

    key      = hash(seed, round, name of the tensor)           the same for all pairs of a round
    k        = max(1, round(n · keep))                         of its n elements
    payload  = the tensor's numbers at the positions of the key, in their order, as they are
    x_i      = (x_i + theirs_i) / 2                            at these positions alone

The positions are those of `randomk`: the cost grows with k and √n, not with n, and no data decides
them, or else the mean would drift. Where all elements are kept they are in order.

Addition is commutative and rounds once, and halving is exact but below the smallest normal number:
both ends get the same bits, and twice these are x_i + theirs_i rounded to the dtype. So the sum of
a pair is kept exactly wherever the dtype can write it, and else to half a unit in its last place. A
sum beyond the largest number becomes infinite.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from ..checks import as_dtype, check_length, count, dtype_of, flat, from_bytes, views
from ..echo import all_finite
from ..interface import CodecError, Spec
from .randomk import positions

__all__ = ["SharedMask"]

_WHAT = "shared mask"


@dataclass(frozen=True, slots=True)
class SharedMask:
    """The positions of one round, of every tensor by its name. Raises CodecError for a share that
    is not in (0, 1]."""

    seed: int
    round: int
    keep: float
    """The share of the elements that is exchanged, 1 / c of SAPS."""

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise CodecError(f"{_WHAT}: keep is {self.keep}: expected more than 0, at most 1")

    def size_bytes(self, spec: Spec) -> int:
        """The payload takes so many bytes, exactly."""
        return self._kept(count(_WHAT, spec)) * dtype_of(_WHAT, spec).itemsize

    def positions(self, name: str, n: int, device: str | torch.device = "cpu") -> Tensor:
        """int64 (k,), different, below n; none of none."""
        k = self._kept(n)
        if k == n:
            return torch.arange(n, device=device)
        return positions(n, k, self._key(name), device)

    def payload(self, name: str, tensor: Tensor) -> tuple[memoryview, ...]:
        """What is sent of a tensor; a copy. Raises CodecError for what is no floating point tensor,
        and for NaN and infinities."""
        x = flat(_WHAT, tensor)
        numbers = x[self.positions(name, x.numel(), x.device)]
        _check_finite(name, numbers)
        return views(numbers)

    def average(self, name: str, tensor: Tensor, data: memoryview) -> None:
        """Moves a tensor (contiguous, and as it was when its own payload was made) to the middle
        between it and the one whose payload came, in place. Raises CodecError, and changes nothing,
        for a payload of another length and for NaN and infinities in it."""
        x = tensor.detach().view(-1)
        at = self.positions(name, x.numel(), x.device)
        check_length(_WHAT, name, at.numel() * x.element_size(), data.nbytes)
        theirs = as_dtype(from_bytes(data, x.device), x.dtype)
        _check_finite(name, theirs)
        x[at] = (x[at] + theirs) / 2

    def _kept(self, n: int) -> int:
        return min(n, max(1, round(n * self.keep)))

    def _key(self, name: str) -> int:
        words = struct.pack("<qq", self.seed, self.round) + name.encode()
        digest = hashlib.blake2b(words, digest_size=8, person=b"mask").digest()
        return int.from_bytes(digest, "little")


def _check_finite(name: str, numbers: Tensor) -> None:
    if not all_finite(numbers):
        bad = numbers.numel() - int(numbers.isfinite().sum())
        raise CodecError(f"{_WHAT} {name}: {bad} of {numbers.numel()} numbers are NaN or infinite")
