"""Rounds between the replicas of a run: when they begin and end, who is in them, and who exchanges
what with whom."""
