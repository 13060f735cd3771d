"""Hashes in the place of tensors, and what they must come to."""

__all__ = [
    "device",
    "exchange",
    "hashes",
    "plan",
    "round_hashes",
    "rounds",
    "stage_hash",
    "work",
]
