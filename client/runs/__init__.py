"""A run as its submitter has it: submitted, followed, evaluated, continued, its checkpoints and
weights brought home."""

__all__ = [
    "checkpoints",
    "evaluate",
    "half",
    "resume",
    "run",
    "session",
    "weights",
]
