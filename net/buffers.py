"""Memory for frames that arrive."""

from __future__ import annotations

import numpy as np

__all__ = ["allocate"]


def allocate(size_bytes: int) -> memoryview:
    """A flat writable buffer; pages are touched only when bytes come. Raises MemoryError."""
    return np.empty(size_bytes, dtype=np.uint8).data
