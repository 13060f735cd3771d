"""When a run takes snapshots, who keeps copies of them, and which of them make a complete set."""

__all__ = [
    "cadence",
    "checkpoints",
    "keepers",
    "sets",
]
