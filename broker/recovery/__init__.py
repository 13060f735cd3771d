"""What follows when a holder is lost or leaves: who takes its part, and from which step its replica
goes on. Pure functions of a view; whoever carries them out is in `runs/`."""
