"""I5: what a codec does not send is in its residual, or its contract bounds how much is lost.

Each real device's streams are looked at as they encode. With feedback
(compression/stateful/feedback.py)

    x + d·r = C(p) + r'        r the residual that the last tensor of this stream left, d = 1 or 0.9

to float rounding, r bit for bit; without, ‖C(x) - x‖₂ ≤ bound · ‖x‖₂ where the codec has a bound.
Ghosts have no streams.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from ...compression.codec import Codec, CodecError, Encoded, is_stateful
from ...compression.interface import State
from ...compression.stateful.feedback import Feedback
from ...dag.schedule.flow import Transfer
from ...net.links.frame import FrameKey
from ...peer.compute.device import TorchDevice
from ...peer.compute.frame_codecs.codings import TransferCodec
from ...peer.compute.frame_codecs.streams import Streams, _End
from ...peer.core import events as p
from ..virtual.clock import Observed
from ..virtual.world import World
from .violation import Broken, Check

__all__ = ["CodecCheck"]

_ROUNDING = 1e-5

Encode = Callable[..., tuple[Encoded, "Tensor | None"]]


class CodecCheck(Check):
    """Checks I5: what a codec does not send is in its residual, or its loss is bounded."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._left: dict[int, tuple[_End, Tensor]] = {}
        """By stream's end: what its last tensor left. The end is kept, so that its id stays."""

    wants = (p.Built,)

    def observe(self, seen: Observed) -> None:
        if isinstance(seen.record, p.Built):
            device = self.world.peers[seen.who].device
            if isinstance(device, TorchDevice) and device._work is not None:
                streams = device._work.streams
                if "_encode" not in vars(streams):
                    streams._encode = self._checked(seen.who, streams)  # type: ignore[method-assign]

    def _checked(self, who: str, streams: Streams) -> Encode:
        encode = streams._encode

        def checked(
            end: _End,
            coding: TransferCodec,
            key: FrameKey,
            transfer: Transfer,
            tensor: Tensor,
            echo: bool = False,
        ) -> tuple[Encoded, Tensor | None]:
            held = end.stream.state
            wanted = tensor[: coding.body.elements] if coding.tail else tensor
            wanted = wanted.detach().clone()
            encoded, heard = encode(end, coding, key, transfer, tensor, echo=echo)
            if isinstance(coding.codec, Feedback):
                self._residual(f"{who}: {key}", end, held, coding, wanted, encoded)
            elif not is_stateful(coding.codec):
                self._bound(f"{who}: {key}", coding, wanted, encoded)
            return encoded, heard

        return checked

    def _residual(
        self,
        what: str,
        end: _End,
        held: State,
        coding: TransferCodec,
        tensor: Tensor,
        encoded: Encoded,
    ) -> None:
        codec = coding.codec
        assert isinstance(codec, Feedback)
        before, after = held.get("residual"), end.stream.state.get("residual")
        kept = self._left.get(id(end))
        if kept is not None and (before is None or not torch.equal(before, kept[1])):
            raise Broken("I5", f"{what}: the residual is not the one that the last tensor left")
        if after is None:
            raise Broken("I5", f"{what}: no residual is kept")
        self._left[id(end)] = end, after.clone()
        sent = _decoded(codec.inner, coding, encoded)
        carried = tensor.double() if before is None else tensor.double() + codec.decay * before
        lost = float((carried.view_as(sent) - sent.double() - after.view_as(sent)).norm())
        if lost > _ROUNDING * float(carried.norm()) + 1e-30:
            raise Broken(
                "I5",
                f"{what}: of a norm of {float(carried.norm()):.3g}, {lost:.3g} is neither sent nor "
                "kept",
            )

    def _bound(self, what: str, coding: TransferCodec, tensor: Tensor, encoded: Encoded) -> None:
        try:
            bound = coding.codec.error_bound(coding.body)
        except CodecError:
            return
        if not math.isfinite(bound):
            return
        sent = _decoded(cast(Codec, coding.codec), coding, encoded)
        lost = float((tensor.view_as(sent).double() - sent.double()).norm())
        most = (bound + 1e-6) * float(tensor.double().norm()) + 1e-30
        if lost > most:
            raise Broken("I5", f"{what}: {coding.codec.name} lost {lost:.3g}: at most {most:.3g}")


def _decoded(codec: Codec, coding: TransferCodec, encoded: Encoded) -> Tensor:
    """What the other end makes of the body."""
    data = bytearray().join(encoded.buffers)
    if coding.tail:
        del data[-coding.tail.size_bytes :]
    return codec.decode(coding.body, encoded.header, memoryview(data))
