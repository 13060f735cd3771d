"""All planners by the name that a job gives them, and how a better plan is told from noise."""

__all__ = [
    "alternatives",
    "auto",
    "coded",
    "form_result",
    "replan",
    "schedulers",
    "swapped",
]
