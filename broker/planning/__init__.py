"""Making plans in processes of their own, previews of them, and what is said to those processes."""

__all__ = [
    "answers",
    "children",
    "forming",
    "leaving_out",
    "planner",
    "planning",
    "preview",
    "process",
    "request",
    "risk",
    "said",
    "wire",
]
