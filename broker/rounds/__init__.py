"""Rounds between the replicas of a run: when they begin and end, who is in them, and who exchanges
what with whom."""

__all__ = [
    "attempts",
    "contributions",
    "coordinator",
    "disputes",
    "evaluations",
    "exchange",
    "gossip",
    "handing",
    "pairs",
    "saving",
    "segments",
    "telling",
    "version",
    "work",
]
