"""Runs and their replicas: what they do about what happens to them."""

__all__ = [
    "context",
    "deadline",
    "enlisting",
    "handover",
    "lifecycle",
    "losses",
    "replays",
    "replica",
    "run",
    "snapshots",
    "term",
]
