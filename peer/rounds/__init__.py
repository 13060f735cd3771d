"""What replicas do between their own steps, on tensors. `work` has everything of one holder, from
what its stages moved to the next version of them; `held_entries` are the entries that lie there,
and `round_frames` what comes and goes. `attempt` is one exchange with others, `coding` how it is
written, and `side_by_side` how results are of which nothing is added up on its way. `methods` says
what the next version is; `local` has which samples a replica trains on meanwhile."""
