"""What a person reads of a run and of a plan."""
