"""Settings of clients: who has what, what they do in a round, what they send of it."""
