"""Blobs that a peer fetches, keeps and gives to others of its run, and the weights that are read
from them."""

__all__ = [
    "cache",
    "fetching",
    "read_ahead",
    "sharing",
    "starting",
    "weight_shards",
    "weights",
]
