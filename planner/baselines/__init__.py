"""Planners that the literature compares with."""

__all__ = [
    "baselines",
    "op_fence",
]
