"""The peer's decisions: facts in, instructions out. No I/O, no clock, no threads, no torch."""
