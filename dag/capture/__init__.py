"""From an `nn.Module` to a graph. `capture` is the entry; the other files are its steps."""
