"""The change against what both ends hold: for a stream of tensors that resemble each other.

    d = x - h        sent: C(d)        h' = h + C(d) at both ends, and what is decoded is h'

h is what was decoded last, in the tensor's dtype; sums are made in float32 (float64 for float64).
A constant x is approached as C's error allows: ‖x - h'‖ ≤ b·‖x - h‖ + rounding, b the bound of C.

The first tensor has no h. It goes by int8 where C's bytes are fewer than those of int8, so that the
start is close (a sparse C would need n/k tensors for that), otherwise by C itself.

State at both ends: `held`, h; `count`, int64 (), the tensors so far. The header is the count, 8
bytes, before C's header: a payload that came out of order, or twice, is refused.

An element of h that is not finite counts as 0 for the next tensor, so NaN does not stay.

Cost over C, n bytes of x: the sender decodes what it wrote, and about 4 passes over n at each end.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from ..checks import check_state, count, dtype_name, dtype_of, flat
from ..echo import all_finite, echo, narrowed, shape_of, wide
from ..interface import Codec, CodecError, Encoded, Spec, State, StatefulCodec, typical_bytes
from ..plain.block import int8
from .feedback import stateless

__all__ = ["Delta", "counted"]

_COUNT = struct.Struct("<Q")


class Delta:
    """The codec delta: sends the change against the tensor that both ends already hold."""

    stateful = True
    varying = True
    both_know = True
    """The states of both ends are equal after each tensor."""

    def __init__(self, inner: Codec | StatefulCodec) -> None:
        self.inner = stateless("delta", inner)
        self.name = f"delta/1+{self.inner.name}"
        self._near = int8()

    def error_bound(self, spec: Spec) -> float:
        """The bound of the change's error: ‖x - h'‖₂ / ‖x - h‖₂; for the first tensor of x
        itself."""
        rounding = torch.finfo(dtype_of(self.name, spec)).eps
        return max(self.inner.error_bound(spec), self._first(spec).error_bound(spec)) + rounding

    def size_bytes(self, spec: Spec) -> int:
        """The most bytes of the first tensor; later ones have `typical_bytes`."""
        return max(self.inner.size_bytes(spec), self._first(spec).size_bytes(spec))

    def typical_bytes(self, spec: Spec) -> int:
        """The bytes of every tensor after the first."""
        return typical_bytes(self.inner, spec)

    def encode(self, tensor: Tensor, state: State, key: int = 0) -> tuple[Encoded, State]:
        spec = shape_of(tensor)
        held, number = self._held(spec, state, tensor.device)
        x = flat(self.name, tensor).view(spec.sizes)
        if held is None:
            codec, change = self._first(spec), x
        else:
            codec = self.inner
            change = narrowed(x.to(held.dtype) - held, x.dtype)
            if not all_finite(change):
                # A change beyond the dtype takes two tensors; what is not finite stays so.
                most = torch.finfo(change.dtype).max
                change = torch.where(x.isfinite(), change.clamp(-most, most), change)
        inner = codec.encode(change, key)
        now = self._joined(held, echo(codec, spec, inner, tensor.device))
        return Encoded(_COUNT.pack(number) + inner.header, inner.buffers), _state(now, number)

    def decode(
        self,
        spec: Spec,
        header: bytes,
        data: memoryview,
        state: State,
        device: str | torch.device = "cpu",
    ) -> tuple[Tensor, State]:
        """The tensor is the one in the new state as well: nobody may write to it."""
        held, number = self._held(spec, state, torch.device(device))
        inner_header = counted(self.name, header, number)
        codec = self._first(spec) if held is None else self.inner
        now = self._joined(held, codec.decode(spec, inner_header, data, device))
        return now, _state(now, number)

    def _first(self, spec: Spec) -> Codec:
        near = self._near.size_bytes(spec) > self.inner.size_bytes(spec)
        return self._near if near else self.inner

    def _held(self, spec: Spec, state: State, device: torch.device) -> tuple[Tensor | None, int]:
        """h, ready to be added to, and the number of tensors so far."""
        dtype = dtype_of(self.name, spec)
        count(self.name, spec)
        if not state:
            return None, 0
        check_state(self.name, state, "held", "count")
        held, number = state["held"], state["count"]
        if tuple(held.shape) != tuple(spec.sizes) or held.dtype is not dtype:
            raise CodecError(
                f"{self.name}: expected to hold {spec.dtype} {list(spec.sizes)}, got "
                f"{dtype_name(held)} {list(held.shape)}: the state is of another tensor"
            )
        held = held.to(device, wide(dtype))
        if not all_finite(held):
            held = torch.where(held.isfinite(), held, 0.0)
        return held, int(number)

    def _joined(self, held: Tensor | None, decoded: Tensor) -> Tensor:
        return decoded if held is None else narrowed(held + decoded, decoded.dtype).contiguous()


def _state(held: Tensor, number: int) -> State:
    return {"held": held, "count": torch.tensor(number + 1)}


def counted(codec: str, header: bytes, number: int) -> bytes:
    """The rest of a header that begins with the count of its payload. Raises CodecError unless the
    count is `number`, that of this end's state."""
    if len(header) < _COUNT.size:
        raise CodecError(
            f"{codec} header: expected {_COUNT.size} bytes or more, got {len(header)} (truncated)"
        )
    (got,) = _COUNT.unpack_from(header)
    if got != number:
        raise CodecError(
            f"{codec}: expected tensor {number} of the stream, got {got}: the ends are not at the "
            "same tensor; both have to start from the same snapshot"
        )
    return header[_COUNT.size :]
