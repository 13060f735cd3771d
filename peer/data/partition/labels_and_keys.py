"""Labels and keys of a data set, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ....job.clients.partitioning import Partitioning
from ....job.settings import SettingsError
from ..manifest import DataError
from .variates import Ints

__all__ = ["MOST_COUNTS", "Columns", "read_columns"]

MOST_COUNTS = 2**27
"""Of the table of counts, clients times classes: 1 GiB."""


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Labels and keys as numbers. Without labels there is no class, and `of` is 0 everywhere;
    without keys likewise."""

    samples: int
    classes: Ints
    """(classes,): labels that there are, ascending."""
    of: Ints
    """(samples,): the number of each sample's label among these."""
    keys: npt.NDArray[np.generic]
    """(keys,): keys that there are, ascending."""
    key_of: Ints
    """(samples,): the number of each sample's key among these."""


def read_columns(
    settings: Partitioning,
    labels: npt.ArrayLike | None,
    keys: npt.ArrayLike | None,
    samples: int | None,
) -> Columns:
    """Labels and keys as the settings need them. Raises DataError; SettingsError for `samples`."""
    if samples is not None and (isinstance(samples, bool) or not isinstance(samples, int)):
        raise SettingsError("samples", f"is {samples!r}: expected an integer")
    kind = settings.kind
    if kind == "by-key" and keys is None:
        raise DataError('keys are missing: kind "by-key" needs one for each sample, of any names')
    if kind != "by-key" and keys is not None:
        raise DataError(
            f'there are keys, but kind "{kind}" does not use them: leave them out, or say "by-key"'
        )
    if kind in ("dirichlet", "shards") and labels is None:
        raise DataError(f'labels are missing: kind "{kind}" needs one integer for each sample')
    lengths: dict[str, int] = {}
    label, key = np.zeros(0, np.int64), np.zeros(0, np.int64)
    if labels is not None:
        label = _labels(labels)
        lengths["labels"] = label.size
    if keys is not None:
        key = _keys(keys)
        lengths["keys"] = key.size
    if samples is not None:
        lengths["samples"] = samples
    count = _same(lengths)
    classes, of = np.unique(label, return_inverse=True)
    names, key_of = np.unique(key, return_inverse=True)
    clients = settings.clients or names.size
    if clients * classes.size > MOST_COUNTS:
        raise DataError(
            f"labels have {classes.size:,} different values, for {clients:,} clients: expected "
            f"classes, and at most {MOST_COUNTS:,} counts of classes by client. Group the labels"
        )
    none = np.zeros(count, np.int64)
    return Columns(
        samples=count,
        classes=classes.astype(np.int64),
        of=of if classes.size else none,
        keys=names,
        key_of=key_of if names.size else none,
    )


def _array(what: str, values: Any) -> npt.NDArray[Any]:
    if np.ma.isMaskedArray(values):
        raise DataError(f"{what} are masked: expected one for each sample; leave out those without")
    try:
        found = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:  # a tensor on a card, rows of any length
        raise DataError(f"{what} are not readable as an array: {error}") from None
    if found.ndim != 1:
        raise DataError(
            f"{what} have the shape {found.shape}: expected (samples,), one for each sample"
            + ("; of one-hot rows give labels.argmax(1)" if found.ndim == 2 else "")
        )
    return found


def _labels(values: Any) -> Ints:
    found = _array("labels", values)
    if found.size == 0:
        raise DataError("labels are empty: expected one integer for each sample")
    if found.dtype.kind not in "iub":
        raise DataError(
            f"labels are of type {found.dtype}, such as {found[0]!r}: expected integers. "
            "np.unique(labels, return_inverse=True)[1] numbers what are names; convert floats that "
            "are whole, and group those that are not, by yourself"
        )
    if found.dtype.kind == "u" and found.max() > np.iinfo(np.int64).max:
        raise DataError(f"labels go up to {found.max()}: expected integers of 64 bits with a sign")
    return found.astype(np.int64)


def _keys(values: Any) -> npt.NDArray[Any]:
    found = _array("keys", values)
    if found.size == 0:
        raise DataError("keys are empty: expected one for each sample")
    if found.dtype.kind == "O" and all(isinstance(k, str) for k in found):
        return found.astype(str)
    if found.dtype.kind == "U" and not all(isinstance(k, str) for k in values):
        raise DataError("keys are of several types: expected all integers, or all text")
    if found.dtype.kind not in "iubUS":
        raise DataError(
            f"keys are of type {found.dtype}, such as {found[0]!r}: expected integers or text"
        )
    return found


def _same(lengths: dict[str, int]) -> int:
    """How many samples there are. Raises DataError where it is unknown or two differ."""
    if not lengths:
        raise DataError("neither labels nor a number is given: expected labels, or samples=N")
    (first, count), *others = lengths.items()
    for name, other in others:
        if other != count:
            raise DataError(
                f"{first} and {name} differ in length, {count:,} and {other:,}: expected one of "
                "each for every sample"
            )
    if count < 1:
        raise DataError(f"there are {count} samples: expected at least one")
    return count
