"""Data of a run: resolved once by the submitter, then read by content hash only.

`sources` (submitter) makes a `Manifest` and its shards; `sampler` says which samples a microbatch
has; `Reader` (peer) turns both into tensors.
"""

from .manifest import Column, DataError, Manifest, Shard
from .reader import Reader
from .sampler import Sampler

__all__ = ["Column", "DataError", "Manifest", "Reader", "Sampler", "Shard"]
