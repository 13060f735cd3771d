"""Training in the boring way, with torch alone: what `--verify` and tests compare a run with.
`oracle` has the steps of one process, `round_oracle` replicas that meet in rounds, `round_methods`
what each method makes of a round; `round_log` says what a run committed, and `plain_rounds` does
that once more. `federated` has rounds of cohorts, `federated_methods` what is made of these."""
