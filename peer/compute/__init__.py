"""What a peer does with tensors: building stages, running their actions, codecs of its frames,
snapshots of its state."""

__all__ = [
    "build",
    "codings",
    "device",
    "exchange",
    "graph_checks",
    "inputs",
    "order",
    "rebuilt",
    "records",
    "store",
    "streams",
    "stretch",
    "uses",
    "warming",
]
