"""What a codec is: tensor ↔ bytes, with the size known beforehand and the error bounded.

A codec knows nothing of peers, plans or sockets. What it writes describes itself: name, header and
spec are enough to decode (and, for a stateful one, the state that both ends carry on).

- `encode` may return views of the tensor's own memory. Whoever holds an `Encoded` must leave the
  tensor unchanged until the bytes are no longer needed (for a frame: until it is acknowledged).
- `decode` may return a tensor that lives in `data`. Whoever decodes gives the buffer away.
- Numbers that are not finite stay what they are or come out as NaN, or `encode` refuses them; they
  never become ordinary numbers.
- Randomness is a function of `key` and the element's position, the same on every device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

__all__ = ["Codec", "CodecError", "Encoded", "Spec", "State", "StatefulCodec"]


class CodecError(ValueError):
    """Bytes that do not decode to what was announced, or a tensor or codec text that cannot be
    taken; the message says expected and got."""


class Spec(Protocol):
    """What a codec must know of a tensor; `dag.graph.TensorSpec`, bound, is one."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape, outermost dimension first; () for a scalar."""

    @property
    def dtype(self) -> str:
        """torch's name of the element type without `torch.`, e.g. "bfloat16"."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the elements, uncompressed."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A tensor as bytes: `buffers`, flat and in order, behind the codec's own `header`."""

    header: bytes
    buffers: tuple[memoryview, ...]

    @property
    def size_bytes(self) -> int:
        return sum(b.nbytes for b in self.buffers)


class _Described(Protocol):
    """What both kinds of codec say of themselves."""

    @property
    def name(self) -> str:
        """The text that `codec.parse` makes an equal codec of: word, version of the format and
        parameters, e.g. "raw/1", "topk/1:ratio=100,values=bf16". It goes with every frame."""

    def error_bound(self, spec: Spec) -> float:
        """Most that decode(encode(x)) differs from a finite x, ‖Δ‖₂ / ‖x‖₂; 0: bit for bit the
        same. What a codec loses stays in its residual where it has one."""

    def size_bytes(self, spec: Spec) -> int:
        """Exactly what `encode` gives for such a tensor, or the most that it can give where the
        size depends on the content; nothing is encoded. A codec of the second kind has an attribute
        `varying` = True, or a method `typical_bytes(spec)`: an estimate to plan with, for which
        `codec.typical_bytes` asks any codec."""


class Codec(_Described, Protocol):
    """One way to write tensors, without memory: equal arguments give equal bytes."""

    def encode(self, tensor: torch.Tensor, key: int = 0) -> Encoded:
        """The tensor's bytes. `key`: 64 bits that decide what is random in it. Raises CodecError
        for a dtype or layout it cannot write."""

    def decode(
        self, spec: Spec, header: bytes, data: memoryview, device: str | torch.device = "cpu"
    ) -> torch.Tensor:
        """The tensor on `device`, contiguous; `data` is flat and writable, and is given away.

        Raises CodecError when header or data cannot belong to such a tensor; never another error,
        whatever the bytes are. Allocates no more than a small multiple of `spec.size_bytes`.
        """


State = Mapping[str, "torch.Tensor"]
"""What an end of a stateful codec carries from one tensor to the next: named tensors, as a snapshot
keeps them. Empty: a beginning."""


class StatefulCodec(_Described, Protocol):
    """A codec whose ends remember: residuals, what both hold already, a basis. Pure all the same:
    the state comes in and a new one goes out; the old one is never written to, so that a refused
    payload changes nothing. `codec.py` carries the states."""

    def encode(self, tensor: torch.Tensor, state: State, key: int = 0) -> tuple[Encoded, State]:
        """As `Codec.encode`. Raises CodecError for a state of another tensor as well."""

    def decode(
        self,
        spec: Spec,
        header: bytes,
        data: memoryview,
        state: State,
        device: str | torch.device = "cpu",
    ) -> tuple[torch.Tensor, State]:
        """As `Codec.decode`. Raises CodecError for a state of another tensor as well."""


def typical_bytes(codec: Codec | StatefulCodec, spec: Spec) -> int:
    """Bytes to plan with. `size_bytes`, unless the codec's size depends on the content: such a one
    has a method `typical_bytes(spec)` for data as training has it, and its `size_bytes` is the
    most it can give."""
    typical = getattr(codec, "typical_bytes", codec.size_bytes)
    return int(typical(spec))
