"""The values of a run that wait on a device: arrived ones, and those that actions left for others.

Entries are shared by reference and never written to by whoever reads them: one tensor may stand
under several keys (a value that two stages read). Safe to use from several threads.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from ...net.links.frame import FrameKey

__all__ = ["Store", "StoredValue"]


@dataclass(frozen=True, slots=True)
class StoredValue:
    """`tensor` is None where no gradient came. `ready`: on CUDA, what a stream must wait for before
    it reads the tensor; None: nothing."""

    tensor: Tensor | None
    ready: torch.cuda.Event | None = None


class Store:
    """Keeps the values of a run that wait on a device, by the key of their frame."""

    def __init__(self) -> None:
        self._entries: dict[FrameKey, StoredValue] = {}
        self._lock = threading.Lock()

    def put(self, key: FrameKey, entry: StoredValue) -> None:
        """A second value for a key is dropped: the first one may be in use."""
        with self._lock:
            self._entries.setdefault(key, entry)

    def get(self, key: FrameKey) -> StoredValue:
        """Raises KeyError for a value that is not here."""
        return self._entries[key]

    def pop(self, key: FrameKey) -> StoredValue | None:
        with self._lock:
            return self._entries.pop(key, None)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: FrameKey) -> bool:
        return key in self._entries

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors in it, each counted once."""
        with self._lock:
            tensors = {id(e.tensor): e.tensor for e in self._entries.values()}
        return sum(t.numel() * t.element_size() for t in tensors.values() if t is not None)

    def __repr__(self) -> str:
        return f"<Store {len(self)} values, {self.size_bytes} bytes>"
