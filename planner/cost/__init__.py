"""Candidates, and the one judge of what they cost."""

__all__ = [
    "batchings",
    "candidate",
    "cost_model",
    "partition",
    "plan_cost",
    "predicted",
    "rows",
    "shortage",
    "structure",
]
