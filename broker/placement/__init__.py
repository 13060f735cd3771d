"""Which waiting run gets which peers, and when a running plan gives way to a better one."""

__all__ = [
    "bad_formation",
    "datasets",
    "placing",
    "promise",
    "reconsider",
    "shares",
    "waiting",
]
