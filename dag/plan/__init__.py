"""The plan as data: who holds which stage, what each action is, and which values cross from stage
to stage; and beside it its report, for people."""

__all__ = [
    "action",
    "cut",
    "messages",
    "outline",
    "plan",
    "plan_slice",
    "report",
    "routes",
    "strategies",
    "visit_lists",
]
