"""The pictures of the report as lists of shapes, and their colours."""

__all__ = [
    "atlas",
    "charts",
    "crowd",
    "heat",
    "palette",
    "picture",
    "planned_timeline",
    "timeline",
]
