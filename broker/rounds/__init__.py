"""Rounds between replicas: who exchanges what with whom, and when."""

__all__ = ["pairs"]
