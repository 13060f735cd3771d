"""The partition of a run's training data among its clients, as submitter and peers make it."""

from __future__ import annotations

import numpy as np

from ....job.clients.partitioning import Partitioning
from ....job.settings import SettingsError
from ..manifest import DataError
from ..reader import Reader
from ..sample_keys import as_keys
from .client_sets import Partition
from .divide import divide
from .labels_and_keys import read_columns

__all__ = ["partition_of"]

_OF_LABELS = ("dirichlet", "shards")


def partition_of(settings: Partitioning, column: str, reader: Reader) -> Partition:
    """Return who has which of the samples that are trained on. column: of labels. Raises
    SettingsError, DataError."""
    manifest, labels, keys = reader.manifest, None, None
    if manifest.kind != "arrays":
        raise SettingsError(
            "data.partition", f'divides arrays, and data.kind is "{manifest.kind}": expected arrays'
        )
    if settings.kind in _OF_LABELS:
        found = np.concatenate([*reader.pieces(column)])[: manifest.train]
        labels = found.reshape(len(found), -1)[:, 0] if found[0].size == 1 else found
    if settings.kind == "by-key":
        if manifest.key != settings.key:
            raise DataError(
                f"the data has {manifest.key!r} as its keys, and data.partition.key is "
                f"{settings.key!r}: expected one name"
            )
        keys = as_keys(np.concatenate([*reader.pieces(manifest.key)])[: manifest.train])
    return divide(settings, read_columns(settings, labels, keys, manifest.train))
