"""topk/1: the k numbers of the largest magnitude, and where they are; the others become 0.

    k = max(1, round(n / ratio))        n: elements of the tensor, or of a sample (`scope`)
    data = [values][indices]            `values.py`, `indices.py`

With scope=sample, k numbers of each row of dimension 0 are kept, and no row's answer depends on its
mates. For select=exact, k follows from the spec and the header is empty; for the estimates each
scope keeps k ± 1 % (`select.py`), the header is how many are kept together (uint64), and
`size_bytes` is for the most of them, at most 2 % above.

    ‖Δ‖² ≤ max(1 - f + ε²·f, ε²) · ‖x‖²        f = k / n (for the estimates the least k)

with ε the bound of the values' codec: the kept numbers hold at least the share f of ‖x‖², and of
these ε² is lost. What is lost stays so, unless `ef` is around it.

NaN and infinities are kept before all others, and are refused where they are more than k.
"""

from __future__ import annotations

import math
import struct

import torch
from torch import Tensor

from ..checks import check_length, count, dtype_of, flat, from_bytes, views
from ..echo import all_finite, shape_of
from ..interface import CodecError, Encoded, Spec
from . import indices
from .select import HOW, largest
from .values import Values

__all__ = ["TopK", "kept"]

_WORD = "topk/1"
_COUNT = struct.Struct("<Q")
_ROUNDED_UP = 1 + 1e-9
"""Bounds are met exactly by tensors whose numbers are all equal; sums in floats are not exact."""


def kept(codec: str, n: int, ratio: float) -> int:
    """k of n > 0 elements. Raises CodecError for a ratio below 1 or not finite."""
    if not 1 <= ratio < math.inf:
        raise CodecError(f"{codec}: ratio is {ratio}: expected a finite number of 1 or more")
    return max(1, round(n / ratio))


class TopK:
    """The codec topk: keeps the k numbers of the largest magnitude; the others become 0. `ratio` >=
    1; `values` of `values.VALUES`, `select` of `select.HOW`, `scope` tensor or sample."""

    def __init__(
        self,
        ratio: float = 100.0,
        values: str = "bf16",
        select: str = "exact",
        scope: str = "tensor",
    ) -> None:
        kept(_WORD, 1, ratio)
        if select not in HOW:
            raise CodecError(f"{_WORD}: select is {select!r}: expected one of {', '.join(HOW)}")
        if scope not in ("tensor", "sample"):
            raise CodecError(f"{_WORD}: scope is {scope!r}: expected tensor or sample")
        self.ratio, self.select, self.scope = ratio, select, scope
        self.values = Values(_WORD, values)
        self.name = f"{_WORD}:ratio={ratio!r},values={values},select={select},scope={scope}"
        self.varying = select != "exact"
        """Whether payloads may be smaller than `size_bytes`."""

    def error_bound(self, spec: Spec) -> float:
        """‖Δ‖₂ / ‖x‖₂; see the module."""
        n, rows, k, slack = self._layout(spec)
        if n == 0:
            return 0.0
        share = (k - slack) * rows / n
        values = max(
            self.values.error_bound(spec.dtype, [least] * rows) for least in {k - slack, k + slack}
        )
        square = max(1 - share + values**2 * share, values**2)
        return math.sqrt(square) * _ROUNDED_UP if square else 0.0

    def size_bytes(self, spec: Spec) -> int:
        n, rows, k, slack = self._layout(spec)
        most = min(k + slack, n // rows)
        values = self.values.size_bytes(spec.dtype, [most] * rows) if n else 0
        return values + indices.size_bytes(n, rows * most)

    def encode(self, tensor: Tensor, key: int = 0) -> Encoded:
        """Raises CodecError for what is no floating point tensor, and for more than k numbers that
        are not finite."""
        x = flat(_WORD, tensor)
        n, rows, k, _ = self._layout(shape_of(tensor))
        if n == 0:
            return Encoded(b"", ())
        found = largest(x, k, self.select, rows)
        numbers = x[found]
        if found.numel() < n and not all_finite(numbers):
            left, there = (t.numel() - int(t.isfinite().sum()) for t in (numbers, x))
            if left < there:
                raise CodecError(
                    f"{_WORD} keeps {left} of {there} numbers that are NaN or infinite: expected "
                    f"no more of them than the {k} of {n // rows} that it keeps"
                )
        header = _COUNT.pack(found.numel()) if self.varying else b""
        pieces = self._pieces(found, n, rows)
        places = views(indices.encode(found, n))
        return Encoded(header, (*self.values.encode(numbers, pieces, key), *places))

    def decode(
        self, spec: Spec, header: bytes, data: memoryview, device: str | torch.device = "cpu"
    ) -> Tensor:
        """The tensor that was encoded, with 0 where no number was kept; raises as `Codec.decode`
        does."""
        dtype = dtype_of(_WORD, spec)
        n, rows, k, slack = self._layout(spec)
        check_length(_WORD, "header", _COUNT.size if self.varying and n else 0, len(header))
        total = _COUNT.unpack(header)[0] if header else rows * k if n else 0
        least, most = k - slack, min(k + slack, n // rows)
        if n and not rows * least <= total <= rows * most:
            raise CodecError(
                f"{_WORD} header: expected {rows * least} to {rows * most} kept numbers, "
                f"got {total}"
            )
        size = indices.size_bytes(n, total)
        if data.nbytes < size:
            check_length(_WORD, "data", self.size_bytes(spec), data.nbytes)
        split = data.nbytes - size
        found = indices.decode(from_bytes(data[split:], device), n, total)
        pieces = self._pieces(found, n, rows)
        if not all(least <= piece <= most for piece in pieces):
            raise CodecError(
                f"{_WORD} data: expected {least} to {most} kept numbers of each of {rows} samples, "
                f"got {min(pieces)} to {max(pieces)}"
            )
        numbers = self.values.decode(spec.dtype, pieces, data[:split], device)
        out = torch.zeros(n, dtype=dtype, device=device)
        return out.index_copy_(0, found, numbers).view(spec.sizes)

    def _pieces(self, found: Tensor, n: int, rows: int) -> list[int]:
        """How many of the kept numbers lie in each row."""
        if rows == 1:
            return [found.numel()] if n else []
        counts: list[int] = torch.bincount(found // (n // rows), minlength=rows).tolist()
        return counts

    def _layout(self, spec: Spec) -> tuple[int, int, int, int]:
        """Elements, rows, k of a row, and how many more or fewer of it may be kept."""
        if (n := count(_WORD, spec)) == 0:
            return 0, 1, 0, 0
        rows = spec.sizes[0] if self.scope == "sample" and spec.sizes else 1
        k = kept(_WORD, n // rows, self.ratio)
        return n, rows, k, k // 100 if self.varying else 0
