"""Candidates, and the one judge of what they cost."""

__all__ = [
    "batchings",
    "candidate",
    "judge",
    "partition",
    "predicted",
    "rows",
    "shortage",
    "structure",
]
