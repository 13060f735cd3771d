"""support/1: the gradient of a value that travelled sparsely, where the value was not zero.

A codec that sends some numbers of a value and 0 for the others has the gradient 0 for the others:
only these positions have one, and both ends know them from the value, so no index travels back.
This is the exact gradient of the network with the sparse value in it (methods of sparsified
activations call it exact; a top-k of the gradient's own choice is another, worse one).

    data = values at the positions of the value that are not 0, in their order     (`values.py`)

The state {"positions": (m,) int64, ascending} comes from outside, with each value
(`peer/compute/frame_codecs/streams.py`). `ratio` is that of the value's codec: it bounds m for
those who plan.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import check_length, count, dtype_of, flat
from ..echo import all_finite
from ..interface import CodecError, Encoded, Spec, State
from .topk import kept
from .values import Values

__all__ = ["Support", "positions"]

_WORD = "support/1"


def positions(value: Tensor) -> Tensor:
    """(m,) int64: where a value is not 0, NaN included; what both ends keep of it."""
    return value.detach().reshape(-1).nonzero().view(-1)


class Support:
    """The codec support: sends a gradient only where the value that travelled was not zero. `ratio`
    >= 1; `values` of `values.VALUES`."""

    stateful = True
    varying = True
    """A kept number can be 0, so payloads may be smaller than `size_bytes`."""

    def __init__(self, ratio: float = 100.0, values: str = "bf16") -> None:
        kept(_WORD, 1, ratio)
        self.ratio = ratio
        self.values = Values(_WORD, values)
        self.name = f"{_WORD}:ratio={ratio!r},values={values}"

    def error_bound(self, spec: Spec) -> float:
        """1: of a gradient that is 0 on the support everything is left out. That belongs to the
        network with the sparse value, and is no error of it; there only the values' rounding is."""
        return 1.0 + self.values.error_bound(spec.dtype, [self._most(spec)])

    def state_bytes(self, spec: Spec) -> int:
        """Bytes that each end keeps for the positions, from the value to its gradient."""
        return 8 * self._most(spec)

    def size_bytes(self, spec: Spec) -> int:
        return self.values.size_bytes(spec.dtype, [self._most(spec)]) if self._most(spec) else 0

    def encode(self, tensor: Tensor, state: State, key: int = 0) -> tuple[Encoded, State]:
        """Raises CodecError without the value's positions, and for a gradient that is not finite
        where the value is 0: it would be lost."""
        x = flat(_WORD, tensor)
        n = x.numel()
        at = self._positions(state, n)
        numbers = x[at]
        if not all_finite(x) and int(x.isfinite().sum()) != n - at.numel() + int(
            numbers.isfinite().sum()
        ):
            raise CodecError(
                f"{_WORD}: the gradient is NaN or infinite where its value was not sent: expected "
                "finite numbers there"
            )
        return Encoded(b"", tuple(self.values.encode(numbers, _pieces(at), key))), state

    def decode(
        self,
        spec: Spec,
        header: bytes,
        data: memoryview,
        state: State,
        device: str | torch.device = "cpu",
    ) -> tuple[Tensor, State]:
        dtype, n = dtype_of(_WORD, spec), count(_WORD, spec)
        check_length(_WORD, "header", 0, len(header))
        at = self._positions(state, n).to(device)
        if not at.numel():
            check_length(_WORD, "data", 0, data.nbytes)
        out = torch.zeros(n, dtype=dtype, device=device)
        if at.numel():
            out[at] = self.values.decode(spec.dtype, _pieces(at), data, device)
        return out.view(spec.sizes), state

    def _most(self, spec: Spec) -> int:
        n = count(_WORD, spec)
        return kept(_WORD, n, self.ratio) if n else 0

    def _positions(self, state: State, n: int) -> Tensor:
        at = state.get("positions")
        if at is None:
            raise CodecError(f"{_WORD}: expected the positions of the value, got none")
        if at.dtype is not torch.int64 or at.dim() != 1 or at.numel() > n:
            raise CodecError(f"{_WORD}: expected up to {n} positions, got {tuple(at.shape)}")
        if at.numel() and int(at[-1]) >= n:
            raise CodecError(f"{_WORD}: position {int(at[-1])} is of another tensor: {n} elements")
        return at


def _pieces(at: Tensor) -> list[int]:
    return [at.numel()] if at.numel() else []
