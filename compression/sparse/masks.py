"""Masks that both ends know: values at k positions, and nothing else on the wire.

    key      = hash(seed, round, name of the tensor)           the same for all pairs of a round
    k        = max(1, round(n · keep))                         of its n elements
    payload  = the tensor's numbers at the positions of the key, in their order, as they are

The positions are those of `randomk`: the cost grows with k and √n, not with n, and no data decides
them, or else the mean would drift. Where all elements are kept they are in order.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from ..checks import as_dtype, check_length, count, dtype_of, encoded, flat, from_bytes
from ..interface import CodecError, Encoded, Spec
from .randomk import positions
from .select import largest

__all__ = ["MaskCodec", "SharedMask"]

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

    def positions(self, name: str, n: int, device: str | torch.device = "cpu") -> Tensor:
        """int64 (k,), different, below n; none of none."""
        k = self.kept(n)
        return torch.arange(n, device=device) if k == n else self.drawn(name, n, k, device)

    def drawn(self, name: str, n: int, k: int, device: str | torch.device = "cpu") -> Tensor:
        """Return k positions below n, different, as a lot has them: int64 (k,)."""
        return positions(n, k, self._key(name), device)

    def following(self, name: str, moved: Tensor, explore: float) -> Tensor:
        """Return as many positions, ascending, of which the share `explore`, one at least, and what
        else lacks, is drawn; the others are those of the largest of `moved`, (n,), that are not 0,
        of equal ones the first. Lots are of all n, and pass over the largest: so another one among
        these changes one position, not all those behind it."""
        n, device = moved.numel(), moved.device
        k = self.kept(n)
        if k == n:
            return torch.arange(n, device=device)
        top = torch.empty(0, dtype=torch.int64, device=device)
        if (most := k - max(1, round(k * explore))) > 0:
            top = largest(moved.contiguous(), most)
            top = top[moved[top] != 0]
        free = torch.ones(n, dtype=torch.bool, device=device)
        free[top] = False
        lots = self.drawn(name, n, k, device)  # of which at most the largest are not free
        return torch.cat([top, lots[free[lots]][: k - len(top)]]).sort().values

    def kept(self, n: int) -> int:
        """Return how many of n elements have positions."""
        return min(n, max(1, round(n * self.keep)))

    def _key(self, name: str) -> int:
        words = struct.pack("<qq", self.seed, self.round) + name.encode()
        digest = hashlib.blake2b(words, digest_size=8, person=b"mask").digest()
        return int.from_bytes(digest, "little")


@dataclass(frozen=True, slots=True)
class MaskCodec:
    """Writes the numbers of one tensor, by its name, that a mask has; zeros are read elsewhere."""

    mask: SharedMask
    tensor: str
    name = "mask"

    def error_bound(self, spec: Spec) -> float:
        n = count(_WHAT, spec)
        return 0.0 if self.mask.kept(n) == n else 1.0

    def size_bytes(self, spec: Spec) -> int:
        return self.mask.kept(count(_WHAT, spec)) * dtype_of(_WHAT, spec).itemsize

    def encode(self, tensor: Tensor, key: int = 0) -> Encoded:
        x = flat(_WHAT, tensor)
        return encoded(b"", x[self.mask.positions(self.tensor, x.numel(), x.device)])

    def decode(
        self, spec: Spec, header: bytes, data: memoryview, device: str | torch.device = "cpu"
    ) -> Tensor:
        check_length(_WHAT, "header", 0, len(header))
        check_length(_WHAT, self.tensor, self.size_bytes(spec), data.nbytes)
        n, dtype = count(_WHAT, spec), dtype_of(_WHAT, spec)
        found = torch.zeros(n, dtype=dtype, device=device)
        numbers = as_dtype(from_bytes(data, device), dtype)
        at = self.mask.positions(self.tensor, n, device)
        return found.index_copy_(0, at, numbers).view(spec.sizes)
