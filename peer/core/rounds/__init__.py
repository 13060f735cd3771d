"""What a holder decides in the rounds between replicas. `rounds` says what comes when, from the
last local step to the next version; `round_exchange` has the frames of one attempt, `round_links`
the links that these take, and `gate` which steps may be done."""
