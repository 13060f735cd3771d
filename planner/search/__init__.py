"""Local search over candidates: where it begins, its moves, and the reasons that it gives."""
