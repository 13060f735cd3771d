"""From peers to replicas: who holds the model together, what a round of them takes, and why."""

__all__ = [
    "beside",
    "copies",
    "division",
    "form",
    "formation",
    "gather",
    "pace",
    "rough",
    "rounds",
    "search",
]
