"""Carrying out requests: plans, replicas, comparisons and previews; which plans are of no use."""

__all__ = [
    "bad_plan",
    "forming",
    "leaving_out",
    "planned_step",
    "planning",
    "preview",
    "risk",
]
