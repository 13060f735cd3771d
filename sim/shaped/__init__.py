"""Real processes as if they were far apart: shaped paths, stretched compute, faults."""

__all__ = [
    "contention",
    "forwarder",
    "forwarding",
    "pacing",
    "pipes",
    "run",
    "shaping",
    "staging",
    "surface",
]
