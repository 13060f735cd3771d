"""Codecs that send few of the elements: which ones, where they are, and their numbers."""

__all__ = [
    "chunks",
    "indices",
    "masks",
    "nonzero",
    "randomk",
    "select",
    "support",
    "topk",
    "values",
]
