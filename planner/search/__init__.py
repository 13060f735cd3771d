"""Local search over candidates: where it begins, its moves, and the reasons that it gives."""

__all__ = [
    "beside",
    "collectives",
    "enough",
    "moves",
    "parallel",
    "reasons",
    "search",
    "seeds",
    "sparsity",
]
