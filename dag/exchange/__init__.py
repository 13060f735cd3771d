"""Exchanges inside a step: what is exchanged, among whom, and the collectives that carry it out."""

__all__ = [
    "all_to_all",
    "collective",
    "collectives",
    "engine",
    "gather",
    "hierarchical",
    "ring",
    "rows",
    "star",
    "tree",
    "wiring",
]
