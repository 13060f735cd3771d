"""What replicas exchange in a round: the vector of a run, its sums, the hash of a version, and
which peer gives which part of it to whom."""
