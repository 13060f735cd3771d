"""The scenario file, from its text to frozen records."""

__all__ = [
    "catalogue",
    "checks",
    "devices",
    "mishaps",
    "naming",
    "networks",
    "scenario",
    "sentences",
    "tables",
    "topologies",
]
