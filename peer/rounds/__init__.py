"""What replicas do between their own steps, on tensors. `work` has everything of one holder, from
what its stages moved to the next version of them; `attempt` is one exchange of that with others,
and `coding` how it is written. `strategy` says what the next version is, `strategies` which methods
there are; `local` has which samples a replica trains on meanwhile."""

__all__ = [
    "attempt",
    "coding",
    "digest",
    "diloco",
    "local",
    "sparse_loco",
    "strategies",
    "strategy",
    "streaming",
    "work",
]
