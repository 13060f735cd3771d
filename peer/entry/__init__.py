"""How a peer begins: `shoal join` supervises one worker process per device."""

__all__ = [
    "supervisor",
    "swarm",
    "worker",
]
