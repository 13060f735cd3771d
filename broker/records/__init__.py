"""What the journal replays of a run and of its replicas: it changes by events only, and what an
event makes of it follows from the two alone."""
