"""The worker process around the machine: asyncio, gRPC, threads of the device, credentials, and the
way to the broker."""

__all__ = [
    "attempt",
    "control",
    "credentials",
    "daemon",
    "event_log",
    "lane",
    "opening",
    "owner",
    "peer_links",
    "relayed",
    "spans",
    "upstream",
    "workbench",
]
