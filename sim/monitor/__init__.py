"""What must hold in every world, and the shortest run that breaks it."""

__all__ = [
    "codecs",
    "journal",
    "links",
    "monitor",
    "rounds",
    "terms",
    "violation",
    "work",
]
