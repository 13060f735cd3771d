"""The net room: links between peers, and what carries them; it knows no jobs."""

__all__ = [
    "address",
    "blobs",
    "cap",
    "discovery",
    "file_names",
    "finite",
    "grpc_quirks",
    "identity",
    "interrupts",
    "knocks",
    "links",
    "local",
    "printable",
    "repeats",
    "surroundings",
    "temporary",
    "transports",
    "web",
]
