"""Peers by their links: missing links completed, communities, groups, orders, and cuts along a path
of peers."""

__all__ = [
    "communities",
    "completion",
    "grouping",
    "matching",
    "order",
    "pathcut",
]
