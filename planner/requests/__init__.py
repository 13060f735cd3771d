"""What planning is asked and answers, and what the spec of a run says of it."""

__all__ = [
    "asked",
    "request",
    "requirements",
    "run_spec",
]
