"""lowrank/1: rows on a basis that both ends know, as their coefficients.

    X (rows, D): all dimensions but the last are rows        m = mean of the rows
    sent: m and A = (X - m)·B, both bfloat16                 decoded: m + A·Bᵀ

B (D, rank) has orthonormal columns. Every `renew` tensors of a stream, the first included, the
sender makes B anew from the tensor itself and sends it along, float32; in between both ends use the
one they have. What lies outside of B is lost: activations of neighbouring steps share their space,
which is why this beats dropping elements there (2506.01260). Where the centred rows have no more
than `rank` dimensions, only the rounding of m and A is lost.

B spans the `rank` largest right singular vectors of X - m, found by a range finder of rank + 8
columns with two power iterations (Halko, Martinsson, Tropp 2011, 0909.4061, algorithm 4.4). Its
random start is a function of the key. The other end gets B by its bytes, so the two need not agree
on any rounding.

Bytes, two per number but four in B: 2·(rows·rank + D), and 4·D·rank with a new basis.
Cost: 2·rows·D·rank FLOPs at either end; a new basis 10·rows·D·(rank + 8).

State at both ends: `basis`, B; `count`, int64 (), the tensors so far. The header is the count, 8
bytes, and 1 where B comes along, else 0. Tensors of fewer than 2 dimensions or with D ≤ rank cannot
be written, nor those with NaN or infinities: no coefficient could say where they were.
"""

from __future__ import annotations

import math
import struct

import torch
from torch import Tensor

from ..checks import (
    as_dtype,
    check_length,
    check_state,
    count,
    dtype_name,
    dtype_of,
    encoded,
    flat,
    from_bytes,
    split,
)
from ..echo import all_finite, narrowed, shape_of
from ..interface import CodecError, Encoded, Spec, State
from .delta import counted

__all__ = ["LowRank"]

_HEADER = struct.Struct("<QB")
_EXTRA = 8
_ITERATIONS = 2


class LowRank:
    """The codec lowrank: sends rows as coefficients on a basis that both ends know."""

    stateful = True
    varying = True
    both_know = True
    """The states of both ends are equal after each tensor."""

    def __init__(self, rank: int = 8, renew: int = 64) -> None:
        if not 1 <= rank <= 65536:
            raise CodecError(f"lowrank: rank is {rank}: expected 1 to 65536")
        if not 1 <= renew <= 1 << 32:
            raise CodecError(f"lowrank: renew is {renew}: expected a number of tensors, 1 or more")
        self.rank, self.renew = rank, renew
        self.name = f"lowrank/1:rank={rank},renew={renew}"

    def error_bound(self, spec: Spec) -> float:
        """Return the bound for rows whose whole difference lies outside of the basis; what lies
        inside is rounded twice."""
        return 1.02

    def size_bytes(self, spec: Spec) -> int:
        """With a new basis; without one see `typical_bytes`. Of a tensor that it cannot write those
        of the tensor, so that `fitting` leaves it to raw."""
        return self._bytes(spec, 1)

    def typical_bytes(self, spec: Spec) -> int:
        """The mean over a renewal period."""
        return self._bytes(spec, self.renew)

    def _bytes(self, spec: Spec, every: int) -> int:
        """The mean of tensors of which the `every`-th comes with a basis."""
        if not self._fits(spec):
            return spec.size_bytes
        rows, width = self._rows(spec)
        return self._known_bytes(rows, width) + 4 * width * self.rank // every

    def encode(self, tensor: Tensor, state: State, key: int = 0) -> tuple[Encoded, State]:
        spec = shape_of(tensor)
        rows, width = self._check(spec)
        basis, number = self._basis(spec, state, tensor.device)
        x = flat(self.name, tensor).view(rows, width).float()
        mean = narrowed(x.mean(0), torch.bfloat16)
        x = x - mean
        if not all_finite(x):
            raise CodecError(f"{self.name} cannot write numbers that are not finite in float32")
        new = basis is None or number % self.renew == 0
        if basis is None or new:
            basis = _leading(x, self.rank, key)
        coefficients = narrowed(x @ basis, torch.bfloat16)
        parts = [mean, coefficients.reshape(-1), *([basis.reshape(-1)] if new else [])]
        return encoded(_HEADER.pack(number, new), *parts), _state(basis, number)

    def decode(
        self,
        spec: Spec,
        header: bytes,
        data: memoryview,
        state: State,
        device: str | torch.device = "cpu",
    ) -> tuple[Tensor, State]:
        rows, width = self._check(spec)
        basis, number = self._basis(spec, state, torch.device(device))
        flag = counted(self.name, header, number)
        new = number % self.renew == 0
        if flag != bytes([new]):
            raise CodecError(
                f"{self.name}: tensor {number} of a stream comes {'with' if new else 'without'} a "
                f"basis, its header ends in {flag.hex() or 'nothing'}"
            )
        known = self._known_bytes(rows, width)
        check_length(self.name, "data", known + 4 * width * self.rank * new, data.nbytes)
        raw = from_bytes(data, device)
        mean, coefficients, rest = split(
            self.name, raw, 2 * width, known - 2 * width, raw.numel() - known
        )
        if new:
            basis = as_dtype(rest, torch.float32).view(width, self.rank).clone()
            if not all_finite(basis) or bool(basis.abs().max() > 1.001):
                raise CodecError(f"{self.name}: expected a basis of columns with norm 1")
        assert basis is not None
        a = as_dtype(coefficients, torch.bfloat16).view(rows, self.rank).float()
        found = torch.addmm(as_dtype(mean, torch.bfloat16).float(), a, basis.T)
        dtype = dtype_of(self.name, spec)
        return narrowed(found, dtype).view(spec.sizes), _state(basis, number)

    def _known_bytes(self, rows: int, width: int) -> int:
        """The bytes of a payload without a basis."""
        return 2 * (rows * self.rank + width)

    def _fits(self, spec: Spec) -> bool:
        """Whether it can write such a tensor."""
        sizes = spec.sizes
        return len(sizes) >= 2 and sizes[-1] > self.rank and math.prod(sizes) > 0

    def _rows(self, spec: Spec) -> tuple[int, int]:
        return math.prod(spec.sizes[:-1]), spec.sizes[-1]

    def _check(self, spec: Spec) -> tuple[int, int]:
        """Rows and D. Raises CodecError for a tensor that it cannot write."""
        dtype_of(self.name, spec)
        count(self.name, spec)
        if not self._fits(spec):
            raise CodecError(
                f"{self.name} cannot write {spec.dtype} {list(spec.sizes)}: expected 2 dimensions "
                f"or more, none of 0, and the last over {self.rank}"
            )
        return self._rows(spec)

    def _basis(self, spec: Spec, state: State, device: torch.device) -> tuple[Tensor | None, int]:
        """The basis of the state and the number of tensors so far."""
        if not state:
            return None, 0
        check_state(self.name, state, "basis", "count")
        basis, expected = state["basis"], (spec.sizes[-1], self.rank)
        if tuple(basis.shape) != expected or basis.dtype is not torch.float32:
            raise CodecError(
                f"{self.name}: expected a basis of float32 {list(expected)}, got "
                f"{dtype_name(basis)} {list(basis.shape)}: the state is of another tensor"
            )
        return basis.to(device), int(state["count"])


def _leading(x: Tensor, rank: int, key: int) -> Tensor:
    """(D, rank), orthonormal columns: the leading right singular vectors of x (rows, D), about."""
    rows, width = x.shape
    # A scale changes no direction, and squares of what is left are in range.
    x = x / x.abs().max().clamp(min=torch.finfo(x.dtype).tiny)
    columns = min(width, rank + _EXTRA)
    rng = torch.Generator().manual_seed(key & (2**63 - 1))
    start = torch.randn(rows, columns, generator=rng).to(x.device)
    q = torch.linalg.qr(x.T @ start).Q
    for _ in range(_ITERATIONS if rows > columns else 0):  # fewer rows are all in q already
        q = torch.linalg.qr(x.T @ torch.linalg.qr(x @ q).Q).Q
    # Of the columns' span, the directions in which the rows differ most.
    small = x @ q
    # In float64: of few rows nearly all of it is next to nothing, which float32 makes NaN of.
    turn = torch.linalg.eigh((small.T @ small).double()).eigenvectors.flip(-1).to(x.dtype)
    basis: Tensor = torch.linalg.qr(q @ turn[:, :rank]).Q
    return basis.contiguous()


def _state(basis: Tensor, number: int) -> State:
    return {"basis": basis, "count": torch.tensor(number + 1)}
