"""What replicas exchange in a round: the vector of a run, its sums, and which peer gives which part
of it to whom."""

__all__ = ["fragments", "sums", "vector", "wiring"]
