"""Planners: from a graph and the peers on offer to a plan with its reasons."""

__all__ = [
    "base",
    "baselines",
    "codecs",
    "cost",
    "network",
    "planners",
    "replicas",
    "search",
    "swarm",
]
