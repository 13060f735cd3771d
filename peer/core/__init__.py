"""The peer's decisions: facts in, instructions out. No I/O, no clock, no threads, no torch."""

__all__ = [
    "assignment",
    "attachment",
    "drain",
    "events",
    "machine",
    "options",
    "rates",
    "reports",
    "rounds",
    "run_links",
    "snapshot_manager",
    "snapshots",
    "step",
]
