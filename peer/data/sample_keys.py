"""Keys of samples, such as the speaker of a line, as shards have them: integers as they are, and
text as UTF-8, as many bytes as the longest has."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["as_keys", "stored"]

_Array = npt.NDArray[Any]


def stored(keys: _Array) -> _Array:
    """Return keys as a column has them: text, (samples,), as (samples, bytes), uint8, filled up
    with zeros; whatever else as it is."""
    if keys.dtype.kind != "U" or keys.ndim != 1:
        return keys
    found = np.char.encode(keys, "utf-8")
    return found.view(np.uint8).reshape(len(found), max(1, found.dtype.itemsize))


def as_keys(column: _Array) -> _Array:
    """Return the keys of a column: (samples,), integers or text. Raises UnicodeDecodeError for what
    `stored` did not make."""
    if column.ndim == 2 and column.dtype == np.uint8:
        found = np.ascontiguousarray(column).view(f"S{column.shape[1]}").reshape(-1)
        return np.char.decode(found, "utf-8")
    return column
