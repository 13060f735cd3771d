"""Gossip: which two replicas meet in which round, as pure functions of seed, round, links and who
is there; what has to be measured for that; and how fast what they meet about spreads."""

__all__ = [
    "matching",
    "measuring",
    "mixing",
    "selection",
    "threshold",
]
