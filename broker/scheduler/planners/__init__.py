"""All planners by name, and how a better plan is told from noise."""

__all__ = [
    "alternatives",
    "auto",
    "coded",
    "exact",
    "planners",
    "replan",
    "swapped",
]
