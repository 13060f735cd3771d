"""Error feedback: what a codec does not send now is sent later.

    p = x + d·r        sent: C(p)        r' = p - C(p)        d = 1 (`ef`), 0.9 (`efd`)

x the tensor, r the residual of all earlier ones, C(p) what the other end decodes; r = 0 at first.
With d = 1 the sum of all that was sent and r' is the sum of all x (Karimireddy et al. 2019,
1901.09847, algorithm 2). With d < 1 a share 1 - d of r is given up each time, so that it cannot
grow old; the rest stands as before.

Only the sender has a state: `residual`, of the tensor's shape, float32 (float64 for float64). The
other end decodes as the inner codec does, so the bytes are those of the inner codec.

The residual is always finite. Where x is not, the inner codec gets it as it is, and r' is 0: there
was no number to keep. Where C(p) is not finite though p is, nothing of p came there, and r' = p.

Cost over the inner codec, n bytes of x: the sender decodes what it wrote, and makes about 5 passes
over n.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from ..checks import check_state, dtype_of, flat
from ..echo import TensorShape, all_finite, echo, narrowed, shape_of, wide
from ..interface import Codec, CodecError, Encoded, Spec, State, StatefulCodec, typical_bytes

__all__ = ["Feedback", "decayed_feedback", "feedback", "stateless"]

DECAY = 0.9


def stateless(wrapper: str, inner: Codec | StatefulCodec) -> Codec:
    """`inner`, when it has no state. Raises CodecError otherwise: two states would have to agree on
    what the other end holds."""
    if getattr(inner, "stateful", False):
        raise CodecError(f"{wrapper}+{inner.name}: expected a codec without state inside")
    return cast(Codec, inner)


class Feedback:
    """Error feedback around a codec: what is not sent now is added to the next tensor. `decay` is
    d."""

    stateful = True
    both_know = False
    """Only the sender has a state."""

    def __init__(self, inner: Codec | StatefulCodec, word: str, decay: float) -> None:
        self.inner = stateless(word, inner)
        self.decay = decay
        self.name = f"{word}/1+{self.inner.name}"
        self.varying: bool = getattr(inner, "varying", False)

    def error_bound(self, spec: Spec) -> float:
        """The bound of the error of p, not of x: ‖C(p) - p‖₂ / ‖p‖₂."""
        return self.inner.error_bound(spec)

    def size_bytes(self, spec: Spec) -> int:
        return self.inner.size_bytes(spec)

    def typical_bytes(self, spec: Spec) -> int:
        return typical_bytes(self.inner, spec)

    def encode(self, tensor: Tensor, state: State, key: int = 0) -> tuple[Encoded, State]:
        spec = shape_of(tensor)
        dtype = dtype_of(self.name, spec)
        residual = self._residual(spec, state)
        # A copy, for the inner codec may keep views of it.
        whole = flat(self.name, tensor).to(wide(dtype), copy=True).view(spec.sizes)
        if residual is not None:
            whole.add_(residual.to(whole.device), alpha=self.decay)
        encoded = self.inner.encode(narrowed(whole, dtype), key)
        decoded = echo(self.inner, spec, encoded, whole.device)
        left = whole - decoded
        if not all_finite(left):
            left = torch.where(decoded.isfinite(), left, whole)
            left = torch.where(left.isfinite(), left, 0.0)
        return encoded, {"residual": left}

    def decode(
        self,
        spec: Spec,
        header: bytes,
        data: memoryview,
        state: State,
        device: str | torch.device = "cpu",
    ) -> tuple[Tensor, State]:
        """The state is empty at this end and stays so."""
        if state:
            raise CodecError(
                f"{self.name} decodes without a state, got one of {', '.join(sorted(state))}"
            )
        return self.inner.decode(spec, header, data, device), state

    def _residual(self, spec: TensorShape, state: State) -> Tensor | None:
        if not state:
            return None
        expected = wide(dtype_of(self.name, spec))
        check_state(self.name, state, "residual")
        residual = state["residual"]
        if tuple(residual.shape) != spec.sizes or residual.dtype is not expected:
            raise CodecError(
                f"{self.name}: expected a residual of {expected} {list(spec.sizes)}, got "
                f"{residual.dtype} {list(residual.shape)}: the state is of another tensor"
            )
        return residual


def feedback(inner: Codec | StatefulCodec) -> Feedback:
    """`ef`: keeps all that was not sent."""
    return Feedback(inner, "ef", 1.0)


def decayed_feedback(inner: Codec | StatefulCodec) -> Feedback:
    """`efd`: multiplies the residual by 0.9 before it is added."""
    return Feedback(inner, "efd", DECAY)
