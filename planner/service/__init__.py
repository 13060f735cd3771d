"""Planning in processes of its own, and what passes between them and who asks."""

__all__ = [
    "answer_bytes",
    "children",
    "planner",
    "process",
    "said",
    "wire",
]
