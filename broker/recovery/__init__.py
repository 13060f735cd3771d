"""What follows when a holder is lost or leaves: who takes its part, and from which step the run
goes on."""

__all__ = [
    "handing",
    "recovery",
    "replica",
    "resume",
    "returning",
]
