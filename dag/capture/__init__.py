"""From an `nn.Module` to a graph. `capture` is the entry; the other files are its steps."""

__all__ = [
    "blocks",
    "capture",
    "export",
    "from_fx",
    "modes",
    "places",
    "repeat",
    "rewrite",
    "trace",
]
