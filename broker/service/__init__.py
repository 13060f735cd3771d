"""The daemon: gRPC services, blobs on disk, and the shell that carries the machine's instructions
out."""

__all__ = [
    "admitting",
    "blobs",
    "blobs_service",
    "broker_id",
    "calls",
    "door",
    "needed",
    "page",
    "secured",
    "server",
    "services",
    "shell",
]
