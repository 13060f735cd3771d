"""The peer's decisions: facts in, instructions out. No I/O, no clock, no threads, no torch."""

__all__ = [
    "ahead",
    "assignment",
    "attachment",
    "drain",
    "events",
    "load",
    "machine",
    "options",
    "probe",
    "reports",
    "rounds",
    "snapshot_manager",
    "snapshots",
    "step",
    "traffic",
]
