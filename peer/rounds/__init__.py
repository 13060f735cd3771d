"""What replicas do between their own steps, on tensors. `work` has everything of one holder, from
what its stages moved to the next version of them, and `round_frames` what comes and goes. `attempt`
is one exchange with others, `coding` how it is written, and `gathered` what is kept apart of it.
`part_algebra` and `algebra` say what is computed of parts and of entries, which `tensors` does, and
`client_tensors` of a run with clients. `methods` says what the next version is; `local` has which
samples a replica trains on meanwhile."""
