"""One run from its submission to its end: its phases, terms, steps and history."""

__all__ = [
    "durable",
    "history",
    "phases",
    "runs",
    "space",
    "steps",
    "terms",
]
