"""The control plane: who is here, what runs, who runs what. `machine.py` decides (no I/O),
`service/server.py` carries out; `events.py` lists what passes between them."""

__all__ = [
    "access",
    "clients",
    "events",
    "journal",
    "links",
    "machine",
    "membership",
    "options",
    "placement",
    "records",
    "recovery",
    "registry",
    "round_rows",
    "rounds",
    "runs",
    "service",
    "snapshots",
    "validate",
]
