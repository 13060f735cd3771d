"""Which waiting run gets which peers, and when a running plan gives way to a better one."""

__all__ = [
    "bad_plan",
    "datasets",
    "placing",
    "promise",
    "reconsider",
    "shares",
    "waiting",
]
