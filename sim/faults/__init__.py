"""What goes wrong in a world, and when."""

__all__ = [
    "churn",
    "damage",
    "faults",
]
