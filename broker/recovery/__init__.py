"""What follows when a holder is lost or leaves: who takes its part, and from which step its replica
goes on. Pure functions of a view; whoever carries them out is in `runs/`."""

__all__ = [
    "lost_time",
    "recover",
    "replacements",
    "resume",
    "returning",
    "sibling",
    "suspects",
    "view",
]
