"""Gossip: which two replicas meet in which round, as pure functions of seed, round, links and who
is there; and how fast what they meet about spreads."""

__all__ = [
    "matching",
    "mixing",
    "selection",
    "threshold",
]
