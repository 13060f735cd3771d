"""The plan as data: who holds which stage, what each action is, and which values cross from stage
to stage."""

__all__ = [
    "action",
    "cut",
    "plan",
    "strategies",
    "swaps",
]
