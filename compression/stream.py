"""One end of a stream of tensors that a codec carries: the codec and its state so far."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from .codec import AnyCodec, Codec, StatefulCodec
from .interface import Encoded, Spec, State

if TYPE_CHECKING:
    import torch

__all__ = ["Stream", "is_stateful"]


def is_stateful(codec: AnyCodec) -> bool:
    return getattr(codec, "stateful", False)


class Stream:
    """Encodes or decodes one tensor after the other; an end does one of the two.

    `state` may be read between calls, kept in a snapshot, and set to go on from there. A call that
    raises leaves it as it was.
    """

    def __init__(self, codec: AnyCodec, state: State | None = None) -> None:
        self.codec = codec
        self.state: State = state or {}

    def encode(self, tensor: torch.Tensor, key: int = 0) -> Encoded:
        """Raises CodecError."""
        if not is_stateful(self.codec):
            return cast(Codec, self.codec).encode(tensor, key)
        encoded, self.state = cast(StatefulCodec, self.codec).encode(tensor, self.state, key)
        return encoded

    def decode(
        self, spec: Spec, header: bytes, data: memoryview, device: str | torch.device = "cpu"
    ) -> torch.Tensor:
        """Raises CodecError."""
        if not is_stateful(self.codec):
            return cast(Codec, self.codec).decode(spec, header, data, device)
        codec = cast(StatefulCodec, self.codec)
        tensor, self.state = codec.decode(spec, header, data, self.state, device)
        return tensor
