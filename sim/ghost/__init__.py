"""Hashes in the place of tensors, and what they must come to."""

__all__ = [
    "device",
    "exchange",
    "hashes",
    "plan",
    "stage_hash",
    "work",
]
