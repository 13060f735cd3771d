"""Codecs that send few of the elements: which ones, where they are, and their numbers."""

__all__ = [
    "indices",
    "randomk",
    "select",
    "support",
    "topk",
    "values",
]
