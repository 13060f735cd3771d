"""Graphs made from graphs: the eval form, lowering to core ATen, mixed precision, and the
vocabulary head in blocks."""

__all__ = [
    "evaluation",
    "head",
    "lower",
    "lower_sizes",
    "norm",
    "precision",
    "simplify",
    "split_weights",
    "vocabulary",
]
