"""From an `nn.Module` to a graph. `capture` is the entry; the other files are its steps."""

__all__ = [
    "blocks",
    "capture",
    "draws_given",
    "export",
    "from_fx",
    "modes",
    "places",
    "proof",
    "python_state",
    "repeat",
    "reseed",
    "rewrite",
    "torch_calls",
    "trace",
    "value_proof",
]
