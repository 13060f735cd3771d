"""One end of a stream of tensors that a codec carries: the codec and its state so far."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from .codec import AnyCodec, Codec, StatefulCodec
from .echo import echo
from .interface import Encoded, Spec, State

if TYPE_CHECKING:
    import torch

__all__ = ["Stream", "is_exact", "is_stateful"]


def is_stateful(codec: AnyCodec) -> bool:
    return getattr(codec, "stateful", False)


def is_exact(codec: AnyCodec, spec: Spec) -> bool:
    """Whether every tensor of this spec comes out bit for bit as it went in."""
    return not is_stateful(codec) and codec.error_bound(spec) == 0


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

    def echo(
        self, before: State, spec: Spec, encoded: Encoded, device: str | torch.device = "cpu"
    ) -> torch.Tensor:
        """What the other end makes of a tensor that this one encoded when its state was `before`.
        Changes nothing; costs what decoding costs."""
        known = before if getattr(self.codec, "both_know", False) else {}
        return echo(Stream(self.codec, known), spec, encoded, device)
