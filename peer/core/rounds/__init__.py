"""What a holder decides in the rounds between replicas. `rounds` says what comes when, from the
first local step to the next version, and which steps may be done; `round_exchange` has the frames
of one attempt and the links that these take, and `repeated_sums` what is added up again of it."""
