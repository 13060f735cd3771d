"""What replicas do between their own steps, on tensors. `work` has everything of one holder, from
what its stages moved to the next version of them, `entries` what is kept of each meanwhile, and
`buffers` what is otherwise with those; `attempt` is one exchange of that with others, `coding` how
it is written, and `side_by_side` how results are of which nothing is added up on its way.
`strategy` says what the next version is, `strategies` which methods there are; `local` has which
samples a replica trains on meanwhile."""
