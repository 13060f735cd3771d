"""What a plan costs before it runs: work, memory, and the event calculation that gives the time of
a step."""

__all__ = [
    "cost",
    "count",
    "estimate",
    "memory",
    "memory_table",
    "network",
    "pace",
    "play",
    "program",
    "speed",
    "storages",
    "trial",
    "unshared",
    "weight_costs",
]
