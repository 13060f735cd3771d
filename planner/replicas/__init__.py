"""From peers to replicas: who holds the model together, what a round of them takes, and why."""
