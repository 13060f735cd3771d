"""What a codec is: tensor ↔ bytes, with the size known beforehand and the error bounded.

A codec is three calls (encode, decode, size) and a stated error bound. It knows nothing of peers,
plans or sockets. What it writes describes itself: name, header and spec are enough to decode.

- `encode` may return views of the tensor's own memory. Whoever holds an `Encoded` must leave the
  tensor unchanged until the bytes are no longer needed (for a frame: until it is acknowledged).
- `decode` may return a tensor that lives in `data`. Whoever decodes gives the buffer away.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

__all__ = ["Codec", "CodecError", "Encoded", "Spec"]


class CodecError(ValueError):
    """Bytes that do not decode to what was announced; the message says expected and got."""


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


class Codec(Protocol):
    """One way to write tensors. Stateless: feedback and policies are wrappers around a codec."""

    @property
    def name(self) -> str:
        """Name and version of the format, e.g. "raw/1"; a changed format is another version."""

    @property
    def error_bound(self) -> float:
        """Most that decode(encode(x)) differs from x, ‖Δ‖₂ / ‖x‖₂; 0: bit for bit the same."""

    def encode(self, tensor: torch.Tensor) -> Encoded:
        """The tensor's bytes. Raises CodecError for a dtype or layout it cannot write."""

    def decode(
        self, spec: Spec, header: bytes, data: memoryview, device: str | torch.device = "cpu"
    ) -> torch.Tensor:
        """The tensor on `device`, contiguous; `data` is flat and writable, and is given away.

        Raises CodecError when header or data cannot belong to such a tensor; never another error,
        whatever the bytes are.
        """

    def size_bytes(self, spec: Spec) -> int:
        """Exactly what `encode` gives for such a tensor, or the most that it can give where the
        size depends on the content; nothing is encoded."""
