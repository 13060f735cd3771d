"""Memory for frames that arrive: kept warm, and used again when nobody looks at it any more.

A fresh page costs far more than the copy into it (measured: 0.5 GB/s with page faults, 8 GB/s
without). Frames of a run have the same few sizes in every step, so buffers are kept by size. A
buffer is free again when nothing refers to it: neither the link nor a tensor that was made in it,
nor what autograd saved of that tensor. Nobody has to give it back, and nobody can do so too early.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

__all__ = ["Buffers", "TrimmedHeap", "keep_heap_warm", "trim_heap"]

_PAGE_BYTES = 4096
_SMALL_BYTES = 64 * 1024
"""Smaller ones come from the heap, which keeps them warm itself."""

Array = NDArray[np.uint8]


class Buffers:
    """Gives buffers. Of those that are free it keeps at most `keep_bytes`, the latest used."""

    def __init__(self, keep_bytes: int = 512 * 1024**2) -> None:
        self._keep_bytes = keep_bytes
        self._arrays: OrderedDict[int, list[Array]] = OrderedDict()  # by size, latest used last

    def take(self, size_bytes: int) -> memoryview:
        """A flat writable buffer; it is the caller's as long as he, or a view of it, is there.
        Raises MemoryError."""
        if size_bytes < _SMALL_BYTES:
            return np.empty(size_bytes, dtype=np.uint8).data
        size = -(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES
        arrays = self._arrays.get(size, [])
        found = next((i for i in range(len(arrays)) if _is_free(arrays, i)), None)
        if found is None:
            self._trim(self._keep_bytes)
            arrays = self._arrays.setdefault(size, [])
            arrays.append(np.empty(size, dtype=np.uint8))
            found = -1
        self._arrays.move_to_end(size)
        return arrays[found].data[:size_bytes]

    def trim(self) -> None:
        """Lets go of all that is free."""
        self._trim(0)

    def _trim(self, keep_bytes: int) -> None:
        kept = 0
        for size in reversed(list(self._arrays)):
            arrays = self._arrays[size]
            for i in range(len(arrays) - 1, -1, -1):
                if _is_free(arrays, i):
                    kept += size
                    if kept > keep_bytes:
                        del arrays[i]
            if not arrays:
                del self._arrays[size]

    @property
    def size_bytes(self) -> int:
        """Bytes of all buffers, in use or free."""
        return sum(size * len(arrays) for size, arrays in self._arrays.items())

    def __repr__(self) -> str:
        free = sum(_is_free(a, i) for a in self._arrays.values() for i in range(len(a)))
        return f"<Buffers {self.size_bytes} bytes in {len(self._arrays)} sizes, {free} free>"


def _references(arrays: list[Array], i: int) -> int:
    return sys.getrefcount(arrays[i])


_UNSHARED = _references([np.empty(0, dtype=np.uint8)], 0)


def _is_free(arrays: list[Array], i: int) -> bool:
    """Whether only the list refers to the array. A memoryview refers to its array, a tensor made
    with torch.frombuffer to its memoryview; so the count of CPython says it all."""
    return _references(arrays, i) == _UNSHARED


def keep_heap_warm() -> None:
    """Makes glibc keep freed memory for the next message instead of giving it back at once.

    A message of 1 MiB is allocated twice on its way out (by Python and by gRPC). With glibc's first
    settings each comes with fresh pages: 1.65 s of CPU per GB sent instead of 0.6 (measured). The
    settings are those that glibc itself comes to once a block of 32 MiB was freed; at most 64 MiB
    stay unused for it. Elsewhere than on glibc nothing happens.
    """
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # another C library
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(_M_MMAP_THRESHOLD, 32 * 1024**2)
            mallopt(_M_TRIM_THRESHOLD, 64 * 1024**2)


def trim_heap() -> None:
    """Makes glibc give back what was freed and lies between what is in use: to be called behind
    much reading, of which little stays. Elsewhere than on glibc nothing happens."""
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)


class TrimmedHeap:
    """Has the heap trimmed behind each `every` bytes that are counted, which takes a millisecond or
    two."""

    def __init__(self, every: int = 64 << 20) -> None:
        self._every, self._counted = every, 0

    def count(self, size: int) -> None:
        """Count bytes that were made and take the place of others, which are free by now."""
        self._counted += size
        if self._counted > self._every:
            self._counted = 0
            trim_heap()


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
