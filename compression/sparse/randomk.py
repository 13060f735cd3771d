"""randomk/1: k numbers at positions that a key decides; the others become 0. No indices travel.

    k = max(1, round(n / ratio))        position_i = π(i), i < k
    header = [key, uint64][k, uint64]   data = [values]

π permutes [0, n): pairs (left, right) of numbers below a = ⌈√n⌉ go through eight rounds of a
Feistel network, (left, right) → (right, (left + F(right)) mod a), where F is a table of hashes
of (key, round); what lands at n or above goes through again (Black and Rogaway 2002, "Ciphers
with arbitrary finite domains", section 4). So the cost grows with k and √n, not with n.

Nothing is scaled: ‖Δ‖² is (1 - k/n)·‖x‖² in the mean over keys, and may be all of ‖x‖² for one.
What is not sent is lost unless `ef` is around it. Where the values' codec is fp32, payloads of one
key and spec can be added up number by number: what is decoded is the sum of the tensors, at the
positions that were sent.

NaN and infinities are refused: a position that is not sent would turn them into 0.
"""

from __future__ import annotations

import math
import struct

import torch
from torch import Tensor

from .. import counter
from ..checks import check_length, count, dtype_of, flat
from ..echo import check_finite, shape_of
from ..interface import CodecError, Encoded, Spec
from .topk import kept
from .values import Values

__all__ = ["RandomK", "positions"]

_WORD = "randomk/1"
_HEADER = struct.Struct("<QQ")
_ROUNDS = 8


def positions(n: int, k: int, key: int, device: str | torch.device = "cpu") -> Tensor:
    """int64 (k,): different numbers below n in an order that looks random; the first ones for a
    greater k. 0 <= k <= n."""
    side = math.isqrt(max(n - 1, 0)) + 1
    tables = []
    for r in range(1, _ROUNDS + 1):
        words = counter.bits(key + r * 0x9E3779B97F4A7C15, side, device) & 0x7FFFFFFF
        tables.append((words % side).to(torch.int64))
    found = _permuted(torch.arange(k, device=device), side, tables)
    while True:
        over = (found >= n).nonzero().view(-1)
        if over.numel() == 0:
            return found
        found[over] = _permuted(found[over], side, tables)


def _permuted(x: Tensor, side: int, tables: list[Tensor]) -> Tensor:
    left, right = x // side, x % side
    for table in tables:
        # Both are below `side`: the remainder is one subtraction at most.
        mixed = table[right].add_(left)
        mixed -= side * (mixed >= side)
        left, right = right, mixed
    return left * side + right


class RandomK:
    """The codec randomk: keeps k numbers at positions that a key decides; the others become 0.
    `ratio` >= 1; `values` of `values.VALUES`."""

    def __init__(self, ratio: float = 100.0, values: str = "bf16") -> None:
        kept(_WORD, 1, ratio)
        self.ratio = ratio
        self.values = Values(_WORD, values)
        self.name = f"{_WORD}:ratio={ratio!r},values={values}"
        self.reducible = values == "fp32"
        """Whether payloads of one key and spec can be added up, as numbers of the spec's dtype."""

    def error_bound(self, spec: Spec) -> float:
        """‖Δ‖₂ / ‖x‖₂ at worst: everything lies where nothing is sent."""
        n, k = self._layout(spec)
        values = self.values.error_bound(spec.dtype, [k]) if n else 0.0
        return values if k == n else max(1.0, values)

    def size_bytes(self, spec: Spec) -> int:
        n, k = self._layout(spec)
        return self.values.size_bytes(spec.dtype, [k]) if n else 0

    def encode(self, tensor: Tensor, key: int = 0) -> Encoded:
        """Raises CodecError for what is no floating point tensor, and for NaN and infinities."""
        x = flat(_WORD, tensor)
        n, k = self._layout(shape_of(tensor))
        if n == 0:
            return Encoded(b"", ())
        check_finite(_WORD, x)
        key &= 2**64 - 1
        numbers = x[positions(n, k, key, x.device)]
        return Encoded(_HEADER.pack(key, k), tuple(self.values.encode(numbers, [k], key)))

    def decode(
        self, spec: Spec, header: bytes, data: memoryview, device: str | torch.device = "cpu"
    ) -> Tensor:
        """The tensor that was encoded, with 0 where no number was kept; raises as `Codec.decode`
        does."""
        dtype = dtype_of(_WORD, spec)
        n, k = self._layout(spec)
        check_length(_WORD, "header", _HEADER.size if n else 0, len(header))
        key, sent = _HEADER.unpack(header) if header else (0, k)
        if sent != k:
            raise CodecError(f"{_WORD} header: expected {k} kept numbers of {n}, got {sent}")
        numbers = self.values.decode(spec.dtype, [k] if n else [], data, device)
        out = torch.zeros(n, dtype=dtype, device=device)
        if n:
            out.index_copy_(0, positions(n, k, key, device), numbers)
        return out.view(spec.sizes)

    def _layout(self, spec: Spec) -> tuple[int, int]:
        n = count(_WORD, spec)
        return n, kept(_WORD, n, self.ratio) if n else 0
