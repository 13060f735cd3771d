"""What a trace says of a run in numbers, and in one sentence."""
