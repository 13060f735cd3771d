"""Who may come in, who may call what, and how often. Decisions only."""

__all__ = [
    "admission",
    "admissions_file",
    "guard",
    "limits",
]
