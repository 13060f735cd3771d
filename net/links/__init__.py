"""One link without I/O: frames, credits, what is sent and what came, over any number of
connections."""

__all__ = [
    "buffers",
    "connection",
    "frame",
    "inbox",
    "link",
    "messages",
    "outbox",
    "patience",
    "switchboard",
    "transport",
]
