"""A crossing of chain.py: a tensor becomes bytes by a codec of Shoal and is decoded from
these bytes alone; what it cost and what it lost is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from shoal.compression.codec import Stream, fitting, parse
from shoal.compression.sparse.support import Support, positions
from shoal.dag.ir.graph import TensorSpec

__all__ = ["SUPPORT", "Codecs", "Crossing", "Use"]

SUPPORT = "support"
"""The word of the codec that sends gradients only of what the activation kept; both ends know which
that is, so no index travels. It is the true gradient of the network with the sparse activation in
it."""


@dataclass(frozen=True, slots=True)
class Codecs:
    """What a run sends with: codec texts, one per cut from the first on."""

    activation: Sequence[str]
    activation_grad: Sequence[str]
    """SUPPORT instead of a codec: the exact backward of a sparse activation."""
    grad: str = "raw"
    """Of parameter gradients, between replicas."""
    replicas: int = 1
    ahead: bool = False
    """Whether replicas exchange updates that step ahead (peer/sync/ahead.py)."""


@dataclass
class Use:
    """What one (role, cut) has carried in training."""

    tensors: int = 0
    dense_bytes: int = 0
    sent_bytes: int = 0
    errors: list[float] = field(default_factory=list)
    """‖Δ‖₂ / ‖x‖₂ of samples, against what the sender meant to send."""


class Crossing:
    """One tensor's way from peer to peer, again and again: both ends of a stream."""

    SAMPLE_EVERY = 40

    def __init__(self, text: str, use: Use | None = None) -> None:
        self.text, self.use = text, use
        self._ends: tuple[Stream, Stream] | None = None

    def __call__(self, tensor: Tensor, key: int) -> Tensor:
        """What comes out of the bytes."""
        spec = _spec(tensor)
        if self._ends is None:
            codec = fitting(parse(self.text), spec)
            self._ends = Stream(codec), Stream(codec)
        sender, receiver = self._ends
        encoded = sender.encode(tensor, key)
        data = bytearray().join(encoded.buffers)
        came = receiver.decode(spec, encoded.header, memoryview(data))
        self._count(tensor, came, encoded.size_bytes + len(encoded.header))
        return came

    @property
    def unsent(self) -> Tensor | None:
        """What the sender's codec holds back."""
        return self._ends[0].state.get("residual") if self._ends else None

    def on_support(self, tensor: Tensor, value: Tensor, key: int) -> Tensor:
        """A gradient of what came out of the bytes of `value`, whose zeros have none."""
        codec = parse(self.text)
        assert isinstance(codec, Support)
        state = {"positions": positions(value)}
        encoded, _ = codec.encode(tensor, state, key)
        data = bytearray().join(encoded.buffers)
        came, _ = codec.decode(_spec(tensor), encoded.header, memoryview(data), state)
        self._count(tensor, came, encoded.size_bytes + len(encoded.header))
        return came

    def _count(self, tensor: Tensor, came: Tensor, sent_bytes: int) -> None:
        if self.use is None:
            return
        if self.use.tensors % self.SAMPLE_EVERY == 0:
            norm = float(tensor.norm())
            if norm > 0:
                self.use.errors.append(float((came - tensor).norm()) / norm)
        self.use.tensors += 1
        self.use.dense_bytes += tensor.numel() * tensor.element_size()
        self.use.sent_bytes += sent_bytes


def _spec(tensor: Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
