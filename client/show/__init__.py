"""What a person reads of a run and of a plan."""

__all__ = [
    "logs",
    "preview",
    "progress",
    "text",
    "wire",
]
