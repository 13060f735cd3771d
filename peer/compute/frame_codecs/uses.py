"""What frames took, by link, role and codec, since it was last told: for a step's report."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ....compression.codec import AnyCodec
from ....dag.schedule.flow import Transfer
from ....proto import broker_pb2

__all__ = ["SAMPLED_EVERY", "Uses"]

SAMPLED_EVERY = 20
"""Steps between two samples of a codec's error: each costs a decoding of one tensor."""


class Uses:
    """Counts what frames took, by link, role and codec, for a step's report. Counts up; `take`
    begins anew. Safe to use from several threads. `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._found: dict[tuple[str, str, str, str], broker_pb2.LinkUse] = {}
        self._sampled: dict[tuple[str, str, str, str], int] = {}
        """The step of the newest sample."""

    @contextmanager
    def encoding(self, transfer: Transfer, codec: AnyCodec) -> Iterator[None]:
        """Counts the seconds in here as spent encoding."""
        began = self._clock()
        yield
        seconds = self._clock() - began
        with self._lock:
            self._use(transfer, codec).encode_s += seconds

    @contextmanager
    def decoding(self, transfer: Transfer, codec: AnyCodec) -> Iterator[None]:
        """Counts the seconds in here as spent decoding."""
        began = self._clock()
        yield
        seconds = self._clock() - began
        with self._lock:
            self._use(transfer, codec).decode_s += seconds

    def sent(self, transfer: Transfer, codec: AnyCodec, size_bytes: int, dense_bytes: int) -> None:
        """A frame left with `size_bytes` in place of `dense_bytes`."""
        with self._lock:
            use = self._use(transfer, codec)
            use.bytes += size_bytes
            use.dense_bytes += dense_bytes

    def samples(self, step: int, transfer: Transfer, codec: AnyCodec) -> bool:
        """Whether the error of this tensor is wanted: of one in the first step, and of one in every
        20th."""
        with self._lock:
            key = _key(transfer, codec)
            due = step >= self._sampled.get(key, -SAMPLED_EVERY) + SAMPLED_EVERY
            if due:
                self._sampled[key] = step
            return due

    def sampled(self, transfer: Transfer, codec: AnyCodec, sent: Tensor, heard: Tensor) -> None:
        """What one tensor became: ‖heard - sent‖₂ / ‖sent‖₂. One without a norm says nothing."""
        wide = torch.promote_types(sent.dtype, torch.float32)
        sent = sent.detach()
        norm = float(sent.norm(dtype=wide))
        error = float((heard.to(wide) - sent).norm()) / norm if norm else math.nan
        if math.isfinite(error):
            with self._lock:
                self._use(transfer, codec).error = error

    def take(self) -> tuple[broker_pb2.LinkUse, ...]:
        """What was counted since the last call, in order of first use."""
        with self._lock:
            found, self._found = tuple(self._found.values()), {}
        return found

    def _use(self, transfer: Transfer, codec: AnyCodec) -> broker_pb2.LinkUse:
        key = source, destination, role, text = _key(transfer, codec)
        if key not in self._found:
            self._found[key] = broker_pb2.LinkUse(
                source=source, destination=destination, role=role, codec=text
            )
        return self._found[key]


def _key(transfer: Transfer, codec: AnyCodec) -> tuple[str, str, str, str]:
    return transfer.source, transfer.destination, transfer.role.value, codec.name
