"""Peers by their links: missing links completed, communities, groups, orders, and cuts along a path
of peers."""
