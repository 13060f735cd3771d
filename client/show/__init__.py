"""What a person reads of a run and of a plan."""

__all__ = [
    "formation",
    "logs",
    "preview",
    "progress",
    "step_chart",
    "text",
    "wire",
]
