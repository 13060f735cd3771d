"""What a trace says of a run in numbers, and in one sentence."""

__all__ = [
    "critical",
    "measure",
    "moments",
    "verdict",
]
