"""Local search over candidates: where it begins, its moves, and the reasons that it gives."""

__all__ = [
    "beside",
    "collectives",
    "depth",
    "enough",
    "moves",
    "parallel",
    "reasons",
    "search",
    "seeds",
    "sparsity",
]
